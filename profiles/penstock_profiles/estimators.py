"""What the scheduler knows about a job's speed: one `Estimator` per job, asked for whole columns of configurations.

Estimators are plain data, so that a snapshot can be saved as JSON and decided again: validate and dump `AnyEstimator`
with pydantic, which tells the kinds apart by their field `kind`. A new kind is one dataclass here and one name there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from penstock_profiles.efficiency import check_noise, efficiency
from penstock_profiles.throughput import FloatArray, ThroughputParams, throughput

IntArray = NDArray[np.int64]

BATCHES_TRIED = 50
"""Total batch sizes between the smallest and the largest that a job may use, spaced geometrically (as Sia)."""

_STRICT = ConfigDict(extra="forbid")


class Batch(NamedTuple):
    """How a total batch is spread over GPUs and time."""

    atomic_batch: int
    """Samples per GPU in one micro-step, on the GPU that has most."""
    accumulation_steps: int
    """Micro-steps whose gradients are added up before the last one of a step."""


class Estimator(Protocol):
    """How fast a job progresses on each configuration."""

    @property
    def kind(self) -> str:
        """Name of the implementation, the discriminator in JSON."""
        ...

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """Progress on each configuration of one GPU type, in samples/s of the initial batch size.

        Shape broadcast(nodes, gpus); finite and >= 0, with 0 where the job cannot run or nothing is known of the type.
        `nodes` >= 1 and `gpus` >= `nodes` count the whole configuration.
        """
        ...

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """Batch that reaches that goodput; None where it is 0, or where batches are not for this estimator to say."""
        ...


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A training job on one GPU type. Raises ValueError unless `max_atomic_batch` is positive."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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
        wanted_B = _total_batches(self.initial_batch, largest)
        N, K = np.asarray(nodes)[..., None], np.asarray(gpus)[..., None]
        accumulation = np.ceil(wanted_B / (K * model.max_atomic_batch)) - 1
        atomic = np.ceil(wanted_B / (K * (accumulation + 1)))
        even = K * atomic * (accumulation + 1)
        total = np.where(even <= largest, even, wanted_B)
        samples_per_s = throughput(model.step, N, K, atomic, accumulation) * (total / even)
        goodput = samples_per_s * efficiency(self.grad_sqr, self.grad_var, total, self.initial_batch)
        return np.where(total >= K, goodput, 0.0), atomic, accumulation


@dataclass(frozen=True, slots=True)
class TableEstimator:
    """Rates that somebody measured, by GPU type and number of GPUs, for jobs that need no model.

    Between measured counts the rate is interpolated linearly; below the smallest and above the largest, and on
    types that were not measured, it is 0. How the GPUs are spread over nodes does not matter.

    Raises:
        ValueError: an empty table, a count below 1, or a rate that is negative or not finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    rates: dict[str, dict[int, float]]
    """GPU type -> number of GPUs -> samples/s of progress."""
    kind: Literal["table"] = "table"

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError("rates={} holds no measurement; use a LinearEstimator if nothing is known")
        for gpu_type, rates in self.rates.items():
            if not rates:
                raise ValueError(f"rates[{gpu_type!r}]={{}} holds no measurement; leave the GPU type out")
            for gpus, rate in rates.items():
                if not gpus >= 1:
                    raise ValueError(f"rates[{gpu_type!r}] has a rate for {gpus} GPUs; counts start at 1")
                if not (math.isfinite(rate) and rate >= 0):
                    raise ValueError(
                        f"rates[{gpu_type!r}][{gpus}]={rate!r} is not a finite number of at least 0; leave it out"
                    )

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`."""
        shape = np.broadcast_shapes(np.shape(nodes), np.shape(gpus))
        if gpu_type not in self.rates:
            return np.zeros(shape)
        measured = sorted(self.rates[gpu_type].items())
        counts, rates = [gpus for gpus, _ in measured], [rate for _, rate in measured]
        return np.asarray(np.interp(np.broadcast_to(gpus, shape), counts, rates, left=0.0, right=0.0))

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """None: a table of rates knows no batches."""
        return None


@dataclass(frozen=True, slots=True)
class LinearEstimator:
    """Nothing is known: rate 1 per GPU on any type, as Sia sees a job in its first round."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Literal["linear"] = "linear"

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`; the unit is not samples/s but one GPU's rate."""
        shape = np.broadcast_shapes(np.shape(nodes), np.shape(gpus))
        return np.broadcast_to(np.asarray(gpus, dtype=np.float64), shape).copy()

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """None: nothing is known of the job's batches."""
        return None


AnyEstimator = Annotated[TrainingEstimator | TableEstimator | LinearEstimator, Field(discriminator="kind")]


@functools.lru_cache(maxsize=1024)
def _total_batches(smallest: int, largest: int) -> FloatArray:
    """Total batch sizes to try, ascending. Many jobs share a range, and making it costs as much as using it."""
    if smallest == largest:
        return np.array([float(smallest)])
    return np.unique(np.geomspace(smallest, largest, BATCHES_TRIED).round())
