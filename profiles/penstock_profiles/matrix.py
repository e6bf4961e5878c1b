"""Goodput of a whole snapshot at once: jobs x configurations, evaluated anew only where a job's model is another.

Axes: J jobs, C configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock_profiles.estimators import AnyEstimator, Batch, IntArray, TrainingEstimator
from penstock_profiles.estimators.training import best_of_batches
from penstock_profiles.throughput import FloatArray


class Configurations(NamedTuple):
    """Columns of a matrix: each one's GPU type, nodes and GPUs in total."""

    gpu_types: tuple[str, ...]
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]


class GoodputMatrix:
    """The matrix of the last call, of which the next one keeps the rows of jobs whose estimator is the same object.

    Estimators never change, so a job with a new model has a new one. The last call's estimators are held until the next.
    """

    def __init__(self) -> None:
        self._configurations = Configurations((), (), ())
        self._estimators: list[AnyEstimator] = []
        self._goodput_JC: FloatArray = np.empty((0, 0))

    def evaluate(self, estimators: Sequence[AnyEstimator], configurations: Configurations) -> FloatArray:
        """Goodput of each job on each configuration at its best batch, shape (J, C); read-only.

        In each estimator's own unit, >= 0, and 0 where the job cannot run; see `Estimator.goodput`.
        """
        if configurations != self._configurations:
            self._configurations, self._estimators = configurations, []
            self._goodput_JC = np.empty((0, len(configurations.gpus)))
        known = {id(estimator): row for row, estimator in enumerate(self._estimators)}
        source_J = np.array([known.get(id(estimator), -1) for estimator in estimators], dtype=np.int64)
        goodput_JC = np.empty((len(estimators), len(configurations.gpus)))
        goodput_JC[source_J >= 0] = self._goodput_JC[source_J[source_J >= 0]]
        new = np.flatnonzero(source_J < 0).tolist()
        goodput_JC[new] = goodput_matrix([estimators[row] for row in new], configurations)
        goodput_JC.setflags(write=False)
        self._estimators, self._goodput_JC = list(estimators), goodput_JC
        return goodput_JC


def goodput_matrix(estimators: Sequence[AnyEstimator], configurations: Configurations) -> FloatArray:
    """As `GoodputMatrix.evaluate`, of nothing known before: all training jobs in one pass for each GPU type."""
    goodput_JC = np.zeros((len(estimators), len(configurations.gpus)))
    N, K = (np.array(numbers, dtype=np.int64) for numbers in (configurations.nodes, configurations.gpus))
    for gpu_type in dict.fromkeys(configurations.gpu_types):
        columns = np.flatnonzero([name == gpu_type for name in configurations.gpu_types])
        rows, training = _training(estimators, [gpu_type] * len(estimators))
        if training:
            best = best_of_batches(training, [gpu_type] * len(training), N[None, columns], K[None, columns])
            goodput_JC[np.ix_(rows, columns)] = best.goodput
        for row, estimator in enumerate(estimators):
            if not isinstance(estimator, TrainingEstimator):
                goodput_JC[row, columns] = estimator.goodput(gpu_type, N[columns], K[columns])
    return goodput_JC


def best_batches(estimators: Sequence[AnyEstimator], chosen: Configurations) -> list[Batch | None]:
    """Batch of each job on the one configuration chosen for it; `chosen` has J entries. See `Estimator.best_batch`."""
    batches: list[Batch | None] = [None] * len(estimators)
    N, K = (np.array(numbers, dtype=np.int64)[:, None] for numbers in (chosen.nodes, chosen.gpus))
    rows, training = _training(estimators, chosen.gpu_types)
    if training:
        best = best_of_batches(training, [chosen.gpu_types[row] for row in rows], N[rows], K[rows])
        for row, goodput, atomic, accumulation in zip(rows, *(numbers[:, 0] for numbers in best), strict=True):
            batches[row] = Batch(int(atomic), int(accumulation)) if goodput > 0 else None
    for row, estimator in enumerate(estimators):
        if not isinstance(estimator, TrainingEstimator):
            batches[row] = estimator.best_batch(chosen.gpu_types[row], chosen.nodes[row], chosen.gpus[row])
    return batches


def _training(estimators: Sequence[AnyEstimator], gpu_types: Sequence[str]) -> tuple[IntArray, list[TrainingEstimator]]:
    """The training jobs that have a model for their GPU type, and their rows."""
    found = [
        (row, estimator)
        for row, (estimator, gpu_type) in enumerate(zip(estimators, gpu_types, strict=True))
        if isinstance(estimator, TrainingEstimator) and gpu_type in estimator.models
    ]
    return np.array([row for row, _ in found], dtype=np.int64), [estimator for _, estimator in found]
