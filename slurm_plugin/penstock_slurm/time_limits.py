"""A job's time limit over all its runs.

Slurm counts each run of a job separately, so a job that is moved ten times could run ten times as long as its limit. Therefore
each restart gets the time that is left. The time that a move itself costs is added (`grace_s`), so that no job exceeds its limit
because it was moved. Slurm rounds limits up to minutes; the spool's `ControlMessage` has the exact time.
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
    if control is not None and control.time_limit_restarts == run.restarts and control.time_limit_s is not None:
        exact_s = control.time_limit_s
        if slurm_minutes(exact_s) * 60 == limit_s:
            limit_s = exact_s
    return max(limit_s - max(run.seen_s - run.start_s, 0.0) + grace_s, LEAST_S)


def next_limit_s(job: SlurmJob, run: LimitedRun | None, control: ControlMessage | None, grace_s: float) -> float | None:
    """The limit for the next start of a pending job; None: it keeps its limit.

    Args:
        job: the pending job.
        run: its last observed run.
        control: its newest control message.
        grace_s: the running time that a move costs.
    """
    if control is not None and control.time_limit_restarts == job.restarts:
        return control.time_limit_s
    if run is None or run.restarts != job.restarts - 1:
        return None
    return left_s(run, control, grace_s)
