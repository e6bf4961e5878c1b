"""Job ids that come again.

A cluster whose controller was killed, or has lost its state, has forgotten its newest jobs and gives their ids to others. Nothing
that is known of the former job may count for the new one: not its runs, its GPU-seconds, its progress or its messages.
"""

from __future__ import annotations

import time
from typing import Protocol


class Submitted(Protocol):
    """A job as the cluster shows it."""

    @property
    def restarts(self) -> int:
        """Number of times that it was started again."""
        ...

    @property
    def submit_s(self) -> float:
        """When it was submitted, s since 1970; Slurm's own time changes with each requeue."""
        ...


def is_another(job: Submitted, known_s: float | None) -> bool:
    """Whether this job is not the one that had its id before and was submitted at `known_s` (None: there was none).

    A job that was never started again was submitted only once, so a later time is another job's.
    """
    return known_s is not None and job.restarts == 0 and job.submit_s > known_s


def former_id(job: str, submit_s: float) -> str:
    """The id under which the store keeps a job whose id another job has now, such as `12@20261124T035410Z`."""
    return f"{job}@{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(submit_s))}"


def begins_s(submit_s: float, start_s: float | None) -> float:
    """Before this time, a job had no run. Slurm sets the time of submission anew when it requeues a job."""
    return min(submit_s, submit_s if start_s is None else start_s) - 60.0
