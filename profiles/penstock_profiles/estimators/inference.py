"""Inference: as many samples as possible, or answers that are in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from penstock_profiles.estimators.base import STRICT, Batch, IntArray
from penstock_profiles.estimators.measured import Table, check_measured, interpolate
from penstock_profiles.throughput import FloatArray


@dataclass(frozen=True, slots=True)
class BatchInferenceEstimator:
    """Inference over a fixed set of inputs, one copy of the model per GPU: goodput is throughput.

    K copies share nothing but the inputs, so they make K times what one makes at its best batch size m:
    goodput = K max over m of m / T(m). T is measured, not fitted: a few batch sizes on one GPU are soon tried, and a
    line alpha_c + beta_c m through them would choose the largest, whatever the times say.

    Raises:
        ValueError: an empty table, a batch size below 1, or a time that is not positive and finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    batch_times_s: Table
    """GPU type -> samples in a batch -> seconds that one GPU takes for it. Only batches that fit into its memory."""
    kind: Literal["batch_inference"] = "batch_inference"

    def __post_init__(self) -> None:
        check_measured("batch_times_s", self.batch_times_s, "samples", zero_is_possible=False)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`; samples/s. How the GPUs are spread over nodes does not matter."""
        shape = np.broadcast_shapes(np.shape(nodes), np.shape(gpus))
        if gpu_type not in self.batch_times_s:
            return np.zeros(shape)
        batch = self._best(gpu_type)
        return np.asarray(np.broadcast_to(gpus, shape) * (batch / self.batch_times_s[gpu_type][batch]))

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator`. Of batches that do equally well, the smallest."""
        return Batch(self._best(gpu_type), 0) if gpu_type in self.batch_times_s else None

    def _best(self, gpu_type: str) -> int:
        times_s = self.batch_times_s[gpu_type]
        return max(sorted(times_s), key=lambda batch: batch / times_s[batch])


@dataclass(frozen=True, slots=True)
class LatencyInferenceEstimator:
    """Inference that must answer in time: goodput is 1 where the latency objective is met and 0 where it is not.

    Latency depends on how many requests arrive, how they are batched and how they queue. A model of that would need
    all of these; a load test at the rate that the service must carry measures their sum, so that is what we ask for.
    Between measured counts we interpolate as a `TableEstimator` does. Where each further GPU helps less than the last,
    as it does against a queue, the line lies above the truth: it may refuse a configuration that would do, but promises
    none that would not. Leave out counts at which the queue only grows.

    Raises:
        ValueError: an empty table, a count below 1, or a latency or an objective that is not positive and finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    objective_s: float
    """Latency that is still in time, s, at some percentile of requests, such as the 99th."""
    latencies_s: Table
    """GPU type -> number of GPUs -> latency at that percentile, s, measured at the request rate that must be carried."""
    kind: Literal["latency_inference"] = "latency_inference"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.objective_s) and self.objective_s > 0):
            raise ValueError(f"objective_s={self.objective_s!r} is no latency; it must be a positive number of seconds")
        check_measured("latencies_s", self.latencies_s, "GPUs", zero_is_possible=False)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`; the unit is not samples/s but services in time, 0 or 1."""
        latency_s = interpolate(self.latencies_s, gpu_type, nodes, gpus, outside=np.inf)
        return (latency_s <= self.objective_s).astype(np.float64)

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """None: the service chose its batches when the latency was measured."""
        return None
