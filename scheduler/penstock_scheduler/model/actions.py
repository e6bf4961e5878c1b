"""Actions: each names the job, the round that decided on it, and the end state to reach. Repeating an action is safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from penstock_scheduler.model.cluster import Placement
from penstock_scheduler.model.job import JobId
from penstock_scheduler.model.stops import Stop


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
