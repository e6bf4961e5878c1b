"""Latencies of a resource manager. Without them, the simulated cluster acts at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds on the simulation's clock, >= 0. By default nothing takes time, which is accurate enough on a scale of
    hours.

    The latency of a start, from the order until the job trains, is part of `JobTruth.restart_s`.
    """

    launch_s: float | None = None
    """From the order to start until the job counts as running and may be moved again; None: until it trains."""
    leave_s: float = 0.0
    """From the order to leave until the job's GPUs are free. Meanwhile it saves and is requeued."""
    lost_s: float = 0.0
    """The part of `leave_s`, at its end, in which the job does not train."""
    pause_s: float = 0.0
    """From when its GPUs are free until the job can be started again."""
    exit_s: float = 0.0
    """From the end of a job's training until its GPUs are free and it counts as ended."""
