"""How long a resource manager takes over what the simulated cluster otherwise does at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds on the simulation's clock, >= 0; by default nothing takes time, which on a scale of hours is near enough.

    A start's own latency is part of a job's `JobTruth.restart_s`: from the order to start until it trains.
    """

    launch_s: float | None = None
    """From the order to start until the job counts as running and may be moved again; None: until it trains."""
    leave_s: float = 0.0
    """From the order to leave until the job's GPUs are free: it is asked, saves, and is requeued."""
    lost_s: float = 0.0
    """The part of `leave_s`, at its end, in which the job does not train."""
    pause_s: float = 0.0
    """From then on until the job can be started again."""
    exit_s: float = 0.0
    """From the end of a job's training until its GPUs are free and it counts as ended."""
