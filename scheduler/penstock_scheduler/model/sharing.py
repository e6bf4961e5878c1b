"""Jobs that share GPUs of a node: packs run at the same time on the same GPUs, and packs take turns."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_scheduler.model.job import JobId


@dataclass(frozen=True, slots=True)
class Pack:
    """Jobs that run at the same time on the same GPUs of one node; most often one job."""

    jobs: tuple[JobId, ...]
    gpus: int = 1
    """GPUs that each of the jobs uses."""
    priority: int = 0
    """The higher one is never suspended for the lower."""


@dataclass(frozen=True, slots=True)
class SharedNode:
    """GPUs of a node that packs use in turns."""

    node: str
    gpus: int
    packs: tuple[Pack, ...]
    """In the order in which they came."""
    slice_s: float = 60.0
    """Length of a turn, the delay of suspending and resuming included."""
