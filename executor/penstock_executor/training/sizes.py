"""Which batch a job trains with on the GPUs that it has: the one of most goodput, by what the job has measured of itself.

The plan's batch is advice. The job knows its memory: it grows a GPU's share by at most a factor of 2 at a time, goes back when
memory runs out, and remembers for each GPU type how far it got.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock_executor.training.batches import BatchSize
from penstock_profiles.learning import JobModel
from penstock_profiles.wire import Observation

GROWTH = 2
"""How many times the largest atomic batch that ran is tried next."""

MEMORY_SHARE = 0.9
"""Of a GPU's memory: as much may be in use. The rest is for what the allocator cannot use, and for other libraries."""


class BatchChooser:
    """Chooses the batch; feed it every `Observation` that the job makes.

    Args:
        initial: total batch that the script was written for; none is smaller.
        largest: largest total batch that trains well.
        fixed: the total batch stays `initial` (strong-scaling and rigid jobs).
        gpu_type: where the job runs now, with `nodes` and `replicas`.
        memory_mb: of one GPU; None: not known, memory then shows itself by running out.
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
        """Take in what was measured, here or, from a checkpoint, elsewhere."""
        self._seen[seen.gpu_type, seen.nodes, seen.gpus, seen.atomic_batch, seen.accumulation_steps] = seen
        self._model.observe_report(seen)
        if seen.memory_mb and self._memory_mb and seen.gpu_type == self._gpu_type:
            self._growth = min(GROWTH, max(MEMORY_SHARE * self._memory_mb / seen.memory_mb, 1.0))

    def out_of_memory(self, gpu_type: str, atomic: int) -> None:
        """`atomic` samples did not fit: from now on at most three quarters of that."""
        self.limit(gpu_type, max(1, atomic * 3 // 4))

    def limit(self, gpu_type: str, atomic: int) -> None:
        """No atomic batch above this on `gpu_type`."""
        self._limits[gpu_type] = min(self._limits.get(gpu_type, atomic), atomic)

    def limit_of(self, gpu_type: str) -> float:
        """The largest atomic batch that is allowed on `gpu_type`; infinite if nothing is known."""
        return self._limits.get(gpu_type, math.inf)

    def choose(self) -> BatchSize:
        """The batch to train with now."""
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
        """What was learned, as JSON can hold it."""
        return {"limits": dict(self._limits), "seen": [each.model_dump(mode="json") for each in self._seen.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was called, wherever that was."""
        self._limits |= state["limits"]
        for each in state["seen"]:
            self.observe(Observation.model_validate(each))
