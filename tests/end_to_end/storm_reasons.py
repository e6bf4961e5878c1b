"""Whether every stop of a storm has a reason, and the right one: Penstock's history against what the storm did.

A reason counts only as the facts bear it out: a drain that the storm made, a goodput that grows, another job that gets the GPUs.
What the storm saw from outside, the ends of runs, has to be explained by such a reason or by a fault of the storm's own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.model import JobId, Stop, StopCode
from penstock_scheduler.model.records import RoundRecord

LATE_S = 15.0
"""How far a stop may lie from the round that decided it, or from the command of the storm that caused it."""

FORGETS_S = 12.0
"""What slurmctld may forget when it is killed: it saves its state every 5 s, and that may take long on a busy machine."""


SENT_S = 10.0
"""How long slurmctld may take to find that it cannot send a job to its node."""


@dataclass(slots=True)
class Facts:
    """What the storm did. Times in seconds since 1970."""

    drained: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Node -> spans in which it was drained."""
    requeued: dict[JobId, list[float]] = field(default_factory=dict)
    slurmd_killed: dict[str, list[float]] = field(default_factory=dict)
    slurmctld_killed: list[float] = field(default_factory=list)
    munged_away: list[tuple[float, float]] = field(default_factory=list)
    """Spans in which slurmctld could send nothing to nodes: it requeues a job that it cannot launch."""

    def drains(self, node: str, from_s: float, to_s: float) -> bool:
        """Whether the node was drained at some time in between."""
        return any(begin <= to_s and end >= from_s for begin, end in self.drained.get(node, ()))


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended and was followed by another one of its job. Times in seconds since 1970."""

    job: JobId
    nodes: frozenset[str]
    start_s: float
    seen_s: float
    """When it was there for the last time."""
    gone_s: float
    """When it was gone for certain."""


def wrong_reasons(record: RoundRecord, facts: Facts) -> list[str]:
    """The stops of a round whose reason is not what happened."""
    jobs = {job.id: job for job in record.snapshot.jobs}
    found = []
    for job_id, stop in record.plan.stops.items():
        held = jobs[job_id].running_on
        if held is None or not _is_true(record, job_id, stop, frozenset(held.nodes), facts):
            found.append(f"round {record.snapshot.round}: job {job_id} on {held}: {stop}")
    return found


def _is_true(record: RoundRecord, job: JobId, stop: Stop, nodes: frozenset[str], facts: Facts) -> bool:
    given = record.plan.assignments.get(job)
    now_s = record.snapshot.time_s
    if stop.code is StopCode.DRAIN:
        asks = {f"node {node} asks its jobs to leave: drain (storm)": node for node in nodes}
        # The time of a snapshot is when penstockd began to read Slurm, and it reads the nodes later.
        return stop.text in asks and facts.drains(asks[stop.text], now_s - LATE_S, now_s + LATE_S)
    if stop.code is StopCode.GAIN:
        before, after = stop.goodput_before, stop.goodput_after
        return given is not None and before is not None and after == given.goodput and after > before
    if stop.code is StopCode.PREEMPTED:
        other = record.plan.assignments.get(stop.makes_room_for)
        return other is not None and stop.makes_room_for != job
    return False  # nothing else happens in a storm


def history_without_a_round(
    lines: Iterable[tuple[float, JobId, int, Stop]], records: Mapping[int, RoundRecord]
) -> list[str]:
    """Lines of the history whose reason no round gave.

    Args:
        lines: (time, job, round of its action, reason).
        records: the rounds by number.
    """
    found = []
    for time_s, job, number, stop in lines:
        record = records.get(number)
        given = () if record is None else (record.plan.stops.get(job), record.stopping.get(job))
        if stop not in given and stop.code is not StopCode.NO_GPUS:
            found.append(f"{time_s}: job {job}, round {number}: {stop}")
    return found


class Reasons:
    """When Penstock had a reason to stop a job, by all rounds of a storm in order."""

    def __init__(self, records: Sequence[RoundRecord], own: Iterable[tuple[float, JobId]] = ()) -> None:
        """`own`: (time, job) of stops with a reason that no round decided."""
        self._times: dict[JobId, list[float]] = {}
        for record in records:
            for job in {**record.stopping, **record.plan.stops}:
                self._times.setdefault(job, []).append(record.snapshot.time_s)
        for time_s, job in own:
            bisect.insort(self._times.setdefault(job, []), time_s)

    def had(self, job: JobId, from_s: float, to_s: float) -> bool:
        """Whether there was one in between."""
        times = self._times.get(job, ())
        at = bisect.bisect_left(times, from_s)
        return at < len(times) and times[at] <= to_s


def unexplained(runs: Iterable[Run], reasons: Reasons, facts: Facts) -> list[str]:
    """The runs that ended, and neither a reason of Penstock's nor a fault of the storm's tells why."""

    def by_storm(run: Run) -> bool:
        asked = any(run.start_s - 1 <= time_s <= run.gone_s for time_s in facts.requeued.get(run.job, ()))
        lost = any(
            run.start_s - LATE_S <= time_s <= run.gone_s
            for node in run.nodes
            for time_s in facts.slurmd_killed.get(node, ())
        )
        # A trainer reports its start when Python has begun, which is later than Slurm's start.
        young = any(run.start_s - LATE_S <= time_s <= run.start_s + FORGETS_S for time_s in facts.slurmctld_killed)
        away = any(begin_s <= run.seen_s and run.start_s - 1 <= end_s for begin_s, end_s in facts.munged_away)
        unsent = away and run.seen_s <= run.start_s + SENT_S
        return asked or lost or young or unsent

    return [
        f"job {run.job} on {','.join(sorted(run.nodes))}: {run.start_s:.1f} to between {run.seen_s:.1f} and {run.gone_s:.1f}"
        for run in runs
        if not reasons.had(run.job, max(run.seen_s, run.start_s) - LATE_S, run.gone_s) and not by_storm(run)
    ]
