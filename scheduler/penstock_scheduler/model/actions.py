"""Actions: each names the job, the round that decided on it, and the end state to reach. Repeating an action is safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from penstock_scheduler.model.cluster import Placement
from penstock_scheduler.model.job import JobId


@dataclass(frozen=True, slots=True)
class Start:
    """Run a queued job at `placement`."""

    job: JobId
    round: int
    placement: Placement
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class Resize:
    """Bring a running job to another number of GPUs of the same type."""

    job: JobId
    round: int
    placement: Placement
    kind: Literal["resize"] = "resize"


@dataclass(frozen=True, slots=True)
class Migrate:
    """Bring a running job to other nodes or another GPU type."""

    job: JobId
    round: int
    placement: Placement
    kind: Literal["migrate"] = "migrate"


@dataclass(frozen=True, slots=True)
class Hold:
    """Take a job's GPUs away; it keeps its place in the queue and its last checkpoint."""

    job: JobId
    round: int
    kind: Literal["hold"] = "hold"


@dataclass(frozen=True, slots=True)
class BurstJob:
    """Run a queued job in the cloud, on `offer`. The cloud ends the run before it costs more than `usd` dollars."""

    job: JobId
    round: int
    offer: str
    usd: float
    kind: Literal["burst"] = "burst"


@dataclass(frozen=True, slots=True)
class Recall:
    """Bring a job back from the cloud: it saves a checkpoint if it can, gives its instance back and is queued again."""

    job: JobId
    round: int
    kind: Literal["recall"] = "recall"


Action = Start | Resize | Migrate | Hold
"""What a cluster can be asked for."""

CloudAction = BurstJob | Recall
"""What a cloud can be asked for."""


class Progress(StrEnum):
    """How far an action has come."""

    DONE = "done"
    UNDER_WAY = "under-way"
    """Started; the cluster needs time. Repeating the action continues it."""
    FAILED = "failed"
    """It cannot be done now; the next round decides again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action."""

    action: Action | CloudAction
    progress: Progress
    text: str = ""
    stop: Stop | None = None
    """Why the action stops a run; None: it stops none, or an earlier outcome has the reason."""


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
