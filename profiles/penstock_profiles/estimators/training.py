"""Data-parallel training: throughput by Sia's model, times statistical efficiency, at the best batch size."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from penstock_profiles.efficiency import check_noise, efficiency
from penstock_profiles.estimators.base import STRICT, Batch, IntArray
from penstock_profiles.throughput import FloatArray, ThroughputParams, throughput

BATCHES_TRIED = 50
"""Total batch sizes between the smallest and the largest that a job may use, spaced geometrically (as Sia)."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A training job on one GPU type. Raises ValueError unless `max_atomic_batch` is positive."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: ThroughputParams
    max_atomic_batch: int
    """Samples per GPU and micro-step that fit into its memory."""

    def __post_init__(self) -> None:
        if not self.max_atomic_batch >= 1:
            raise ValueError(f"max_atomic_batch={self.max_atomic_batch} fits no sample; leave such a GPU type out")


@dataclass(frozen=True, slots=True)
class TrainingEstimator:
    """Data-parallel training: goodput = throughput x statistical efficiency at the best total batch size.

    Sia section 3.3. A total batch M is shared by K GPUs as evenly as whole samples allow: s + 1 micro-steps of at most
    m = ceil(M / (K (s + 1))) samples, with s the fewest that fit into memory. M is rounded up to K m (s + 1) unless
    that exceeds the largest batch; then some GPUs have less to do and the step waits for the fullest. Departures from
    the reference: no accumulation that memory does not ask for, and no lower limit on m but one sample.

    Raises:
        ValueError: no GPU type, batch sizes that are not 1 <= initial <= max, or noise that describes no gradient.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    models: dict[str, GpuModel]
    """GPU type -> the job on it. On any other type the goodput is 0."""
    initial_batch: int
    """Total batch size, samples, that progress is counted in and below which the job never goes."""
    max_batch: int
    """Largest total batch size, samples."""
    grad_sqr: float
    """Squared norm of the true gradient."""
    grad_var: float
    """Trace of the gradient's covariance at `initial_batch`, in the unit of `grad_sqr`."""
    fixed_batch: bool = False
    """The total batch stays `initial_batch` (strong-scaling and rigid jobs); `max_batch` is then not looked at."""
    kind: Literal["training"] = "training"

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models={} names no GPU type to run on; use a LinearEstimator if nothing is known")
        if not self.initial_batch >= 1:
            raise ValueError(f"initial_batch={self.initial_batch} is not a batch size; it must be at least 1")
        if not self.max_batch >= self.initial_batch:
            raise ValueError(
                f"max_batch={self.max_batch} is below initial_batch={self.initial_batch}; raise it, or lower that"
            )
        check_noise(self.grad_sqr, self.grad_var)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`. 0 where there are more GPUs than samples in the largest batch."""
        if gpu_type not in self.models:
            return np.zeros(np.broadcast_shapes(np.shape(nodes), np.shape(gpus)))
        return np.asarray(self._candidates(self.models[gpu_type], nodes, gpus)[0].max(axis=-1))

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator`. Of batches that do equally well, the smallest."""
        if gpu_type not in self.models:
            return None
        goodput_B, atomic_B, accumulation_B = self._candidates(
            self.models[gpu_type], np.asarray(nodes, np.int64), np.asarray(gpus, np.int64)
        )
        best = int(goodput_B.argmax())
        if goodput_B[best] <= 0:
            return None
        return Batch(int(atomic_B[best]), int(accumulation_B[best]))

    def _candidates(
        self, model: GpuModel, nodes: IntArray, gpus: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Goodput, atomic batch and accumulation steps of each total batch size tried, which are the last axis (B)."""
        largest = self.initial_batch if self.fixed_batch else self.max_batch
        wanted_B = total_batches(self.initial_batch, largest)
        N, K = np.asarray(nodes)[..., None], np.asarray(gpus)[..., None]
        accumulation = np.ceil(wanted_B / (K * model.max_atomic_batch)) - 1
        atomic = np.ceil(wanted_B / (K * (accumulation + 1)))
        even = K * atomic * (accumulation + 1)
        total = np.where(even <= largest, even, wanted_B)
        samples_per_s = throughput(model.step, N, K, atomic, accumulation) * (total / even)
        goodput = samples_per_s * efficiency(self.grad_sqr, self.grad_var, total, self.initial_batch)
        return np.where(total >= K, goodput, 0.0), atomic, accumulation


@functools.lru_cache(maxsize=1024)
def total_batches(smallest: int, largest: int) -> FloatArray:
    """Total batch sizes to try, ascending. Many jobs share a range, and making it costs as much as using it."""
    if smallest == largest:
        return np.array([float(smallest)])
    return np.unique(np.geomspace(smallest, largest, BATCHES_TRIED).round())
