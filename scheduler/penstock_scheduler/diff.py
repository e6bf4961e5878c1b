"""The difference between a plan and what the cluster is running, as actions."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_scheduler.model import Action, Hold, Job, Migrate, Phase, Plan, Resize, Start


def actions(plan: Plan, jobs: Iterable[Job]) -> tuple[Action, ...]:
    """What is left to do, stops before starts so that GPUs come free for those who need them.

    Derived anew from what the cluster reports each time, so it does not matter how often, or by which process, it is
    asked: when the cluster looks like the plan, there is nothing left. A job that the plan does not know (it came after
    the round) is left alone.
    """
    todo = [action for job in jobs if (action := _action(plan, job)) is not None]
    return tuple(sorted(todo, key=lambda action: (isinstance(action, Start), action.job)))


def _action(plan: Plan, job: Job) -> Action | None:
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
