"""From what a job said of itself to the model that decisions rest on.

A measured table in the wish comes first, then the wish's model family from the catalogue; of a job that says neither we
know nothing, and perfect scaling with no preference for a GPU type stands in, as in Sia's first round. What jobs report
while they run joins here later: the loop takes any `ports.ModelSource`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator
from penstock_profiles.families import Families, UnknownFamilyError
from penstock_profiles.gpus import Gpus, load_gpus
from penstock_profiles.sensitivity import SensitivityProfile
from penstock_scheduler.errors import BadWish
from penstock_scheduler.model import Job, JobId, JobWish


@dataclass(frozen=True, slots=True)
class Models:
    """What is known about some jobs."""

    estimators: dict[JobId, AnyEstimator] = field(default_factory=dict)
    restart_costs_s: dict[JobId, float] = field(default_factory=dict)
    unscaled: dict[JobId, int] = field(default_factory=dict)
    """See `Snapshot.unscaled`."""
    remaining: dict[JobId, float] = field(default_factory=dict)
    """See `Snapshot.remaining`."""
    sensitivities: dict[JobId, SensitivityProfile] = field(default_factory=dict)
    """See `Snapshot.sensitivities`."""


class WishModels:
    """Models from the wish alone.

    Args:
        families: the catalogue, by name.
        restart_cost_s: wall-clock seconds that a restart costs a job that does not say.
        gpus: the catalogue of GPU types, by whose names a family finds the site's; None: Penstock's own.
        sensitivities: what CPU and memory are worth, by name; None: nothing is known.
    """

    def __init__(
        self,
        families: Families,
        restart_cost_s: float,
        gpus: Gpus | None = None,
        sensitivities: Mapping[str, SensitivityProfile] | None = None,
    ) -> None:
        self._catalogue = families
        self._gpus = load_gpus() if gpus is None else gpus
        self._restart_cost_s = restart_cost_s
        self._sensitivities = dict(sensitivities or {})
        self._gpu_types: frozenset[str] = frozenset()
        self._families = families
        self._known: dict[JobId, tuple[JobWish, AnyEstimator]] = {}

    def check(self, wish: JobWish) -> None:
        """Raises BadWish if the wish names a family or a profile that is not there, or a batch it cannot train with."""
        if wish.sensitivity is not None and wish.sensitivity not in self._sensitivities:
            known = ", ".join(sorted(self._sensitivities)) or "none: set [daemon] sensitivities"
            raise BadWish(f"sensitivity {wish.sensitivity!r} is not known here; the profiles are {known}")
        _estimator(wish, self._catalogue)

    def models(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> Models:
        """Models and restart costs of `jobs`, whose wishes have passed `check`, on the GPU types of the site.

        A job's estimator is the same object from round to round, as long as its wish and the types are the same.
        """
        if (types := frozenset(gpu_types)) != self._gpu_types:
            self._gpu_types, self._families, self._known = types, self._catalogue.on(sorted(types), self._gpus), {}
        before = self._known
        self._known = {
            job.id: known
            if (known := before.get(job.id)) is not None and known[0] == job.wish
            else (job.wish, _estimator(job.wish, self._families))
            for job in jobs
        }
        return Models(
            {job: estimator for job, (_, estimator) in self._known.items()},
            {job.id: self._cost_s(job.wish) for job in jobs},
            {
                job.id: 0 if job.allocation is None else job.allocation.gpus
                for job in jobs
                if isinstance(self._known[job.id][1], LinearEstimator)
            },
            sensitivities={
                job.id: profile
                for job in jobs
                if (profile := self._sensitivities.get(job.wish.sensitivity or job.wish.model_family or "")) is not None
            },
        )

    def _cost_s(self, wish: JobWish) -> float:
        return wish.restart_cost_s if wish.restart_cost_s is not None else self._restart_cost_s


def _estimator(wish: JobWish, families: Families) -> AnyEstimator:
    if wish.goodput_table is not None:
        return TableEstimator({gpu_type: dict(rates) for gpu_type, rates in wish.goodput_table.items()})
    if wish.model_family is None:
        return LinearEstimator()
    try:
        family = families[wish.model_family]
        if not family.gpus:  # the catalogue knows it, but on none of the site's types
            return LinearEstimator()
        return family.estimator(wish.batch_size, wish.max_batch_size, fixed_batch=wish.fixed_batch)
    except UnknownFamilyError as error:
        raise BadWish(str(error)) from None
    except ValueError as error:
        raise BadWish(f"model_family {wish.model_family!r}: {error}") from None
