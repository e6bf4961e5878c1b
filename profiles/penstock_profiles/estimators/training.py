"""Data-parallel training: throughput by Sia's model, times statistical efficiency, at the best batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from penstock_profiles.estimators.base import STRICT, Batch, IntArray
from penstock_profiles.throughput import FloatArray, ThroughputParams, check_noise, growth_factor, overlapped

BATCHES_TRIED = 50
"""Number of total batch sizes to try, from the smallest to the largest of a job, spaced geometrically as in Sia."""

BLOCK = 50_000
"""Number of elements in one array of a block. A dozen such arrays of single precision fit into a cache of some MB."""


_Found = dict[tuple[str, int, int], tuple[float, Batch | None]]


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A training job on one GPU type. Raises ValueError unless both counts are positive."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: ThroughputParams
    max_atomic_batch: int
    """Samples per replica, usually one GPU, and micro-step that fit into memory."""
    gpus_per_replica: int = 1
    """P, number of GPUs that hold one replica of the model. `step` counts replicas. The job runs only on multiples of
    P."""

    def __post_init__(self) -> None:
        if not self.max_atomic_batch >= 1:
            raise ValueError(
                f"max_atomic_batch={self.max_atomic_batch} must be at least 1; leave out a GPU type on which no"
                " sample fits"
            )
        if not self.gpus_per_replica >= 1:
            raise ValueError(f"gpus_per_replica={self.gpus_per_replica} is not a number of GPUs; it must be at least 1")


@dataclass(frozen=True, slots=True)
class TrainingEstimator:
    """Data-parallel training: goodput = throughput x statistical efficiency at the best total batch size.

    Sia section 3.3. A total batch M is divided over K GPUs as evenly as whole samples allow: s + 1 micro-steps of at
    most m = ceil(M / (K (s + 1))) samples, with the smallest s for which they fit into memory. M is rounded up to K m
    (s + 1) unless that exceeds the largest batch; then some GPUs have fewer samples, and the step waits for those with
    the most. Departures from the reference: accumulation only if memory requires it; no lower limit on m but one
    sample; and if P GPUs hold one replica of the model, K counts replicas, on at most K nodes.

    Raises:
        ValueError: no GPU type, batch sizes that are not 1 <= initial <= max, or noise that describes no gradient.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    models: dict[str, GpuModel]
    """GPU type -> model of the job on it. On other types the goodput is 0."""
    initial_batch: int
    """Total batch size, samples, that progress is counted in. The job never uses a smaller one."""
    max_batch: int
    """Largest total batch size, samples."""
    grad_sqr: float
    """Squared norm of the true gradient."""
    grad_var: float
    """Trace of the gradient's covariance at `initial_batch`, in the unit of `grad_sqr`."""
    fixed_batch: bool = False
    """Whether the total batch stays `initial_batch` (strong-scaling and rigid jobs). `max_batch` is then ignored."""
    kind: Literal["training"] = "training"
    found: Annotated[_Found, Field(exclude=True), SkipJsonSchema()] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """GPU type, nodes and GPUs -> goodput and batch there, as far as they were asked for. A model never changes."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models={} names no GPU type to run on; use a LinearEstimator if nothing is known")
        if not self.initial_batch >= 1:
            raise ValueError(f"initial_batch={self.initial_batch} is not a batch size; it must be at least 1")
        if not self.max_batch >= self.initial_batch:
            raise ValueError(
                f"max_batch={self.max_batch} is below initial_batch={self.initial_batch}; raise max_batch, or lower"
                " initial_batch"
            )
        check_noise(self.grad_sqr, self.grad_var)

    @property
    def largest_batch(self) -> int:
        """Largest total batch size that the job may use, samples."""
        return self.initial_batch if self.fixed_batch else self.max_batch

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`. 0 where there are more GPUs than samples in the largest batch."""
        if gpu_type not in self.models:
            return np.zeros(np.broadcast_shapes(np.shape(nodes), np.shape(gpus)))
        N, K = np.broadcast_arrays(nodes, gpus)
        if K.size == 1:
            return np.full(K.shape, self._at(gpu_type, int(N.item()), int(K.item()))[0])
        best = best_of_batches([self], [gpu_type], N.reshape(1, -1), K.reshape(1, -1))
        return best.goodput.reshape(K.shape)

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator`. Of equally good batches, the smallest."""
        if gpu_type not in self.models:
            return None
        return self._at(gpu_type, nodes, gpus)[1]

    def _at(self, gpu_type: str, nodes: int, gpus: int) -> tuple[float, Batch | None]:
        """Goodput and batch on one configuration."""
        if (gpu_type, nodes, gpus) not in self.found:
            look_up([self], [(gpu_type, nodes, gpus)])
        return self.found[gpu_type, nodes, gpus]


def look_up(estimators: Sequence[TrainingEstimator], where: Sequence[tuple[str, int, int]]) -> None:
    """Find goodput and batch of each model on the configuration beside it, all that are not known yet in one pass.

    Args:
        estimators: the models.
        where: for each, GPU type (a key of its `models`), nodes and GPUs.
    """
    new = [(each, key) for each, key in zip(estimators, where, strict=True) if key not in each.found]
    if not new:
        return
    models, keys = zip(*new, strict=True)
    gpu_types, nodes, gpus = zip(*keys, strict=True)
    best = best_of_batches(models, gpu_types, np.array(nodes)[:, None], np.array(gpus)[:, None])
    columns = (numbers[:, 0].tolist() for numbers in best)
    for model, key, goodput, atomic, accumulation in zip(models, keys, *columns, strict=True):
        model.found[key] = goodput, Batch(int(atomic), int(accumulation)) if goodput > 0 else None


class Best(NamedTuple):
    """Goodput and batch of jobs at their best batch; each array has shape (jobs, configurations)."""

    goodput: FloatArray
    """Samples/s of the initial batch size; 0 where a job cannot run."""
    atomic_batch: FloatArray
    accumulation_steps: FloatArray


def best_of_batches(
    estimators: Sequence[TrainingEstimator], gpu_types: Sequence[str], nodes: IntArray, gpus: IntArray
) -> Best:
    """Goodput and batch of many jobs, each on configurations of one GPU type for which it has a model.

    All batches are tried in single precision, in blocks that fit into the processor's cache. The best one is then
    evaluated in double precision. So a batch whose goodput is within 1e-6 of the best may be chosen instead of it.

    Args:
        estimators: J jobs.
        gpu_types: a key of `models` for each job.
        nodes: shape (1 or J, C): N of each configuration.
        gpus: K, of the same shape.
    """
    N, K = np.asarray(nodes, dtype=np.float64), np.asarray(gpus, dtype=np.float64)
    if not np.all((N >= 1) & (K >= N)):
        raise ValueError(
            f"nodes={nodes!r}, gpus={gpus!r}: a configuration needs at least one node, and one GPU per node"
        )
    models = [estimator.models[gpu_type] for estimator, gpu_type in zip(estimators, gpu_types, strict=True)]
    steps = [model.step for model in models]
    whole_JC: NDArray[np.bool_] | None = None
    if max(model.gpus_per_replica for model in models) > 1:
        unit_J1 = np.array([[model.gpus_per_replica] for model in models], dtype=np.float64)
        whole_JC, K = K % unit_J1 == 0, np.maximum(K // unit_J1, 1.0)
        N = np.minimum(N, K)
    sync = _sync_time(steps, N, K)
    numbers = np.array(
        [
            (
                model.step.alpha_c,
                model.step.beta_c,
                model.step.gamma,
                model.max_atomic_batch,
                estimator.initial_batch,
                estimator.largest_batch,
                estimator.grad_sqr / (estimator.grad_sqr + estimator.grad_var),
            )
            for estimator, model in zip(estimators, models, strict=True)
        ]
    ).T
    tried = _tried_batches(estimators)
    best = Best(*(np.empty((len(estimators), K.shape[1])) for _ in Best._fields))
    block = max(BLOCK // (K.shape[1] * BATCHES_TRIED), 1)
    for begin in range(0, len(estimators), block):
        rows = slice(begin, begin + block)
        mine, sync_jC, tried_jB = numbers[:, rows], sync[rows], tried[rows]
        K_jC = K if len(K) == 1 else K[rows]
        goodput_jCB = _progress(
            mine[:, :, None, None].astype(np.float32),
            K_jC[..., None].astype(np.float32),
            sync_jC[..., None].astype(np.float32),
            tried_jB[:, None, :].astype(np.float32),
        ).goodput
        chosen_jC = np.take_along_axis(tried_jB, goodput_jCB.argmax(axis=-1), axis=-1)
        for whole, part in zip(best, _progress(mine[:, :, None], K_jC, sync_jC, chosen_jC), strict=True):
            whole[rows] = part
    if whole_JC is not None:
        best.goodput[~whole_JC] = 0.0
    return best


def _progress(numbers: FloatArray, K: FloatArray, sync: FloatArray, wanted: FloatArray) -> Best:
    """Goodput and batch for total batches of `wanted` samples. All arrays broadcast and keep their precision."""
    alpha_c, beta_c, gamma, max_atomic, initial, largest, wasted = numbers
    micro_steps = np.ceil(wanted / (K * max_atomic))
    parts = K * micro_steps
    atomic = np.ceil(wanted / parts)
    total = parts * atomic
    np.copyto(total, wanted, where=total > largest)
    compute = alpha_c + beta_c * atomic
    seconds = (micro_steps - 1) * compute + overlapped(compute, sync, gamma)
    # throughput x efficiency = total / seconds x 1 / (1 + (S - 1) sqr / (sqr + var)), S = total / initial
    goodput = total / (seconds * (1 + (total / initial - 1) * wasted))
    goodput *= total >= K
    return Best(goodput, atomic, micro_steps - 1)


def _sync_time(steps: Sequence[ThroughputParams], N: FloatArray, K: FloatArray) -> FloatArray:
    """`throughput.sync_time` of J jobs, shape (J, C)."""
    alpha_r, beta_r, alpha_n, beta_n, growth = np.array(
        [(step.alpha_r, step.beta_r, step.alpha_n, step.beta_n, step.growth) for step in steps]
    ).T[:, :, None]
    further = growth_factor(growth, K)
    return np.where(K == 1, 0.0, np.where(N == 1, alpha_r + beta_r * further, alpha_n + beta_n * further))


def _tried_batches(estimators: Sequence[TrainingEstimator]) -> FloatArray:
    """Total batch sizes to try, ascending, shape (J, BATCHES_TRIED). Many jobs have the same range."""
    ranges = [(estimator.initial_batch, estimator.largest_batch) for estimator in estimators]
    place = {pair: index for index, pair in enumerate(dict.fromkeys(ranges))}
    table = np.array([_between(*pair) for pair in place])
    return table[[place[pair] for pair in ranges]]


@lru_cache(maxsize=1024)
def _between(smallest: int, largest: int) -> FloatArray:
    """One row of `_tried_batches`, read-only. It is cached: computing it takes as long as a job's whole goodput."""
    batches = np.asarray(np.geomspace(smallest, largest, BATCHES_TRIED).round())
    batches.setflags(write=False)
    return batches
