"""From what a job said of itself to the model that decisions rest on.

A measured table in the wish comes first, then the wish's model family from the catalogue; of a job that says neither we
know nothing, and perfect scaling with no preference for a GPU type stands in, as in Sia's first round. What jobs report
while they run joins here later: the loop takes any `ports.ModelSource`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator
from penstock_profiles.families import Family
from penstock_scheduler.errors import BadWish
from penstock_scheduler.model import Job, JobId, JobWish


@dataclass(frozen=True, slots=True)
class Models:
    """What is known about some jobs."""

    estimators: dict[JobId, AnyEstimator] = field(default_factory=dict)
    restart_costs_s: dict[JobId, float] = field(default_factory=dict)


class WishModels:
    """Models from the wish alone.

    Args:
        families: the catalogue, by name.
        restart_cost_s: wall-clock seconds that a restart costs a job that does not say.
    """

    def __init__(self, families: Mapping[str, Family], restart_cost_s: float) -> None:
        self._families = families
        self._restart_cost_s = restart_cost_s

    def check(self, wish: JobWish) -> None:
        """Raises BadWish if the wish names a family that the catalogue does not have, or a batch it cannot train with."""
        self._estimator(wish)

    def models(self, jobs: Sequence[Job]) -> Models:
        """Models and restart costs of `jobs`, whose wishes have passed `check`."""
        return Models(
            {job.id: self._estimator(job.wish) for job in jobs}, {job.id: self._cost_s(job.wish) for job in jobs}
        )

    def _estimator(self, wish: JobWish) -> AnyEstimator:
        if wish.goodput_table is not None:
            return TableEstimator({gpu_type: dict(rates) for gpu_type, rates in wish.goodput_table.items()})
        if wish.model_family is None:
            return LinearEstimator()
        family = self._families.get(wish.model_family)
        if family is None:
            raise BadWish(
                f"unknown model_family {wish.model_family!r}; the catalogue has {', '.join(sorted(self._families))}"
            )
        try:
            return family.estimator(wish.batch_size, wish.max_batch_size, fixed_batch=wish.fixed_batch)
        except ValueError as error:
            raise BadWish(f"model_family {wish.model_family!r}: {error}") from None

    def _cost_s(self, wish: JobWish) -> float:
        return wish.restart_cost_s if wish.restart_cost_s is not None else self._restart_cost_s
