"""What is refused in a job's report: numbers that no job has, and with which nothing can be computed.

A job can report anything. A number beyond these bounds would overflow an array of a round, or the store, and so end the
round for all jobs. Both transports, the spool and the API, ask here.
"""

from __future__ import annotations

from penstock_profiles.wire import (
    BatchTrial,
    Checkpointed,
    Ended,
    Observation,
    Report,
    Result,
    Resumed,
    Started,
    Suspended,
)

MAX_NUMBER = 2**31 - 1
"""Highest epoch of a run, and highest number of a report in it."""

MAX_TIME_S = 1e11
"""Latest time, s since 1970."""

MAX_COUNT = 10**9
"""Highest count, such as of GPUs, steps, or samples of a step, as in job specs."""

MIN_STEP_S, MAX_SECONDS = 1e-9, 1e9
"""Shortest step, and longest duration of anything."""

MAX_PROGRESS = 1e18
"""Most progress, in samples."""

MAX_NORM = 1e100
"""Largest squared norm of a gradient."""

MAX_BYTES = 2**62


def check_plausible(report: Report) -> None:
    """Raises ValueError, with a message for the sender, if a number of the report is out of bounds."""
    _at_most("epoch", report.epoch, MAX_NUMBER)
    _at_most("sequence", report.sequence, MAX_NUMBER)
    _at_most("time_s", report.time_s, MAX_TIME_S)
    body = report.body
    match body:
        case Observation():
            check_observation(body)
        case BatchTrial():
            _at_most("atomic_batch", body.atomic_batch, MAX_COUNT)
        case Started():
            _at_most("total", body.total or 0.0, MAX_PROGRESS)
            _at_most("restarts", body.restarts or 0, MAX_NUMBER)
        case Suspended():
            _at_most("moved_bytes", body.moved_bytes, MAX_BYTES)
            _at_most("left_bytes", body.left_bytes, MAX_BYTES)
    match body:
        case Checkpointed() | Suspended() | Resumed():
            _at_most("seconds", body.seconds, MAX_SECONDS)
    match body:
        case Started() | Observation() | Checkpointed() | Result() | Ended():
            _at_most("progress", body.progress, MAX_PROGRESS)


def check_observation(body: Observation) -> None:
    """The same for what a run measured, as in a stored profile."""
    for name in ("nodes", "gpus", "gpus_per_replica", "atomic_batch", "accumulation_steps", "steps"):
        _at_most(name, getattr(body, name), MAX_COUNT)
    _at_most("the samples of a step", body.samples, MAX_COUNT)
    if body.step_time_s < MIN_STEP_S:
        raise ValueError(f"step_time_s must be at least {MIN_STEP_S:g}")
    _at_most("step_time_s", body.step_time_s, MAX_SECONDS)
    _at_most("sync_time_s", body.sync_time_s or 0.0, MAX_SECONDS)
    _at_most("grad_sqr", body.grad_sqr or 0.0, MAX_NORM)
    _at_most("grad_var", body.grad_var or 0.0, MAX_NORM)


def _at_most(name: str, value: float, most: float) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {f'{most:,}' if isinstance(most, int) else f'{most:g}'}")
