"""Inference jobs: as many samples as possible, or answers in time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from penstock_profiles.estimators.base import STRICT, Batch, IntArray, Table, check_measured, interpolate
from penstock_profiles.throughput import FloatArray


@dataclass(frozen=True, slots=True)
class BatchInferenceEstimator:
    """Inference over a fixed set of inputs, one copy of the model per GPU: goodput is throughput.

    K copies share nothing but the inputs, so they process K times as much as one does at its best batch size m:
    goodput = K max over m of m / T(m). T is measured, not fitted: a few batch sizes on one GPU are measured quickly,
    and a fitted line alpha_c + beta_c m would always choose the largest.

    Raises:
        ValueError: an empty table, a batch size below 1, or a time that is not positive and finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    batch_times_s: Table
    """GPU type -> samples in a batch -> seconds that one GPU takes for it, for batches that fit into its memory."""
    kind: Literal["batch_inference"] = "batch_inference"

    def __post_init__(self) -> None:
        check_measured("batch_times_s", self.batch_times_s, "samples", zero_is_possible=False)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`; in samples/s. How the GPUs are distributed over nodes does not matter."""
        shape = np.broadcast_shapes(np.shape(nodes), np.shape(gpus))
        if gpu_type not in self.batch_times_s:
            return np.zeros(shape)
        batch = self._best(gpu_type)
        return np.asarray(np.broadcast_to(gpus, shape) * (batch / self.batch_times_s[gpu_type][batch]))

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator`. Of equally good batches, the smallest."""
        return Batch(self._best(gpu_type), 0) if gpu_type in self.batch_times_s else None

    def _best(self, gpu_type: str) -> int:
        times_s = self.batch_times_s[gpu_type]
        return max(sorted(times_s), key=lambda batch: batch / times_s[batch])


@dataclass(frozen=True, slots=True)
class LatencyInferenceEstimator:
    """Inference that must answer in time: goodput is 1 where the latency objective is met, and 0 elsewhere.

    Latency depends on how many requests arrive, how they are batched and how they queue. A model would need all of
    these. A load test at the rate that the service must sustain measures their effect, so this estimator uses such a
    test. Between measured numbers of GPUs it interpolates as `TableEstimator` does. If each further GPU helps less than
    the one before, as is usual for queues, interpolation overestimates the latency: it may refuse a configuration that
    would suffice, but never accepts one that would not. Leave out numbers of GPUs at which the queue grows without
    limit.

    Raises:
        ValueError: an empty table, a count below 1, or a latency or an objective that is not positive and finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    objective_s: float
    """Largest acceptable latency, s, at some percentile of requests, such as the 99th."""
    latencies_s: Table
    """GPU type -> number of GPUs -> latency at that percentile, s, measured at the request rate to sustain."""
    kind: Literal["latency_inference"] = "latency_inference"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.objective_s) and self.objective_s > 0):
            raise ValueError(
                f"objective_s={self.objective_s!r} is out of range; it must be a positive number of seconds"
            )
        check_measured("latencies_s", self.latencies_s, "GPUs", zero_is_possible=False)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`; not in samples/s, but 1 if the service answers in time and 0 if not."""
        latency_s = interpolate(self.latencies_s, gpu_type, nodes, gpus, outside=np.inf)
        return (latency_s <= self.objective_s).astype(np.float64)

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """None: the service chooses its batches itself."""
        return None


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
