"""A job's time limit over the runs into which Penstock divides it.

Slurm counts each run of a job separately, so a job that is moved ten times could run ten times as long as its limit. Therefore
each run after a move gets the time that is left. A job that requeues itself before its limit, as submitit and Lightning do, or
that Slurm requeues, begins a new limit, as without Penstock. The time that a move itself costs is added (`grace_s`), so that no
job exceeds its limit because it was moved. Slurm rounds limits up to minutes; the spool's `ControlMessage` has the exact time.

The limit that counts is the one that Slurm shows when the job is submitted: its own, or the DefaultTime or MaxTime of its
partition. It stays the same wherever the job runs, so the job runs only in partitions that allow it. A job without a limit is
started with TimeLimit=UNLIMITED, because Slurm's backfill scheduler writes a year into it otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_profiles.wire import ControlMessage
from penstock_slurm.gateway import SlurmJob, slurm_minutes

LEAST_S = 60.0
"""The shortest limit that Slurm knows."""


@dataclass(frozen=True, slots=True)
class LimitedRun:
    """One run of a job, as last observed."""

    restarts: int
    start_s: float
    seen_s: float
    limit_s: float
    """Slurm's limit of this run."""


def seen(known: dict[str, LimitedRun], jobs: Iterable[SlurmJob], now_s: float) -> dict[str, LimitedRun]:
    """The newest run of each of these jobs. A job that does not run now keeps its last observed run.

    A COMPLETING job may count as restarted already, with the nodes of its previous run.
    """
    runs: dict[str, LimitedRun] = {}
    for job in jobs:
        if job.state in ("RUNNING", "SUSPENDED") and job.start_s is not None and job.time_limit_s is not None:
            runs[job.id] = LimitedRun(job.restarts, job.start_s, now_s, job.time_limit_s)
        elif job.id in known:
            runs[job.id] = known[job.id]
    return runs


def left_s(run: LimitedRun, control: ControlMessage | None, grace_s: float) -> float:
    """Time left for the run after this one, seconds, at least LEAST_S.

    The exact limit of `run` is that of `control`, unless it was changed in Slurm since.
    """
    limit_s = run.limit_s
    if control is not None and control.time_limit_restarts == run.restarts and is_ours(run, control):
        assert control.time_limit_s is not None, "it is the run's"
        limit_s = control.time_limit_s
    return max(limit_s - max(run.seen_s - run.start_s, 0.0) + grace_s, LEAST_S)


def is_ours(run: LimitedRun, control: ControlMessage) -> bool:
    """Whether Slurm's limit of the run is that of the control message, so it has not been changed since."""
    return control.time_limit_s is not None and slurm_minutes(control.time_limit_s) * 60 == run.limit_s


def admits(max_time_s: float | None, limit_s: float | None) -> bool:
    """Whether a partition with this MaxTime lets a job with this time limit run to its end. None: no limit."""
    return max_time_s is None or (limit_s is not None and limit_s <= max_time_s)


def limit_there_s(
    job: SlurmJob, left_s: float | None, partition: str, max_time_s: float | None, now_s: float
) -> float | None:
    """The limit with which a pending job is sent to a partition, seconds; infinite: none; None: it keeps its limit.

    Slurm does not start a job whose limit is longer than MaxTime, or ends after its deadline. What a move adds to the limit
    must not do that.

    Args:
        job: the pending job.
        left_s: what is left of its limit over all runs; None: it has the limit that Slurm shows.
        partition: where it is sent.
        max_time_s: MaxTime of the partition; None: it has none.
        now_s: the time.
    """
    if left_s is None and job.time_limit_s is None:
        return math.inf if max_time_s is None else None
    if left_s is None and job.partition == (partition,) and job.deadline_s is None:
        return None
    limit_s = job.time_limit_s if left_s is None else left_s
    assert limit_s is not None, "one of them is known"
    if max_time_s is not None:
        limit_s = min(limit_s, max(max_time_s, job.time_limit_s or 0.0))
    if job.deadline_s is not None:
        limit_s = min(limit_s, (job.deadline_s - now_s) // 60 * 60)
    return max(limit_s, LEAST_S)


def next_limit_s(job: SlurmJob, run: LimitedRun | None, control: ControlMessage | None) -> float | None:
    """The limit for the next start of a pending job, or None if it keeps the limit that Slurm shows.

    Args:
        job: the pending job.
        run: its last observed run.
        control: its newest control message.
    """
    if control is None or control.time_limit_restarts is None:
        return None
    if control.time_limit_restarts == job.restarts:  # Penstock stopped it
        return control.time_limit_s
    shortened = run is not None and run.restarts == control.time_limit_restarts and is_ours(run, control)
    return control.submitted_limit_s if shortened else None
