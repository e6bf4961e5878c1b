"""What a round would decide with one more job, for `penstock submit --dry-run`, `penstock plan --dry-run` and the API.

The functions here need only a snapshot, the job and the policy. They do not ask the cluster.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from penstock_scheduler.api.ports import Policy
from penstock_scheduler.burst.deciding.choices import CloudForecast, forecast
from penstock_scheduler.model import Assignment, GpuLimit, Job, JobFacts, JobId, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.people.units import duration
from penstock_scheduler.rounds.free_gpus import FreeGpus, Timeline, open_nodes
from penstock_scheduler.rounds.policies.common import allowed, configurations, rate, remaining_s


@dataclass(frozen=True, slots=True)
class StartForecast:
    """What a round would decide about the job, and what would change for other jobs."""

    plan: Plan
    assignment: Assignment | None
    reason: Reason
    others: dict[JobId, tuple[Assignment | None, Assignment | None]]
    """Job whose allocation would change -> its assignment without and with the job; None: no GPUs."""
    start_s: float | None
    """When the job would start at the earliest estimate, s since 1970; None: not known."""
    cloud: CloudForecast | None = None
    """For a job that would wait: when it may leave for the cloud, and what that would cost."""
    leaves: bool = False
    """Whether the job would leave for the cloud in this round."""


def with_job(snapshot: Snapshot, job: Job, facts: Mapping[JobId, JobFacts], limits: tuple[GpuLimit, ...]) -> Snapshot:
    """The snapshot with one more job.

    Args:
        snapshot: of a round.
        job: the new job. Its id differs from those of all other jobs.
        facts: of the new job.
        limits: those that apply to the new job. Limits that the snapshot has already are not repeated.
    """
    return dataclasses.replace(
        snapshot,
        jobs=(*snapshot.jobs, job),
        facts={**snapshot.facts, **facts},
        limits=tuple(dict.fromkeys((*snapshot.limits, *limits))),
    )


def ask(policy: Policy, snapshot: Snapshot, job_id: JobId, without: Plan | None = None) -> StartForecast:
    """What a policy decides about one job of a snapshot, and what changes for the other jobs.

    Args:
        without: the plan without the job; None: the policy decides it, too.

    Raises:
        RoundFailed: the policy found no usable plan.
    """
    job = next(job for job in snapshot.jobs if job.id == job_id)
    others = tuple(job for job in snapshot.jobs if job.id != job_id)
    plan = policy.decide(snapshot)
    if without is None:
        without = policy.decide(snapshot.only(others))
    changed = {
        other.id: (before, after)
        for other in others
        if (before := without.assignments.get(other.id)) != (after := plan.assignments.get(other.id))
        and _configuration(before) != _configuration(after)
    }
    assignment = plan.assignments.get(job_id)
    if assignment is not None:
        return StartForecast(plan, assignment, assignment.reason, changed, snapshot.time_s)
    if (burst := plan.bursts.get(job_id)) is not None:
        return StartForecast(plan, None, burst.reason, changed, None, leaves=True)
    reason = plan.waiting[job_id]
    start_s = reason.estimated_start_s
    if start_s is None and reason.code not in (ReasonCode.GPU_BUDGET, ReasonCode.NEVER_FITS):
        start_s = rough_start_s(snapshot, plan, job)
    return StartForecast(plan, None, reason, changed, start_s, forecast(job, snapshot))


def describe(answer: StartForecast, now_s: float) -> list[str]:
    """The answer in sentences, one in each line. Other jobs are only counted: they may be other users'.

    Args:
        now_s: s since 1970.
    """
    if answer.assignment is not None:
        nodes = ", ".join(f"{share.gpus} on {share.node}" for share in answer.assignment.placement.shares)
        lines = [f"The job would get {answer.assignment.configuration} ({nodes}): {answer.reason.text}."]
    elif answer.leaves:
        lines = [f"The job would leave for the cloud: it {answer.reason.text}."]
    else:
        lines = _describe_wait(answer, now_s)
    if others := len(answer.others):
        lines.append(f"The allocation of {others} other job{'s' if others > 1 else ''} would change.")
    return lines


def _describe_wait(answer: StartForecast, now_s: float) -> list[str]:
    reason = answer.reason
    never = reason.code is ReasonCode.NEVER_FITS
    lines = [f"The job {'could never start' if never else 'would wait'}: {reason.text}."]
    if reason.needs:
        lines.append(f"It needs {reason.needs}.")
    if answer.start_s is not None:
        at = time.strftime("%a %H:%M", time.localtime(answer.start_s))
        wait = duration(max(answer.start_s - now_s, 0.0))
        lines.append(f"It would start at about {at}, in {wait}, if no other job is submitted.")
    elif reason.code not in (ReasonCode.GPU_BUDGET, ReasonCode.NEVER_FITS):
        lines.append("Its start cannot be estimated: it is unknown when the jobs that hold GPUs now will end.")
    if answer.cloud is not None and answer.cloud.why != reason.text:
        lines.append(answer.cloud.words(now_s))
    return lines


def _configuration(assignment: Assignment | None) -> object:
    return None if assignment is None else assignment.configuration


def rough_start_s(snapshot: Snapshot, plan: Plan, job: Job) -> float | None:
    """When enough GPUs for a waiting job will be free, s since 1970, if no other job is submitted; None: not known.

    A job with GPUs in the plan is expected to end when its remaining work is done or, where that is not known, at its time
    limit. The ends of jobs that Penstock does not manage are not known.
    """
    options = sorted(
        (option for option in configurations(open_nodes(snapshot.nodes, job)) if allowed(job, option)),
        key=lambda option: (option.gpus, option.nodes),
    )
    free = FreeGpus.of(snapshot)
    ends = []
    for other in snapshot.jobs:
        given = plan.assignments.get(other.id)
        if given is None:
            continue
        free.take(other, given.placement)
        left_s = remaining_s(
            snapshot, other, given.configuration, rate(snapshot.facts[other.id].model, given.configuration)
        )
        ends.append((snapshot.time_s + max(left_s, 1.0) if left_s is not None else math.inf, given.placement))
    found = Timeline(free, snapshot.time_s, ends).earliest(job, options, lambda option: math.inf)
    return found[0] if found is not None and found[0] > snapshot.time_s else None
