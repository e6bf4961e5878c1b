"""Stops: why a plan ends, moves or resizes the present run of a job. A running job is stopped for one of these reasons only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock_scheduler.model.job import JobId


class StopCode(StrEnum):
    """Why a run is stopped. The list is closed; codes are stable, texts may change."""

    GAIN = "gain"
    """The job trains faster elsewhere, or on more GPUs."""
    PREEMPTED = "preempted"
    """The policy gives its GPUs to another job."""
    SHARING = "sharing"
    """It has shared GPUs, and leaves the jobs with which it shares them."""
    MEASURING = "measuring"
    """It is measured on another GPU type."""
    TRIALS = "trials"
    """Better trials of its search go on in its place, as its user asked."""
    LIMIT = "limit"
    """A limit, a quota or a budget does not allow its GPUs."""
    RECALL = "recall"
    """It comes back from the cloud."""
    NO_GPUS = "no-gpus"
    """Slurm started the run without its GPUs."""
    DRAIN = "drain"
    """An admin drains its node in Slurm."""
    PENSTOCK_DRAIN = "penstock-drain"
    """An admin drains its GPUs in Penstock."""
    RESERVATION = "reservation"
    """Its node is kept for a reservation."""
    ASKED = "asked"
    """Its user or an admin asks for it, for example by other GPU counts or types."""
    UNEXPLAINED = "unexplained"
    """The plan gives no reason, which is a bug. The plan gate refuses such a plan."""

    @property
    def is_asked_for(self) -> bool:
        """Whether a person asked for the stop, so that the plan gate does not count it."""
        return self in (self.DRAIN, self.PENSTOCK_DRAIN, self.RESERVATION, self.ASKED, self.TRIALS)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the present run of a job is stopped, for a program and for a person."""

    code: StopCode
    text: str
    goodput_before: float | None = None
    """Expected goodput on what it has, in the job's own unit per second; None: not known, or no part of the reason."""
    goodput_after: float | None = None
    """Expected goodput on what it gets; 0: it waits."""
    makes_room_for: JobId = ""
    """The job that gets its GPUs; empty: none, or a job that Penstock does not manage."""
    by_s: float | None = None
    """By when it has to be gone, s since 1970; None: no time is set."""

    def __str__(self) -> str:
        return f"{self.code.value}: {self.text}"
