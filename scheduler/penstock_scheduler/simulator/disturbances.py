"""Faults of a real cluster. Random numbers depend on the seed, not on the order of the calls."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from penstock_scheduler.people.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Faults to simulate, all off by default. Raises ConfigError for a number out of its range."""

    interference: float = 0.0
    """Share of its speed that a job on several nodes loses while another such job shares one of them, in [0, 1).
    Sia's and Pollux's simulators use 0. Pollux's evaluation tries up to 0.5."""
    straggler_share: float = 0.0
    """Share of starts that get a slow GPU or node, in [0, 1]. The whole job then waits for it."""
    straggler_slowdown: float = 1.5
    """Median factor on the time of such a job's steps, > 1; the excess over 1 is lognormal."""
    straggler_spread: float = 0.5
    """Standard deviation of the logarithm of that excess, >= 0."""
    node_mtbf_h: float | None = None
    """Mean hours between two failures of a node, > 0, exponential; None: nodes do not fail."""
    node_repair_h: float = 1.0
    """Mean hours until a failed node is repaired, > 0, exponential."""
    profiling_gpu_s: float = 0.0
    """GPU-seconds that a job's first profile on each GPU type costs, >= 0. Sia's paper: less than 20."""
    estimation_error: float = 0.0
    """Standard deviation of the logarithm of measured over true step times, >= 0."""
    seed: int = 0

    def __post_init__(self) -> None:
        fine = {
            "interference": 0 <= self.interference < 1,
            "straggler_share": 0 <= self.straggler_share <= 1,
            "straggler_slowdown": 1 < self.straggler_slowdown < math.inf,
            "straggler_spread": 0 <= self.straggler_spread < math.inf,
            "node_mtbf_h": self.node_mtbf_h is None or 0 < self.node_mtbf_h < math.inf,
            "node_repair_h": 0 < self.node_repair_h < math.inf,
            "profiling_gpu_s": 0 <= self.profiling_gpu_s < math.inf,
            "estimation_error": 0 <= self.estimation_error < math.inf,
            "seed": self.seed >= 0,
        }
        assert set(fine) == {field.name for field in fields(self)}
        for name, is_fine in fine.items():
            if not is_fine:
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of its range; see `Disturbances`")

    def straggler(self, job: str, start: int) -> float:
        """Factor on the time of the steps of a job's `start`-th run: 1 without a straggler, else more."""
        if self.straggler_share == 0:
            return 1.0
        random = draw(self.seed, "straggler", job, start)
        if random.random() >= self.straggler_share:
            return 1.0
        return float(1 + (self.straggler_slowdown - 1) * math.exp(self.straggler_spread * random.standard_normal()))

    def failures(self, node: str, until_s: float) -> Iterator[tuple[float, float]]:
        """(when it fails, when it is repaired) for each failure of a node from 0 s to `until_s`, ascending."""
        if self.node_mtbf_h is None:
            return
        random, now_s = draw(self.seed, "node", node), 0.0
        while True:
            fails_s = now_s + random.exponential(self.node_mtbf_h * 3600)
            if fails_s > until_s:
                return
            now_s = fails_s + random.exponential(self.node_repair_h * 3600)
            yield fails_s, now_s

    def measured(self, true: float, job: str, report: int) -> float:
        """A job's `report`-th measurement of a time with the true value `true`."""
        if self.estimation_error == 0:
            return true
        return true * math.exp(self.estimation_error * draw(self.seed, "measured", job, report).standard_normal())

    def profiling_s(self, gpus: int, gpu_types: int) -> float:
        """Seconds that a job on `gpus` GPUs first spends on profiles of `gpu_types` types."""
        return self.profiling_gpu_s * gpu_types / gpus


def draw(seed: int, *what: str | int) -> np.random.Generator:
    """A random generator of its own for each `what`, so that no draw changes another."""
    return np.random.default_rng([seed, zlib.crc32("\0".join(map(str, what)).encode())])


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
