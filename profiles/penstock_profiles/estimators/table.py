"""Estimators for jobs without a model: a table of measured rates, or nothing known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from penstock_profiles.estimators.base import STRICT, Batch, IntArray
from penstock_profiles.estimators.measured import Table, check_measured, interpolate
from penstock_profiles.throughput import FloatArray


@dataclass(frozen=True, slots=True)
class TableEstimator:
    """Measured rates by GPU type and number of GPUs, for jobs that need no model.

    Between measured numbers of GPUs, the rate is interpolated linearly. Below the smallest, above the largest, and on
    types that were not measured, it is 0. How the GPUs are distributed over nodes does not matter.

    Raises:
        ValueError: an empty table, a count below 1, or a rate that is negative or not finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rates: Table
    """GPU type -> number of GPUs -> samples/s of progress."""
    kind: Literal["table"] = "table"

    def __post_init__(self) -> None:
        check_measured("rates", self.rates, "GPUs", zero_is_possible=True)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`."""
        return interpolate(self.rates, gpu_type, nodes, gpus, outside=0.0)

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """None: a table of rates contains no batches."""
        return None


@dataclass(frozen=True, slots=True)
class LinearEstimator:
    """An estimator for an unknown job: it scales perfectly, as in Sia in a job's first round, or by a power.

    Raises:
        ValueError: a speed that is not positive and finite, or a power that is not from 0 to 1.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    speeds: Mapping[str, float] = field(default_factory=dict)
    """GPU type -> speed of one GPU, such as `Families.speeds`; 1 for other types."""
    power: float = 1.0
    """Power of the number of GPUs by which it is faster; below 1 for a job that runs and does not measure itself."""
    kind: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        for gpu_type, speed in self.speeds.items():
            if not 0 < speed < math.inf:
                raise ValueError(f"speeds[{gpu_type!r}]={speed} must be positive and finite")
        if not 0 <= self.power <= 1:
            raise ValueError(f"power={self.power} must be from 0 to 1")

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`; not in samples/s, but in multiples of the rate of one GPU of speed 1."""
        return self.speeds.get(gpu_type, 1.0) * np.asarray(gpus, dtype=np.float64) ** self.power + np.zeros(
            np.shape(nodes)
        )

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """None: nothing is known of the job's batches."""
        return None
