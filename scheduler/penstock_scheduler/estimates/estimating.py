"""Estimates of when the jobs of a round will start and end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock_scheduler.estimates.futures import Facts, Future, play
from penstock_scheduler.estimates.past import FEWEST, Past
from penstock_scheduler.estimates.ranges import FUTURES, Range, range_of
from penstock_scheduler.model import Job, JobId, Phase, ReasonCode
from penstock_scheduler.policies import make_policy
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.simulator.run import driving_of
from penstock_scheduler.units import duration


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a job will start and end, as ranges of `ranges.CHANCE`, in s from the round on."""

    start: Range | None = None
    """Of a job that holds no GPUs; None: it holds some, or the start is not known."""
    end: Range | None = None
    """None: not known."""
    unknown: str = ""
    """Why the start of a job that waits, or the end, is not known, as a sentence without a capital; empty: it is."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Factors on the widths of ranges; see `range_of`."""

    start: float = 1.0
    end: float = 1.0


MEASURED = Widths(start=1.5, end=1.5)
"""Chosen on the first halves of the workloads of docs/measurements/estimates.md, where too few ranges held without them."""


def estimate(
    record: RoundRecord,
    past: Past,
    facts: Facts,
    *,
    widths: Widths = MEASURED,
    seed: int = 0,
    most_s: float | None = None,
    clock: Callable[[], float] = time.process_time,
) -> dict[JobId, Estimate]:
    """Estimate the start and the end of each job of a round.

    Args:
        record: the round.
        past: the site's earlier jobs.
        facts: for jobs that may be submitted.
        widths: factors on the widths of the ranges.
        seed: of the random numbers.
        most_s: seconds of `clock` that it may take; None: as long as it takes.
    """
    snapshot = record.snapshot
    policy, _ = make_policy(record.policy)
    by_events = driving_of(record.policy).round_s is None
    begun_s = clock()

    def future(number: int) -> Future:
        # Each future has the same time, because what a future does not reach counts as late.
        until_s = math.inf if most_s is None else begun_s + most_s * (number + 1) / FUTURES
        draw = np.random.default_rng((seed, snapshot.round, number))

        def expired() -> bool:
            return clock() > until_s

        return play(snapshot, record.plan, policy, past, facts, draw, by_events=by_events, expired=expired)

    futures = [future(number) for number in range(FUTURES)]
    return {job.id: _estimate(record, job, past, futures, widths) for job in snapshot.jobs}


def _estimate(record: RoundRecord, job: Job, past: Past, futures: list[Future], widths: Widths) -> Estimate:
    if why := _unknown(record, job, past):
        return Estimate(unknown=why)
    now_s = record.snapshot.time_s
    waits = job.id not in record.plan.assignments and job.phase is Phase.QUEUED
    start = range_of([each.jobs[job.id].start_s - now_s for each in futures], widths.start) if waits else None
    end = range_of([each.jobs[job.id].end_s - now_s for each in futures], widths.end)
    if end is not None and (start is not None or not waits):
        return Estimate(start, end)
    reach_s = min(each.until_s for each in futures) - now_s
    what = "start" if waits and start is None else "end"
    far = f"its {what} is more than {duration(reach_s)} away, and no further is estimated"
    return Estimate(start, end, far if reach_s > 0 else "this many jobs take too long to estimate")


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
