"""Goodput of a whole snapshot at once: jobs x configurations. Only jobs whose model has changed are evaluated again.

Axes: J jobs, C configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock_profiles.estimators import AnyEstimator, Batch, TrainingEstimator
from penstock_profiles.estimators.training import Best, best_of_batches, look_up
from penstock_profiles.throughput import FloatArray


class Configurations(NamedTuple):
    """Columns of a matrix: GPU type, nodes and total GPUs of each."""

    gpu_types: tuple[str, ...]
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]


class GoodputMatrix:
    """Evaluates matrices, and keeps from one call to the next the rows of jobs whose estimator is the same object.

    Estimators never change: a job with a new model has a new estimator. Those of the last call are kept until the next.
    """

    def __init__(self) -> None:
        self._configurations = Configurations((), (), ())
        self._estimators: list[AnyEstimator] = []
        self._best_JC = _nothing(0, 0)

    def evaluate(self, estimators: Sequence[AnyEstimator], configurations: Configurations) -> FloatArray:
        """Goodput of each job on each configuration at its best batch, shape (J, C); read-only.

        It is in each estimator's own unit, >= 0, and 0 where the job cannot run; see `Estimator.goodput`.
        """
        if configurations != self._configurations:
            self._configurations, self._estimators = configurations, []
            self._best_JC = _nothing(0, len(configurations.gpus))
        known = {id(estimator): row for row, estimator in enumerate(self._estimators)}
        source_J = np.array([known.get(id(estimator), -1) for estimator in estimators], dtype=np.int64)
        new = np.flatnonzero(source_J < 0).tolist()
        source_J[new] = len(self._estimators) + np.arange(len(new))
        fresh = best_matrix([estimators[row] for row in new], configurations)
        self._best_JC = Best(*(np.concatenate(columns)[source_J] for columns in zip(self._best_JC, fresh, strict=True)))
        self._best_JC.goodput.setflags(write=False)
        self._estimators = list(estimators)
        return self._best_JC.goodput

    def batches(self, rows: Sequence[int], columns: Sequence[int]) -> list[Batch | None]:
        """The best batch of each of these jobs of the last call on one of the configurations; see `Estimator.best_batch`."""
        gpu_types, nodes, gpus = self._configurations
        chosen = zip(*(numbers[rows, columns].tolist() for numbers in self._best_JC), strict=True)
        found: list[Batch | None] = []
        for row, column, (goodput, atomic, accumulation) in zip(rows, columns, chosen, strict=True):
            estimator = self._estimators[row]
            if not isinstance(estimator, TrainingEstimator):
                found.append(estimator.best_batch(gpu_types[column], nodes[column], gpus[column]))
            else:
                found.append(Batch(int(atomic), int(accumulation)) if goodput > 0 else None)
        return found


def best_matrix(estimators: Sequence[AnyEstimator], configurations: Configurations) -> Best:
    """Goodput as in `GoodputMatrix.evaluate`, and the batches of training jobs, all evaluated in one pass."""
    best_JC = _nothing(len(estimators), len(configurations.gpus))
    N, K = (np.array(numbers, dtype=np.int64) for numbers in (configurations.nodes, configurations.gpus))
    columns = {
        gpu_type: np.flatnonzero([name == gpu_type for name in configurations.gpu_types])
        for gpu_type in dict.fromkeys(configurations.gpu_types)
    }
    # A row of the pass is a job on a GPU type. Types with fewer configurations than others repeat some of them.
    widest = max(map(len, columns.values()), default=0)
    as_wide = {gpu_type: np.resize(where, widest) for gpu_type, where in columns.items()}
    passed = [
        (row, estimator, gpu_type)
        for row, estimator in enumerate(estimators)
        if isinstance(estimator, TrainingEstimator)
        for gpu_type in columns
        if gpu_type in estimator.models
    ]
    if passed:
        rows, training, gpu_types = zip(*passed, strict=True)
        where_PC = np.array([as_wide[gpu_type] for gpu_type in gpu_types])
        for whole, part in zip(best_JC, best_of_batches(training, gpu_types, N[where_PC], K[where_PC]), strict=True):
            whole[np.array(rows)[:, None], where_PC] = part
    for row, estimator in enumerate(estimators):
        if not isinstance(estimator, TrainingEstimator):
            for gpu_type, where in columns.items():
                best_JC.goodput[row, where] = estimator.goodput(gpu_type, N[where], K[where])
    return best_JC


def _nothing(jobs: int, configurations: int) -> Best:
    return Best(*(np.zeros((jobs, configurations)) for _ in Best._fields))


def goodputs(estimators: Sequence[AnyEstimator], chosen: Configurations) -> FloatArray:
    """Goodput of each job on the configuration chosen for it, shape (J,); `chosen` has J entries. See `Estimator.goodput`."""
    look_up_all(estimators, chosen)
    nodes, gpus = (np.array(numbers, dtype=np.int64)[:, None] for numbers in (chosen.nodes, chosen.gpus))
    each = zip(estimators, chosen.gpu_types, nodes, gpus, strict=True)
    return np.array([estimator.goodput(gpu_type, N, K)[0] for estimator, gpu_type, N, K in each], dtype=np.float64)


def best_batches(estimators: Sequence[AnyEstimator], chosen: Configurations) -> list[Batch | None]:
    """Batch of each job on the configuration chosen for it; `chosen` has J entries. See `Estimator.best_batch`."""
    look_up_all(estimators, chosen)
    each = zip(estimators, *chosen, strict=True)
    return [estimator.best_batch(gpu_type, nodes, gpus) for estimator, gpu_type, nodes, gpus in each]


def look_up_all(estimators: Sequence[AnyEstimator], chosen: Configurations) -> None:
    """Find goodput and batch of each job on the configuration chosen for it, all in one pass. To ask for one of them then
    takes microseconds. `chosen` has J entries."""
    found = [
        (estimator, where)
        for estimator, where in zip(estimators, zip(*chosen, strict=True), strict=True)
        if isinstance(estimator, TrainingEstimator) and where[0] in estimator.models
    ]
    look_up([estimator for estimator, _ in found], [where for _, where in found])
