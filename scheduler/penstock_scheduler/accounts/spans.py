"""Which spans of allocations begin and end with an observation of the cluster. Pure: it reads no clock and no store.

A *span* is a time in which a job holds the same GPUs. It begins when a run begins, or when a run loses or shares GPUs, and ends
likewise. Times are the cluster's own where the cluster tells them (`Job.started_s`, `Job.stopped_s`, `EndedRun`). Otherwise the
end is estimated, as in `gpu_seconds`: the middle of the time in which it may have been.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.model import ClusterState, EndedRun, Job, JobId, Placement, Plan

Close = Literal["over", "resized", "sharing"]
"""What ended a span: its run is over; the run has other GPUs; it shares its GPUs, or does not any more."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A span that has ended."""

    span: AllocationSpan
    """With its end."""
    why: Close


@dataclass(frozen=True, slots=True)
class Followed:
    """What an observation changes."""

    closed: tuple[Closed, ...]
    opened: tuple[tuple[Job, float], ...]
    """Jobs with a new span, and its beginning."""
    missed: tuple[EndedRun, ...]
    """Runs that began and ended between two observations."""
    gone: tuple[JobId, ...]
    """Jobs with an open span that the observation does not show. They have ended, or cannot be read now."""
    moved: tuple[AllocationSpan, ...]
    """Open spans whose run began later, as the cluster says now."""


def follow(
    spans: Mapping[JobId, AllocationSpan], state: ClusterState, shared: Collection[JobId], seen_s: float, now_s: float
) -> Followed:
    """What this observation changes.

    Args:
        spans: job -> its open span.
        state: the observation.
        shared: jobs that share their GPUs with other jobs.
        seen_s: when the observation before it was made.
        now_s: when this observation was made.
    """
    present = state.present
    holding = {job.id: job for job in state.holding if job.allocation is not None and job.allocation.gpus > 0}
    ended = {run.job: run for run in state.ended if run.job not in present}
    closed: list[Closed] = []
    opened: dict[JobId, tuple[Job, float]] = {}
    gone: list[JobId] = []
    moved = _begun_later(spans, holding)
    for job_id, span in {**spans, **moved}.items():
        job = holding.get(job_id)
        if job is not None and _same_run(span, job):
            if (change := _change(span, job, shared)) is not None:
                at_s = max(now_s, span.from_s + 0.001)
                closed.append(Closed(_until(span, at_s, job.suspended_s), change))
                opened[job_id] = job, at_s
        elif job_id in present:
            end_s, exact = _end(span, present[job_id], holding.get(job_id), seen_s, now_s)
            closed.append(Closed(_until(span, end_s, exact=exact), "over"))
        else:
            gone.append(job_id)
    over = {each.span.job: each.span.to_s or 0.0 for each in closed}
    for job_id, job in holding.items():
        if job_id not in opened and (job_id not in spans or job_id in over):
            opened[job_id] = job, _begin_s(job, spans.get(job_id), over.get(job_id, 0.0), now_s)
    missed = (run for job_id, run in ended.items() if run.ended_s > seen_s and job_id not in spans)
    return Followed(tuple(closed), tuple(opened.values()), tuple(missed), tuple(gone), tuple(moved.values()))


def _begun_later(spans: Mapping[JobId, AllocationSpan], holding: Mapping[JobId, Job]) -> dict[JobId, AllocationSpan]:
    """The spans whose run began later than they say, with its beginning."""
    found = {}
    for job_id, span in spans.items():
        job = holding.get(job_id)
        if job is not None and job.started_s is not None and job.started_s > span.run_s and _same_run(span, job):
            found[job_id] = span.model_copy(update={"run_s": job.started_s})
    return found


def shared_jobs(plan: Plan | None) -> frozenset[JobId]:
    """Jobs that share their GPUs with another job in this plan."""
    groups = plan.shared if plan is not None else ()
    return frozenset(job for group in groups if len(group.jobs) > 1 for job in group.jobs)


def nodes_of(held: Placement) -> dict[str, int]:
    """Node -> GPUs."""
    return {share.node: share.gpus for share in held.shares}


def fits(span: AllocationSpan, gpu_ids: Mapping[str, Collection[int]]) -> bool:
    """Whether these indices can be those of the span's GPUs: as many on each of its nodes."""
    return {node: len(set(ids)) for node, ids in gpu_ids.items()} == span.nodes


def corrected(spans: Sequence[AllocationSpan], runs: Collection[EndedRun]) -> Iterator[AllocationSpan]:
    """Spans of one job whose estimated end the cluster's accounts tell: with that end.

    Args:
        spans: all spans of the job, oldest first.
        runs: its runs by the accounts.
    """
    ends = {run.started_s: run.ended_s for run in runs}
    following = [*(span.from_s for span in spans[1:]), math.inf]
    for span, next_s in zip(spans, following, strict=True):
        end_s = ends.get(span.run_s)
        if not span.exact and end_s is not None and span.from_s <= end_s <= next_s:
            yield span.model_copy(update={"to_s": end_s, "exact": True})


def unseen(spans: Sequence[AllocationSpan], runs: Iterable[EndedRun]) -> Iterator[AllocationSpan]:
    """Spans of runs that the accounts have, and that began and ended after the first of these spans while nobody looked."""
    first, known = spans[0], {span.run_s for span in spans}
    for run in runs:
        if run.held.gpu_type and run.held.gpus and run.started_s > first.run_s and run.started_s not in known:
            yield of_run(run, first.user, first.account, first.partition)


def of_run(run: EndedRun, user: str, account: str, partition: str) -> AllocationSpan:
    """The span of a whole run that is over."""
    return AllocationSpan(
        job=run.job,
        user=user,
        account=account,
        partition=run.held.partition or partition,
        gpu_type=run.held.gpu_type,
        nodes=nodes_of(run.held),
        run_s=run.started_s,
        from_s=run.started_s,
        to_s=run.ended_s,
        end="unknown",
        end_text="the run began and ended while penstockd did not look; Slurm's records tell its times",
    )


def _same_run(span: AllocationSpan, job: Job) -> bool:
    """Slurm moves the beginning of a run on a node that it boots to the moment at which the node is up.

    A slurmctld that has forgotten a run in a crash also says the same number of restarts, but hardly the same nodes.
    """
    if span.restarts != job.restarts:
        return False
    same = job.allocation is not None and nodes_of(job.allocation) == span.nodes
    return same or job.started_s is None or job.started_s <= max(span.from_s, span.run_s)


def _change(span: AllocationSpan, job: Job, shared: Collection[JobId]) -> Close | None:
    if job.allocation is not None and nodes_of(job.allocation) != span.nodes:
        return "resized"
    return "sharing" if (job.id in shared) != span.shared else None


def _begin_s(job: Job, before: AllocationSpan | None, over_s: float, now_s: float) -> float:
    """When a job's new span begins: not before its span `before`, which is over since `over_s`, has ended."""
    begin_s = now_s if job.started_s is None else job.started_s
    # A job has one span for each beginning, also if the one before had no length.
    return max(begin_s, over_s, 0.0 if before is None else before.from_s + 0.001)


def _end(span: AllocationSpan, job: Job, after: Job | None, seen_s: float, now_s: float) -> tuple[float, bool]:
    """(end of a run that is over, whether the cluster tells it); the job is still there.

    Args:
        span: the run's last span.
        job: the job now.
        after: the same, if a later run holds GPUs.
        seen_s: when the run was last seen.
        now_s: the time.
    """
    told = job.restarts == span.restarts + 1 or (job.leaving and job.restarts == span.restarts)
    if told and job.stopped_s is not None:
        return max(job.stopped_s, span.from_s), True
    limits = (now_s, job.requeued_s, after.started_s if after is not None else None)
    latest_s = max(min(time_s for time_s in limits if time_s is not None), span.from_s)
    return max((max(min(seen_s, latest_s), span.from_s) + latest_s) / 2, span.from_s), False


def _until(
    span: AllocationSpan, to_s: float, suspended_s: float | None = None, *, exact: bool = True
) -> AllocationSpan:
    changes = {"to_s": max(to_s, span.from_s), "exact": exact}
    return span.model_copy(update=changes | ({} if suspended_s is None else {"suspended_s": suspended_s}))
