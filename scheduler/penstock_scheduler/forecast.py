"""What a round would decide if one more job were there: for `penstock submit --dry-run`, `penstock plan` and the API.

Nothing is asked of the cluster here: a snapshot, the job, and the policy that decides.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from penstock_scheduler.model import Assignment, GpuLimit, Job, JobId, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.models import Models
from penstock_scheduler.policies.common import allowed, configurations, open_nodes, rate, remaining_s
from penstock_scheduler.policies.room import Room, Timeline
from penstock_scheduler.ports import Policy
from penstock_scheduler.units import duration


@dataclass(frozen=True, slots=True)
class Answer:
    """What would become of the job, and of others because of it."""

    plan: Plan
    assignment: Assignment | None
    reason: Reason
    others: dict[JobId, tuple[Assignment | None, Assignment | None]]
    """Jobs that would have something else than without it: (without, with); None is nothing."""
    start_s: float | None
    """When it would begin, about, s since 1970; None: not known."""


def with_job(snapshot: Snapshot, job: Job, models: Models, limits: tuple[GpuLimit, ...]) -> Snapshot:
    """The snapshot with one more job.

    Args:
        snapshot: a round's.
        job: the job, with an id that no other has.
        models: what is known about it.
        limits: those that bear on it; the ones that the snapshot has already are not doubled.
    """
    return dataclasses.replace(
        snapshot,
        jobs=(*snapshot.jobs, job),
        models=snapshot.models | models.estimators,
        restart_costs_s=snapshot.restart_costs_s | models.restart_costs_s,
        unscaled=snapshot.unscaled | models.unscaled,
        unmeasured=snapshot.unmeasured | models.unmeasured,
        sensitivities=snapshot.sensitivities | models.sensitivities,
        limits=tuple(dict.fromkeys((*snapshot.limits, *limits))),
    )


def ask(policy: Policy, snapshot: Snapshot, job_id: JobId, without: Plan | None = None) -> Answer:
    """What `policy` decides on `snapshot` about one of its jobs, and what that means for the others.

    Args:
        without: what it has decided without the job; None: that is decided, too.

    Raises:
        RoundFailed: no usable plan.
    """
    job = next(job for job in snapshot.jobs if job.id == job_id)
    others = tuple(job for job in snapshot.jobs if job.id != job_id)
    plan = policy.decide(snapshot)
    if without is None:
        without = policy.decide(dataclasses.replace(snapshot, jobs=others))
    changed = {
        other.id: (before, after)
        for other in others
        if (before := without.assignments.get(other.id)) != (after := plan.assignments.get(other.id))
        and _configuration(before) != _configuration(after)
    }
    assignment = plan.assignments.get(job_id)
    if assignment is not None:
        return Answer(plan, assignment, assignment.reason, changed, snapshot.time_s)
    reason = plan.waiting[job_id]
    start_s = reason.estimated_start_s
    if start_s is None and reason.code not in (ReasonCode.GPU_BUDGET, ReasonCode.NEVER_FITS):
        start_s = rough_start_s(snapshot, plan, job)
    return Answer(plan, None, reason, changed, start_s)


def words(answer: Answer, now_s: float, names: Mapping[JobId, str] | None = None) -> list[str]:
    """The answer in sentences, line by line.

    Args:
        now_s: s since 1970.
        names: of the other jobs, for those who may see them; None: they are only counted.
    """
    given, why, lines = answer.assignment, answer.reason, []
    if given is not None:
        nodes = ", ".join(f"{share.gpus} on {share.node}" for share in given.placement.shares)
        lines.append(f"it would get {given.configuration} ({nodes}): {why.text}")
    else:
        lines.append(f"it {'could not start' if why.code is ReasonCode.NEVER_FITS else 'would wait'}: {why.text}")
        if why.needs:
            lines.append(f"  it needs {why.needs}")
        if answer.start_s is not None:
            at = time.strftime("%a %H:%M", time.localtime(answer.start_s))
            from_now = duration(max(answer.start_s - now_s, 0.0))
            lines.append(f"  it would start {at}, about, if nobody else comes ({from_now} from now)")
        elif why.code not in (ReasonCode.GPU_BUDGET, ReasonCode.NEVER_FITS):
            lines.append("  when it would start is not known: nothing says when those that hold GPUs now will end")
    if names is None:
        lines += (
            [f"  {len(answer.others)} other jobs would have something else than without it"] if answer.others else []
        )
    else:
        for job, (before, after) in sorted(answer.others.items()):
            lines.append(f"  job {job} ({names[job]}) would have {_has(after)} in place of {_has(before)}")
    return lines


def _has(assignment: Assignment | None) -> str:
    return "nothing" if assignment is None else str(assignment.configuration)


def _configuration(assignment: Assignment | None) -> object:
    return None if assignment is None else assignment.configuration


def rough_start_s(snapshot: Snapshot, plan: Plan, job: Job) -> float | None:
    """When those that have GPUs in this plan will have left enough of them, if nobody else comes; None: nobody can say.

    By the work that is left of them, or by their time limits, which is from above. When jobs end that Penstock does not
    manage is not known.
    """
    options = sorted(
        (option for option in configurations(open_nodes(snapshot.nodes, job)) if allowed(job, option)),
        key=lambda option: (option.gpus, option.nodes),
    )
    room = Room(snapshot.nodes, snapshot.limits, "best")
    ends = []
    for other in snapshot.jobs:
        given = plan.assignments.get(other.id)
        if given is None:
            continue
        room.take(other, given.placement)
        left_s = remaining_s(snapshot, other, given.configuration, rate(snapshot.models[other.id], given.configuration))
        ends.append((snapshot.time_s + max(left_s, 1.0) if left_s is not None else math.inf, given.placement))
    found = Timeline(room, snapshot.time_s, ends).earliest(job, options, lambda option: math.inf)
    return found[0] if found is not None and found[0] > snapshot.time_s else None
