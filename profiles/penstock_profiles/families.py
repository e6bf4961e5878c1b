"""Known model families, read from `data/families.toml` and a site's own file of the same format."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from penstock_profiles.catalogue import DATA, read_catalogue, unknown
from penstock_profiles.estimators import GpuModel, TrainingEstimator
from penstock_profiles.gpus import Gpus
from penstock_profiles.throughput import ThroughputParams, compute_time

_BUILT_IN = DATA / "families.toml"

_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class UnknownFamilyError(LookupError):
    """The catalogue has no such family; the message lists the known ones."""


class FamilyOnGpu(BaseModel):
    """A family on one GPU type; the fields are described in `data/families.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_atomic_batch: PositiveInt
    median_rel_err: _Finite | None = None
    step: ThroughputParams


class Family(BaseModel):
    """A model family; the fields are described in `data/families.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    source: str
    initial_batch: PositiveInt
    max_batch: PositiveInt
    grad_sqr: _Finite
    grad_var: _Finite
    restart_cost_s: _Finite
    gpus: dict[str, FamilyOnGpu]

    @model_validator(mode="after")
    def _makes_an_estimator(self) -> Family:
        self.estimator(max_batch_size=self.max_batch)
        return self

    def estimator(
        self, batch_size: int | None = None, max_batch_size: int | None = None, fixed_batch: bool = False
    ) -> TrainingEstimator:
        """A job of this family, before anything is measured.

        Args:
            batch_size: the job's initial total batch, samples; None: the family's. Progress is counted in it. The
                gradient's variance is converted to this size: it falls as 1 / batch size.
            max_batch_size: the job's largest total batch, samples; None: the family's, or `batch_size` if larger.
            fixed_batch: whether the total batch stays at `batch_size`.

        Raises:
            ValueError: `batch_size` is below 1 or above `max_batch_size`.
        """
        initial = self.initial_batch if batch_size is None else batch_size
        if initial < 1:
            raise ValueError(f"batch_size={batch_size} is not a batch size; it must be at least 1")
        return TrainingEstimator(
            models={name: GpuModel(gpu.step, gpu.max_atomic_batch) for name, gpu in self.gpus.items()},
            initial_batch=initial,
            max_batch=max(self.max_batch, initial) if max_batch_size is None else max_batch_size,
            grad_sqr=self.grad_sqr,
            grad_var=self.grad_var * self.initial_batch / initial,
            fixed_batch=fixed_batch,
        )


class Families(dict[str, Family]):
    """Families by name. Looking up an unknown one raises UnknownFamilyError, which lists the known ones."""

    def __missing__(self, name: str) -> Family:
        raise UnknownFamilyError(unknown("model family", name, self))

    @functools.cached_property
    def slowdowns(self) -> dict[tuple[str, str], float]:
        """(type A, type B) -> time of a step on one GPU of B over that on one of A: the median over families with both.

        It is taken at the largest atomic batch that fits into both, where fixed costs matter least.
        """
        ratios: dict[tuple[str, str], list[float]] = {}
        for family in self.values():
            for a, b in itertools.product(family.gpus.items(), repeat=2):
                batch = min(on_gpu.max_atomic_batch for _, on_gpu in (a, b))
                time_a, time_b = (float(compute_time(on_gpu.step, batch)) for _, on_gpu in (a, b))
                ratios.setdefault((a[0], b[0]), []).append(time_b / time_a)
        return {pair: float(np.median(values)) for pair, values in ratios.items()}

    @functools.cached_property
    def fastest(self) -> dict[tuple[str, str], float]:
        """(type A, type B) -> goodput on one GPU of A over that on one of B: the largest of all families with both."""
        one, found = np.array([1]), dict[tuple[str, str], float]()
        for family in self.values():
            model = family.estimator() if family.gpus else None
            rates = {} if model is None else {name: float(model.goodput(name, one, one)[0]) for name in family.gpus}
            for a, b in itertools.permutations(sorted(name for name, rate in rates.items() if rate > 0), 2):
                found[a, b] = max(found.get((a, b), 0.0), rates[a] / rates[b])
        return found

    def speeds(self, gpu_types: Collection[str]) -> dict[str, float]:
        """GPU type -> speed of one GPU over that of the slowest of these types, for a job of which nothing is known.

        Empty if the families do not compare all of these types: a type of unknown speed would be taken for a slow or a
        fast one.
        """
        first = min(gpu_types, default="")
        if any((first, name) not in self.slowdowns for name in gpu_types):
            return {}
        slowest = max((self.slowdowns[first, name] for name in gpu_types), default=1.0)
        return {name: slowest / self.slowdowns[first, name] for name in sorted(gpu_types)}

    def on(self, gpu_types: Iterable[str], gpus: Gpus) -> Families:
        """The same families on the GPU types of one site, under the site's names.

        A type is also looked up by its other names, so that a site's `rtx2080ti` finds a family's table for `rtx`.
        """
        types = {name: gpus.canonical(name) for name in gpu_types}
        here = {name: _renamed(family, types, gpus) for name, family in self.items()}
        return Families({name: self[name].model_copy(update={"gpus": on_gpus}) for name, on_gpus in here.items()})


def _renamed(family: Family, types: Mapping[str, str], gpus: Gpus) -> dict[str, FamilyOnGpu]:
    by_type = {gpus.canonical(name): on_gpu for name, on_gpu in family.gpus.items()}
    found = {name: family.gpus.get(name, by_type.get(gpu_type)) for name, gpu_type in types.items()}
    return {name: on_gpu for name, on_gpu in found.items() if on_gpu is not None}


def load_families(extra: Path | None = None) -> Families:
    """Families that come with Penstock, and those of the file `extra`, which replace Penstock's of the same name.

    Raises:
        CatalogueError: a file is missing, is not TOML, or has a field that is unknown, missing or out of range.
    """
    return Families(_read(_BUILT_IN) | (_read(extra) if extra is not None else {}))


def _read(path: Path) -> dict[str, Family]:
    step = [field.name for field in dataclasses.fields(ThroughputParams)]
    return read_catalogue(path, Family, _BUILT_IN.name, nested={3: list(FamilyOnGpu.model_fields), 4: step})
