"""How fast simulated models really are: from measured tables, or from the catalogue of model families."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock_profiles.families import Family
from penstock_profiles.throughput import FloatArray, ThroughputParams, compute_time, step_time
from penstock_scheduler.simulator.disturbances import draw
from penstock_scheduler.simulator.profiles import ModelTables
from penstock_scheduler.simulator.workloads import application_of

Shape = tuple[int, ...]
"""GPUs on each node."""


class StepTimes(NamedTuple):
    """One micro-step that synchronises."""

    step_s: float
    sync_s: float
    """The part of `step_s` that waits for gradients."""


class ModelTruth(Protocol):
    """The truth about a model, for all jobs that train it."""

    @property
    def initial_batch(self) -> int:
        """Smallest total batch size, samples. Progress is counted at this size."""
        ...

    @property
    def max_batch(self) -> int:
        """Largest total batch size, samples."""
        ...

    @property
    def restart_s(self) -> float:
        """Seconds without progress when a job of the model starts, or continues elsewhere."""
        ...

    @property
    def restart_cost_s(self) -> float:
        """Cost of a restart that the scheduler assumes, s; it may be wrong."""
        ...

    @property
    def training(self) -> float | None:
        """Progress of a whole training; None: unknown."""
        ...

    def runs_on(self, gpu_type: str) -> bool:
        """Whether its speed on this type is known."""
        ...

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """Samples per GPU that fit into memory; 0 on a type on which it does not run."""
        ...

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """Times of a micro-step; None if it cannot run."""
        ...

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """`grad_sqr` and `grad_var` at the initial batch size while it trains at this total batch size; both of shape
        (epochs,)."""
        ...

    @property
    def epoch_ends(self) -> Sequence[float]:
        """Progress at which each epoch but the last is completed, ascending. `noise` is constant in between."""
        ...

    def progress_of(self, epochs: float) -> float | None:
        """Progress of this many epochs; None: unknown."""
        ...


class MeasuredModel:
    """A model from measured tables and recorded trainings."""

    def __init__(self, tables: ModelTables) -> None:
        self._tables = tables
        self.initial_batch, self.max_batch = tables.initial_batch, tables.max_batch
        self.restart_s = tables.application.restart_s_simulated
        self.restart_cost_s = tables.application.restart_s_policy
        self._slowdown = tables.application.slowdown
        self._ends = [iterations * tables.initial_batch for iterations in tables.epoch_iterations]
        self.epoch_ends = tuple(self._ends[:-1])
        self.training: float | None = self._ends[-1]
        self._noise: dict[int, tuple[FloatArray, FloatArray]] = {}

    def runs_on(self, gpu_type: str) -> bool:
        """See `ModelTruth`."""
        return gpu_type in self._tables.types

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """See `ModelTruth`."""
        return self._tables.types[gpu_type].max_atomic_batch(shape) if self.runs_on(gpu_type) else 0

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """See `ModelTruth`. `slowdown` makes a step as long as it was on a real cluster."""
        if not self.runs_on(gpu_type):
            return None
        times = self._tables.types[gpu_type].lookup(shape, atomic_batch)
        return None if times is None else StepTimes(times[0] * self._slowdown, times[1] * self._slowdown)

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """See `ModelTruth`."""
        if batch not in self._noise:
            self._noise[batch] = self._tables.noise(batch)
        return self._noise[batch]

    def progress_of(self, epochs: float) -> float | None:
        """See `ModelTruth`. Unknown beyond the recorded epochs."""
        if epochs > len(self._ends):
            return None
        return float(np.interp(epochs, range(len(self._ends) + 1), [0.0, *self._ends]))


class FamilyModel:
    """A model from the catalogue.

    Args:
        name: of the model; the noise depends on it.
        family: on the GPU types of the cluster.
        noise: standard deviation of the logarithm of the factor on step times; each shape has a factor of its own.
        seed: of the noise.
    """

    def __init__(self, name: str, family: Family, noise: float = 0.0, seed: int = 0) -> None:
        self._name, self._family, self._noise, self._seed = name, family, noise, seed
        self.initial_batch, self.max_batch = family.initial_batch, family.max_batch
        self.restart_s = self.restart_cost_s = family.restart_cost_s
        application = application_of(name)
        self._epoch_samples = application.epoch_samples if application else None
        self.training = float(application.epochs * application.epoch_samples) if application else None
        self.epoch_ends: tuple[float, ...] = ()
        """The whole training counts as one epoch."""

    def runs_on(self, gpu_type: str) -> bool:
        """See `ModelTruth`."""
        return gpu_type in self._family.gpus

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """See `ModelTruth`."""
        return self._family.gpus[gpu_type].max_atomic_batch if self.runs_on(gpu_type) else 0

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """See `ModelTruth`."""
        if not 1 <= atomic_batch <= self.max_atomic_batch(gpu_type, shape):
            return None
        times = modelled(self._family.gpus[gpu_type].step, shape, atomic_batch)
        if self._noise == 0:
            return times
        where = (len(shape), sum(shape))
        factor = math.exp(self._noise * draw(self._seed, "family", self._name, gpu_type, *where).standard_normal())
        return StepTimes(times.step_s * factor, times.sync_s * factor)

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """See `ModelTruth`. Constant over the training."""
        return np.array([self._family.grad_sqr]), np.array([self._family.grad_var])

    def progress_of(self, epochs: float) -> float | None:
        """See `ModelTruth`."""
        return None if self._epoch_samples is None else epochs * self._epoch_samples


def modelled(params: ThroughputParams, shape: Shape, atomic_batch: int) -> StepTimes:
    """Times of a micro-step by the throughput model."""
    step_s = float(step_time(params, len(shape), sum(shape), atomic_batch))
    return StepTimes(step_s, max(step_s - float(compute_time(params, atomic_batch)), 0.0))
