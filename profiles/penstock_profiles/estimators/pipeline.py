"""Hybrid parallelism: replicas of a model that is cut into pipeline stages, each on one or several GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import ConfigDict

from penstock_profiles.estimators.base import STRICT, Batch, IntArray
from penstock_profiles.throughput import FloatArray, ThroughputParams, check_noise, efficiency, step_time


@dataclass(frozen=True, slots=True)
class PipelineGpu:
    """How the model is divided on one GPU type. Raises ValueError unless both degrees are positive."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: ThroughputParams
    """`alpha_c`, `beta_c`: the forward pass of the slowest stage on a micro-batch, with the communication among its
    GPUs and with the next stage. The others: replicas synchronise as single GPUs do in data-parallel training."""
    stages: int
    """Number of parts of the model that work one after the other. The pipeline fills and drains over them."""
    tensor_parallel: int = 1
    """Number of GPUs that share one stage. `step` includes their speed-up; they do not add to the bubble."""

    def __post_init__(self) -> None:
        for name in ("stages", "tensor_parallel"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range; it must be at least 1")

    @property
    def gpus_per_replica(self) -> int:
        """P, number of GPUs of one replica of the model. A job runs only on multiples of it."""
        return self.stages * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class PipelineEstimator:
    """Data-parallel replicas of a GPipe pipeline: goodput = throughput x statistical efficiency.

    K = gpus / P replicas pass M micro-batches of m samples through S stages, then synchronise:
    T = 3 f (S - 1 + M) + T_net with f = alpha_c + beta_c m, throughput = K M m / T. The backward pass counts as two
    forward passes, and S - 1 is GPipe's bubble. T_net is that of K data-parallel ranks on at most K nodes. This is
    GoodputFunctionPMP of Sia's artifact, where P = S. Departure: with gamma > 1, T_net overlaps with the last
    micro-batch as in `throughput.step_time`; at gamma = 1 the two add, as in the artifact.

    The job fixes M and m, so the total batch K M m grows with the replicas. The goodput is 0 if the total batch exceeds
    `max_batch`, or if `gpus` is no multiple of P.

    Raises:
        ValueError: no GPU type, counts below 1, a replica's batch outside `initial_batch` to `max_batch`, or noise that
            describes no gradient.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    models: dict[str, PipelineGpu]
    """GPU type -> layout of the job on it; P may differ. On other types the goodput is 0."""
    micro_batches: int
    """M, per replica and optimiser step."""
    micro_batch: int
    """m, samples."""
    initial_batch: int
    """Total batch size, samples, that progress is counted in."""
    max_batch: int
    """Largest total batch size, samples."""
    grad_sqr: float
    """Squared norm of the true gradient."""
    grad_var: float
    """Trace of the gradient's covariance at `initial_batch`, in the unit of `grad_sqr`."""
    kind: Literal["pipeline"] = "pipeline"

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models={} names no GPU type to run on; use a LinearEstimator if nothing is known")
        for name in ("micro_batches", "micro_batch", "initial_batch"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a count; it must be at least 1")
        if not self.initial_batch <= self._replica_batch <= self.max_batch:
            raise ValueError(
                f"micro_batches={self.micro_batches} x micro_batch={self.micro_batch} = {self._replica_batch} samples"
                " of "
                f"one replica are not within initial_batch={self.initial_batch} and max_batch={self.max_batch}; "
                "change the micro-batches, or the limits"
            )
        check_noise(self.grad_sqr, self.grad_var)

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`."""
        if gpu_type not in self.models:
            return np.zeros(np.broadcast_shapes(np.shape(nodes), np.shape(gpus)))
        model = self.models[gpu_type]
        replicas = np.maximum(np.asarray(gpus) // model.gpus_per_replica, 1)
        total = replicas * self._replica_batch
        goodput = (
            total
            / self._step_time_s(model, nodes, replicas)
            * efficiency(self.grad_sqr, self.grad_var, total, self.initial_batch)
        )
        runs = (np.asarray(gpus) % model.gpus_per_replica == 0) & (total <= self.max_batch)
        return np.where(runs, goodput, 0.0)

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator`. The job's only batch: each replica's micro-batches."""
        if self.goodput(gpu_type, np.asarray(nodes), np.asarray(gpus)) <= 0:
            return None
        return Batch(self.micro_batch, self.micro_batches - 1)

    @property
    def _replica_batch(self) -> int:
        return self.micro_batches * self.micro_batch

    def _step_time_s(self, model: PipelineGpu, nodes: IntArray, replicas: IntArray) -> FloatArray:
        both_passes = replace(model.step, alpha_c=3 * model.step.alpha_c, beta_c=3 * model.step.beta_c)
        # A replica that spans nodes is still one rank of the all-reduce.
        ranks_nodes = np.minimum(nodes, replicas)
        return step_time(
            both_passes, ranks_nodes, replicas, self.micro_batch, model.stages - 1 + self.micro_batches - 1
        )
