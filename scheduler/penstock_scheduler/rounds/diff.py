"""The difference between a plan and what the cluster is running, as actions."""

from __future__ import annotations

from collections.abc import Container, Iterable

from penstock_scheduler.model import (
    Action,
    BurstJob,
    CloudAction,
    CloudRun,
    Hold,
    Job,
    JobId,
    Migrate,
    Phase,
    Plan,
    Recall,
    Resize,
    Start,
)


def concerned(plan: Plan, jobs: Iterable[Job]) -> list[Job]:
    """The jobs that a plan may have something to do with: all but those that are in the queue and stay there."""
    given = plan.assignments.keys() | plan.bursts.keys() | plan.recalls.keys()
    return [job for job in jobs if job.phase is not Phase.QUEUED or job.id in given]


def actions(plan: Plan, jobs: Iterable[Job], away: Container[JobId] = ()) -> tuple[Action, ...]:
    """What is left to do on the cluster, stops before starts so that GPUs come free.

    Each call derives it anew from what the cluster reports. So it does not matter how often, or by which process, it is
    called: once the cluster matches the plan, nothing is left. A running job for whose stop the plan has no reason is left
    alone: it came to run after the round was decided, or the plan should not have touched it. A job that the plan does not
    know (it came after the round) is left alone, and so is a job that is in the cloud or on its way there or back (`away`).
    """
    todo = [action for job in jobs if job.id not in away and (action := _action(plan, job)) is not None]
    return tuple(sorted(todo, key=lambda action: (isinstance(action, Start), action.job)))


def cloud_actions(plan: Plan, jobs: Iterable[Job], runs: Iterable[CloudRun]) -> tuple[CloudAction, ...]:
    """What is left to do in the cloud: recalls first, so that the money committed to them comes free.

    A job leaves only while it waits. A job that holds GPUs or is about to is not sent away as well. Nor is a job that was
    away when the round was decided and has come back since: the next round says whether it may leave again.
    """
    away = {run.job: run for run in runs}
    back = [Recall(job, plan.round) for job in sorted(plan.recalls) if job in away]
    queued = {job.id for job in jobs if job.phase is Phase.QUEUED and job.allocation is None}
    leave = [
        BurstJob(job, plan.round, burst.offer.id, burst.usd)
        for job, burst in sorted(plan.bursts.items())
        if not burst.stays and job not in away and job in queued and job not in plan.recalls
    ]
    return (*back, *leave)


def _action(plan: Plan, job: Job) -> Action | None:
    if job.phase is Phase.RUNNING and job.id not in plan.stops:
        return None  # no reason, no stop
    assignment = plan.assignments.get(job.id)
    if assignment is None:
        if job.id not in plan.waiting or job.phase is Phase.QUEUED:
            return None
        return Hold(job.id, plan.round)
    wanted = assignment.placement
    if job.phase in (Phase.QUEUED, Phase.STARTING):
        return Start(job.id, plan.round, wanted)
    held = job.allocation
    if job.phase is not Phase.STOPPING and held is not None and wanted.suits(held):
        return None
    if held is not None and held.gpu_type == wanted.gpu_type and held.gpus != wanted.gpus:
        return Resize(job.id, plan.round, wanted)
    return Migrate(job.id, plan.round, wanted)
