"""A job's time limit over all its runs.

Slurm counts each run of a job by itself: one that is moved ten times could run ten times as long as its limit. So each
restart gets what is left. What a move itself takes of a run is given back (`grace_s`), so that no job dies of its limit
because it was moved. Slurm knows whole minutes, rounded up; what is exact is in the spool's `ControlMessage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_profiles.wire import ControlMessage
from penstock_slurm.gateway import SlurmJob, slurm_minutes

LEAST_S = 60.0
"""The shortest limit that Slurm knows."""


@dataclass(frozen=True, slots=True)
class LimitedRun:
    """One run of a job, as far as it was seen."""

    restarts: int
    start_s: float
    seen_s: float
    limit_s: float
    """Slurm's limit of this run."""


def seen(known: dict[str, LimitedRun], jobs: Iterable[SlurmJob], now_s: float) -> dict[str, LimitedRun]:
    """The newest runs of these jobs, of which some run at this moment; those that do not keep what was last seen.

    A job that is COMPLETING may count as restarted already, with the nodes of the run before.
    """
    runs: dict[str, LimitedRun] = {}
    for job in jobs:
        if job.state in ("RUNNING", "SUSPENDED") and job.start_s is not None and job.time_limit_s is not None:
            runs[job.id] = LimitedRun(job.restarts, job.start_s, now_s, job.time_limit_s)
        elif job.id in known:
            runs[job.id] = known[job.id]
    return runs


def left_s(run: LimitedRun, control: ControlMessage | None, grace_s: float) -> float:
    """What is left for the run after this one, in seconds, at least LEAST_S.

    The limit of `run` is what `control` gave it, exactly, unless somebody has changed it in Slurm since.
    """
    limit_s = run.limit_s
    if control is not None and control.time_limit_restarts == run.restarts and control.time_limit_s is not None:
        exact_s = control.time_limit_s
        if slurm_minutes(exact_s) * 60 == limit_s:
            limit_s = exact_s
    return max(limit_s - max(run.seen_s - run.start_s, 0.0) + grace_s, LEAST_S)


def next_limit_s(job: SlurmJob, run: LimitedRun | None, control: ControlMessage | None, grace_s: float) -> float | None:
    """The limit for the next start of a pending job; None: it keeps the one that it has.

    Args:
        job: as it waits.
        run: the last run that was seen.
        control: what the job was last told.
        grace_s: what a move takes of a job's running time.
    """
    if control is not None and control.time_limit_restarts == job.restarts:
        return control.time_limit_s
    if run is None or run.restarts != job.restarts - 1:
        return None
    return left_s(run, control, grace_s)
