"""The memory of a simulated site: what ended jobs have shown about jobs of their kind.

On a real cluster, `penstock_scheduler.jobs.kin` reads the reports of ended jobs from the store. Here ended jobs teach directly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.kin import Kin
from penstock_profiles.learning import JobModel
from penstock_profiles.observations import Measured

JOBS = 5
"""Newest jobs of a kind that count, as in the store."""


@dataclass(slots=True)
class _Kind:
    jobs: list[tuple[JobModel, int, float]] = field(default_factory=list)
    kin: Kin | None = None


class SimulatedMemory:
    """What jobs of each kind have shown. It may be kept from one simulation to the next."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def teach(self, kind: str, initial_batch: int, model: JobModel, most_gpus: int, work: float) -> None:
        """Learn from a job that has ended."""
        known = self._kinds.setdefault((kind, initial_batch), _Kind())
        known.jobs = [*known.jobs, (model, most_gpus, work)][-JOBS:]
        known.kin = None

    def recall(self, kind: str, initial_batch: int, max_batch: int) -> Kin | None:
        """What is known of a kind; None: nothing."""
        known = self._kinds.get((kind, initial_batch))
        if known is None:
            return None
        if known.kin is None:
            known.kin = together(initial_batch, max_batch, known.jobs)
        return known.kin


def together(initial_batch: int, max_batch: int, jobs: list[tuple[JobModel, int, float]]) -> Kin | None:
    """What these jobs have shown together; None: they have measured nothing."""
    shared = JobModel(initial_batch, max_batch)
    for model, _, _ in jobs:
        if model.noise is not None:
            shared.observe_noise(model.noise)
        for gpu_type, limit in model.limits.items():
            shared.observe_limit(gpu_type, limit)
        for gpu_type, measured in model.measurements.items():
            for row in zip(*Measured(*(column.tolist() for column in measured)), strict=True):
                nodes, replicas, atomic_batch, step_s, sync_s = row
                shared.observe(gpu_type, int(nodes), int(replicas), int(atomic_batch), step_s, sync_s)
    estimator = shared.estimator
    if not isinstance(estimator, TrainingEstimator):
        return None
    return Kin(estimator, max(most for _, most, _ in jobs), tuple(work for _, _, work in jobs))
