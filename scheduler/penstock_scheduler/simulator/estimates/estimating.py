"""Estimates of when the jobs of a round will start and end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock_scheduler.model import Job, JobId, JobSpec, Phase, Plan, ReasonCode, Snapshot
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import RoundFailed
from penstock_scheduler.people.units import duration
from penstock_scheduler.rounds.forecast import with_job
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator.estimates.futures import HORIZON_S, Facts, Future, play
from penstock_scheduler.simulator.estimates.past import FEWEST, Past
from penstock_scheduler.simulator.run import driving_of

CHANCE = 0.8
"""Probability with which a range is meant to contain what happens."""

FUTURES = 19
"""With so many futures, the second and the last but one are the ends of a range of 80 %: a further future falls into each of
the 20 gaps with the same probability."""

SOON_S = 60.0
"""Time from now on to which a range of a few seconds is as wide as one of a minute."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of times from now on, s."""

    low_s: float
    middle_s: float
    """The median."""
    high_s: float
    """Infinite, as the median may be: after the end of the futures."""

    def holds(self, after_s: float) -> bool:
        """Whether it contains a time."""
        return self.low_s <= after_s <= self.high_s

    def widened(self, width: float) -> Range:
        """A range whose ends are `width` times as far from the median, on a logarithmic scale."""
        if not math.isfinite(self.middle_s):
            return replace(self, low_s=self.low_s / max(width, 1.0))
        scale_s = self.middle_s + SOON_S
        low_s = max(scale_s * ((self.low_s + SOON_S) / scale_s) ** width - SOON_S, 0.0)
        if not math.isfinite(self.high_s):
            return replace(self, low_s=low_s)
        return replace(self, low_s=low_s, high_s=scale_s * ((self.high_s + SOON_S) / scale_s) ** width - SOON_S)


def range_of(after_s: Sequence[float]) -> Range | None:
    """The range of `CHANCE` for one time, from the same time in each future; None: even its beginning is after their end.

    Args:
        after_s: s from now on.
    """
    ordered = np.sort(np.asarray(after_s, dtype=np.float64))
    rank = (len(ordered) + 1) * (1 - CHANCE) / 2 - 1
    low_s, middle_s, high_s = (_at(ordered, place) for place in (rank, (len(ordered) - 1) / 2, len(ordered) - 1 - rank))
    return Range(low_s, middle_s, high_s) if math.isfinite(low_s) else None


def _at(ordered: np.ndarray[tuple[int], np.dtype[np.float64]], place: float) -> float:
    """The value at a place between two, in proportion; infinite if one of the two is."""
    place = min(max(place, 0.0), len(ordered) - 1.0)
    below, share = int(place), place - int(place)
    if share == 0:
        return float(ordered[below])
    return float(ordered[below] * (1 - share) + ordered[below + 1] * share)


SIZES = 4
"""Numbers of GPUs for which the start of a new job is estimated, at most."""
NEW = "new"
"""Id of the new job."""
NEW_SHARE = 0.25
"""Share of the time for the starts of new jobs."""


@dataclass(frozen=True, slots=True)
class JobRanges:
    """When a job will start and end, as ranges in s from the round on."""

    start: Range | None = None
    """Of a job that holds no GPUs; None: it holds some, or the start is not known."""
    end: Range | None = None
    """None: not known."""
    unknown: str = ""
    """Why the start of a job that waits, or the end, is not known, as a sentence without a capital; empty: it is."""


@dataclass(frozen=True, slots=True)
class Estimated:
    """What was estimated from a round."""

    jobs: dict[JobId, JobRanges]
    new: dict[int, Range]
    """Number of GPUs -> when a job starts that is submitted now and needs so many, of any type. Only the numbers that earlier
    jobs needed most often."""

    def widened(self, widths: Widths) -> Estimated:
        """With ranges of these widths."""
        jobs = {
            job: replace(
                each,
                start=None if each.start is None else each.start.widened(widths.start),
                end=None if each.end is None else each.end.widened(widths.end),
            )
            for job, each in self.jobs.items()
        }
        return Estimated(jobs, {gpus: each.widened(widths.start) for gpus, each in self.new.items()})


@dataclass(frozen=True, slots=True)
class Widths:
    """Factors on the widths of ranges; see `Range.widened`."""

    start: float = 1.0
    end: float = 1.0


def estimate(
    record: RoundRecord,
    past: Past,
    facts: Facts,
    *,
    seed: int = 0,
    most_s: float | None = None,
    clock: Callable[[], float] = time.process_time,
) -> Estimated:
    """Estimate the start and the end of each job of a round, and the starts of jobs that are submitted now: as drawn, from the
    second to the last but one of the futures.

    Args:
        record: the round.
        past: the site's earlier jobs.
        facts: for jobs that may be submitted.
        seed: of the random numbers.
        most_s: seconds of `clock` that it may take; None: as long as it takes.
    """
    site = _Site(record, past, facts, seed)
    sizes = past.common_sizes(SIZES) if past.known else ()
    begun_s, share = clock(), 1 - NEW_SHARE

    def expired(share: float) -> Callable[[], bool]:
        until_s = math.inf if most_s is None else begun_s + most_s * share
        return lambda: clock() > until_s

    # Each future has the same time, because what a future does not reach counts as late.
    futures = [site.future(number, expired(share * (number + 1) / FUTURES)) for number in range(FUTURES)]
    jobs = {job.id: _estimate(record, job, past, futures) for job in record.snapshot.jobs}
    parts = FUTURES * max(len(sizes), 1)
    new = {
        gpus: site.new_job(
            gpus, [expired(share + NEW_SHARE * (FUTURES * at + number + 1) / parts) for number in range(FUTURES)]
        )
        for at, gpus in enumerate(sizes)
    }
    return Estimated(jobs, {gpus: found for gpus, found in new.items() if found is not None})


class _Site:
    """What all futures of a round have in common."""

    def __init__(self, record: RoundRecord, past: Past, facts: Facts, seed: int) -> None:
        self._record, self._past, self._facts, self._seed = record, past, facts, seed
        self._policy, _ = make_policy(record.policy)
        self._by_events = driving_of(record.policy).round_s is None

    def future(self, number: int, expired: Callable[[], bool]) -> Future:
        """One future of the jobs of the round."""
        return self._play(self._record.snapshot, self._record.plan, number, expired)

    def new_job(self, gpus: int, expired: Sequence[Callable[[], bool]]) -> Range | None:
        """When a job starts that is submitted now and needs so many GPUs; None: it is not known. `expired`: of each future."""
        before = self._record.snapshot
        partitions = tuple(sorted({name for node in before.nodes for name in node.partitions}))
        spec = JobSpec(min_gpus=gpus, max_gpus=gpus)
        job = Job(NEW, "", "", spec, partitions, Phase.QUEUED, before.time_s)
        snapshot = with_job(before, job, self._facts([job]), ())
        try:
            plan = self._policy.decide(snapshot)
        except RoundFailed:
            return None
        if (reason := plan.waiting.get(NEW)) is not None and reason.code is ReasonCode.NEVER_FITS:
            return None
        futures = [self._play(snapshot, plan, number, each, until_start=NEW) for number, each in enumerate(expired)]
        if min(each.until_s for each in futures) < before.time_s + HORIZON_S:
            return None  # it takes too long to play that far
        return range_of([each.jobs[NEW].start_s - before.time_s for each in futures])

    def _play(
        self,
        snapshot: Snapshot,
        plan: Plan,
        number: int,
        expired: Callable[[], bool],
        until_start: JobId | None = None,
    ) -> Future:
        draw = np.random.default_rng((self._seed, snapshot.round, number))
        return play(
            snapshot,
            plan,
            self._policy,
            self._past,
            self._facts,
            draw,
            by_events=self._by_events,
            expired=expired,
            until_start=until_start,
        )


def _estimate(record: RoundRecord, job: Job, past: Past, futures: list[Future]) -> JobRanges:
    if why := _unknown(record, job, past):
        return JobRanges(unknown=why)
    now_s = record.snapshot.time_s
    waits = job.id not in record.plan.assignments and job.phase is Phase.QUEUED
    start = range_of([each.jobs[job.id].start_s - now_s for each in futures]) if waits else None
    end = range_of([each.jobs[job.id].end_s - now_s for each in futures])
    if end is not None and (start is not None or not waits):
        return JobRanges(start, end)
    reach_s = min(each.until_s for each in futures) - now_s
    what = "start" if waits and start is None else "end"
    far = f"its {what} is more than {duration(reach_s)} away, and no further is estimated"
    return JobRanges(start, end, far if reach_s > 0 else "this many jobs take too long to estimate")


def _unknown(record: RoundRecord, job: Job, past: Past) -> str:
    """Why nothing can be said about a job; empty: something can."""
    snapshot, plan = record.snapshot, record.plan
    if job.id in plan.bursts or (snapshot.cloud is not None and any(run.job == job.id for run in snapshot.cloud.runs)):
        return "it is the cloud's, and only jobs on site are estimated"
    groups = () if snapshot.sharing is None else snapshot.sharing.groups
    if any(job.id in group.jobs and len(group.jobs) > 1 for group in groups):
        return "it shares GPUs, and how fast jobs are that share GPUs is not estimated"
    if (reason := plan.waiting.get(job.id)) is not None and reason.code is ReasonCode.NEVER_FITS:
        return "it can never start as it is"
    if past.known:
        return ""
    asked = (job,) if job.id in plan.assignments else snapshot.jobs
    facts = (snapshot.facts[each.id] for each in asked)
    if all(each.remaining_work is not None or each.likely_work for each in facts):
        return ""
    whose = "it does" if job.id in plan.assignments else "it, or a job before it, does"
    return f"{whose} not report how much work is left, and fewer than {FEWEST} jobs have ended here to compare with"
