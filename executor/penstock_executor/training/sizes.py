"""Chooses the batch that a job trains with on its GPUs: the one with the highest goodput, by the job's own
measurements.

The plan's batch is only advice, since the job knows its memory. It grows a GPU's share by at most a factor of 2 at a
time, shrinks it when memory runs out, and remembers the limit for each GPU type. A larger batch costs a checkpoint, and
any other batch costs the script's compiled code, so it changes the batch only for a gain of `WORTHWHILE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock_executor.training.batches import BatchSize
from penstock_profiles.estimators.training import TrainingEstimator
from penstock_profiles.learning import JobModel
from penstock_profiles.throughput import efficiency, step_time
from penstock_profiles.wire import Observation

GROWTH = 2
"""The next atomic batch to try is at most this many times the largest that ran."""

WORTHWHILE = 1.05
"""Another batch must promise this many times the goodput of the present one."""

MEMORY_SHARE = 0.9
"""Share of a GPU's memory that may be in use. The allocator cannot use all of the rest, and other libraries need
some."""


class BatchChooser:
    """Chooses the batch. Pass it every `Observation` of the job.

    Args:
        initial: total batch that the script was written for, in samples. No total batch is smaller.
        largest: largest total batch that trains well, in samples.
        fixed: whether the total batch stays `initial` (strong-scaling and rigid jobs).
        gpu_type: GPU type on which the job runs now.
        nodes: number of nodes on which it runs now.
        replicas: number of replicas that it has now.
        memory_mb: memory of one GPU, in MiB. None: unknown; the limit then shows when memory runs out.
    """

    def __init__(
        self,
        initial: int,
        largest: int,
        *,
        fixed: bool,
        gpu_type: str,
        nodes: int,
        replicas: int,
        memory_mb: float | None = None,
    ) -> None:
        self._model = JobModel(initial, largest, fixed_batch=fixed)
        self._initial, self._largest, self._fixed = initial, largest, fixed
        self._gpu_type, self._nodes, self._replicas, self._memory_mb = gpu_type, nodes, replicas, memory_mb
        self._limits: dict[str, int] = {}
        self._seen: dict[tuple[object, ...], Observation] = {}
        self._growth: float = GROWTH

    def observe(self, seen: Observation) -> None:
        """Learn from an observation, made on these GPUs or, in a checkpoint, on others."""
        self._seen[seen.gpu_type, seen.nodes, seen.gpus, seen.atomic_batch, seen.accumulation_steps] = seen
        self._model.observe_report(seen)
        if seen.memory_mb and self._memory_mb and seen.gpu_type == self._gpu_type:
            self._growth = min(GROWTH, max(MEMORY_SHARE * self._memory_mb / seen.memory_mb, 1.0))

    def out_of_memory(self, gpu_type: str, atomic: int) -> None:
        """Note that `atomic` samples did not fit: from now on, choose at most three quarters of that."""
        self.limit(gpu_type, max(1, atomic * 3 // 4))

    def limit(self, gpu_type: str, atomic: int) -> None:
        """Choose no atomic batch above `atomic` on `gpu_type`."""
        self._limits[gpu_type] = min(self._limits.get(gpu_type, atomic), atomic)

    def limit_of(self, gpu_type: str) -> float:
        """The largest atomic batch that is allowed on `gpu_type`; infinite if no limit is known."""
        return self._limits.get(gpu_type, math.inf)

    def choose(self, present: BatchSize | None = None) -> BatchSize:
        """The batch to train with now.

        Args:
            present: the batch that the job trains with. It stays unless another one promises `WORTHWHILE` times its
                goodput, or it no longer fits into memory. None: the job begins.
        """
        best = self._best()
        if present is None or best == present or present.atomic > self.limit_of(self._gpu_type):
            return best
        now, then = self._goodput(present), self._goodput(best)
        return present if now is not None and then is not None and then < WORTHWHILE * now else best

    def _goodput(self, size: BatchSize) -> float | None:
        """Predicted goodput at a batch, in samples/s of the initial batch size; None if nothing is known."""
        estimator = self._model.estimator
        if not isinstance(estimator, TrainingEstimator) or self._gpu_type not in estimator.models:
            return None
        accumulation = size.accumulation_steps(self._replicas)
        atomic = -(-size.total // (self._replicas * (accumulation + 1)))
        step = estimator.models[self._gpu_type].step
        seconds = step_time(step, min(self._nodes, self._replicas), self._replicas, atomic, accumulation)
        worth = efficiency(estimator.grad_sqr, estimator.grad_var, max(size.total, self._initial), self._initial)
        return float(size.total * worth / seconds)

    def _best(self) -> BatchSize:
        share = -(-self._initial // self._replicas)
        ran = max((each.atomic_batch for each in self._seen.values() if each.gpu_type == self._gpu_type), default=0)
        limit = max(int(ran * self._growth), share)
        limit = min(self._limits.get(self._gpu_type, limit), limit)
        if self._fixed or not ran:
            return BatchSize(self._initial, min(share, limit))
        self._model.observe_limit(self._gpu_type, limit)
        best = self._model.estimator.best_batch(self._gpu_type, self._nodes, self._replicas)
        if best is None:
            return BatchSize(self._initial, min(share, limit))
        total = self._replicas * best.atomic_batch * (best.accumulation_steps + 1)
        return BatchSize(min(max(total, self._initial), self._largest), min(best.atomic_batch, limit))

    def state_dict(self) -> dict[str, Any]:
        """What was learned, for a checkpoint, as JSON can hold it."""
        return {"limits": dict(self._limits), "seen": [each.model_dump(mode="json") for each in self._seen.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what `state_dict` returned, possibly on other GPUs. Of two limits, the smaller holds."""
        for gpu_type, atomic in state["limits"].items():
            self.limit(gpu_type, atomic)
        for each in state["seen"]:
            self.observe(Observation.model_validate(each))
