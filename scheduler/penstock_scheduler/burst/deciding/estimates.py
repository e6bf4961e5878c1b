"""How long a job will run, by the first known estimate in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Source = Literal["user", "model", "history", "time-limit", "nothing"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A running time and its source; `runtime_s` is None if nothing is known."""

    runtime_s: float | None
    source: Source


def estimate(
    *,
    user_s: float | None = None,
    work: float | None = None,
    goodput: float | None = None,
    history_s: Sequence[float] = (),
    time_limit_s: float | None = None,
) -> Estimate:
    """The running time by the first known one of: the user's estimate, model and remaining work, history, time limit.

    Args:
        user_s: the user's estimate (`--runtime`).
        work: remaining work, in the unit of `goodput` times seconds.
        goodput: how fast the job would run, > 0.
        history_s: running times of earlier jobs of the same user and script; their median counts.
        time_limit_s: time after which Slurm ends the job, an upper bound.
    """
    if user_s is not None:
        return Estimate(user_s, "user")
    if work is not None and goodput is not None and goodput > 0:
        return Estimate(work / goodput, "model")
    if history_s:
        return Estimate(median(history_s), "history")
    if time_limit_s is not None:
        return Estimate(time_limit_s, "time-limit")
    return Estimate(None, "nothing")


def lost_s(ran_s: float, checkpoint_every_s: float | None) -> float:
    """Seconds of work since the last checkpoint, which are lost if the job is stopped after `ran_s` seconds.

    Without checkpoints (None), all work is lost. A job that saves a checkpoint when it is asked to has 0, and loses nothing.
    """
    if checkpoint_every_s is None:
        return ran_s
    return ran_s % checkpoint_every_s if checkpoint_every_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Gravity:
    """What it takes to bring a job's input to the cloud.

    Attributes:
        bytes_per_s: bandwidth of the line, > 0.
        usd_per_gb: price of the transfer, for both directions together; 1 GB = 1e9 bytes.
    """

    bytes_per_s: float = 125e6
    usd_per_gb: float = 0.09

    def transfer_s(self, data_bytes: float) -> float:
        """Seconds that the transfer takes. The instance is paid for during this time."""
        return data_bytes / self.bytes_per_s

    def usd(self, data_bytes: float) -> float:
        """Dollars that the transfer itself costs."""
        return data_bytes / 1e9 * self.usd_per_gb
