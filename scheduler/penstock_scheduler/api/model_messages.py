"""Bodies of the API about what ended jobs have taught: `penstock models`."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock_profiles.estimators import TrainingEstimator
from penstock_scheduler.api.messages import Body
from penstock_scheduler.model.plausible import MAX_COUNT

MOST_IMPORTED = 1000
"""Kinds in one import."""


class Taught(Body):
    """What ended jobs of one kind have shown together. It names no user, so it can be given to another site."""

    name: str = Field(min_length=1, max_length=1000)
    """The jobs' name, with `#` for each number in it."""
    request: str = Field(default="", max_length=1000)
    """What else their job specs must have: batch sizes and the unit of GPUs, as `kind` shows them after the name."""
    estimator: TrainingEstimator
    most_gpus: int = Field(ge=1, le=MAX_COUNT)
    """Most GPUs on which one of them was measured."""
    work: tuple[float, ...] = Field(default=(), max_length=100)
    """Whole work of those whose work is known, in samples at the estimator's initial batch size."""

    @field_validator("estimator")
    @classmethod
    def _plausible(cls, estimator: TrainingEstimator) -> TrainingEstimator:
        counts = {"initial_batch": estimator.initial_batch, "max_batch": estimator.max_batch}
        for name, model in estimator.models.items():
            counts[f"models.{name}.max_atomic_batch"] = model.max_atomic_batch
            counts[f"models.{name}.gpus_per_replica"] = model.gpus_per_replica
        if too_large := [name for name, count in counts.items() if count > MAX_COUNT]:
            raise ValueError(f"{', '.join(too_large)} must be at most {MAX_COUNT:,}")
        return estimator


class KindView(Body):
    """A kind of jobs, from which new jobs of this kind may learn."""

    kind: str
    """Its name in commands, such as `ada/train-#@64-512`."""
    user: str
    """Whose jobs they are; empty: an import, for the jobs of all users."""
    jobs: int
    """Ended jobs that count; 0: an import."""
    newest_s: float
    """When the newest of them ended, or when the kind was imported, s since 1970."""
    taught: Taught | None = None
    """Absent in a list, and where the jobs' reports tell nothing."""


class KindList(Body):
    """The kinds of the newest ended jobs."""

    kinds: list[KindView]
    recalled: bool
    """Whether new jobs start with what their kind has shown: the setting daemon.recall_models."""


class KindOrder(Body):
    """A kind to forget."""

    kind: str = Field(min_length=1, max_length=3000)


class KindImport(Body):
    """Kinds of another site."""

    kinds: list[Taught] = Field(min_length=1, max_length=MOST_IMPORTED)


class KindsImported(Body):
    """What was imported."""

    kinds: list[str]
