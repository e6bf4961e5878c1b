"""Measured steps of one job on one GPU type, as running averages that outliers do not move, for a fit."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock_profiles.throughput import FloatArray

WINDOW = 15
"""Number of reports kept for each shape and batch size. A report covers about thirty seconds of steps, so the average
follows a job whose speed changes within minutes. It is wrong only if eight of the fifteen reports are."""

NOTICEABLE = 0.02
"""Relative change of an average from which a new fit is worth its time of some milliseconds."""


RULES = (
    "a whole number of at least 1",
    "whole, at least one per node",
    "at least 1 sample",
    "more than 0 s",
    "at least 0 s and less than the step",
)
"""What each field of `Measured` must be, for messages."""


class Shape(NamedTuple):
    """Key of a running average."""

    nodes: int
    replicas: int
    atomic_batch: int


class Measured(NamedTuple):
    """Columns of a fit's input, all of shape (points,): `nodes`, `replicas`, `atomic_batch`, `step_s`, `sync_s`.

    `step_s` is the time of one micro-step with its synchronisation, without accumulation. `sync_s` is the part of it in
    which the GPUs wait for gradients, so `step_s - sync_s` is the compute time.
    """

    nodes: FloatArray
    replicas: FloatArray
    atomic_batch: FloatArray
    step_s: FloatArray
    sync_s: FloatArray


@dataclass(slots=True)
class Observations:
    """Step times by shape and batch size, averaged over the middle half of the newest reports.

    A step that takes ten times as long, because of a slow disk, another job or compilation in a first step, lies in the
    outer half and has no weight, even if it comes first. Of two reports the shorter counts, since disturbances only
    slow steps down.
    """

    _recent: dict[Shape, deque[tuple[float, float, float]]] = field(default_factory=dict)
    _average: dict[Shape, tuple[float, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._average)

    def add(
        self, nodes: int, replicas: int, atomic_batch: int, step_s: float, sync_s: float = 0.0, steps: float = 1.0
    ) -> bool:
        """Add a report. Returns whether it is news: a new shape, or an average that moved by more than `NOTICEABLE`.

        Args:
            nodes: N >= 1, nodes that held the replicas.
            replicas: K >= N.
            atomic_batch: samples per replica and micro-step, >= 1.
            step_s: time of one step, > 0.
            sync_s: the part of it that waited for gradients, >= 0 and < `step_s`.
            steps: number of steps that the report averages, > 0; it is the report's weight.

        Raises:
            ValueError: an argument is out of its range or not a number; the report is then not added.
        """
        point = tuple(map(float, (nodes, replicas, atomic_batch, step_s, sync_s)))
        if not all(_possible(*point)):
            check(Measured(*(np.array([value]) for value in point)))
        if not 0 < steps < math.inf:
            raise ValueError(f"steps={steps!r} is not a positive number; leave out reports without steps")
        shape = Shape(int(nodes), int(replicas), int(atomic_batch))
        reports = self._recent.setdefault(shape, deque(maxlen=WINDOW))
        reports.append((float(step_s), float(sync_s), float(steps)))
        before, now = self._average.get(shape), _middle_half(sorted(reports))
        if before is not None and all(
            abs(new - old) <= NOTICEABLE * before[0] for new, old in zip(now, before, strict=True)
        ):
            return False
        self._average[shape] = now
        return True

    def measured(self) -> Measured:
        """The averages as columns, ordered by shape."""
        shapes = sorted(self._average)
        rows = [(*shape, *self._average[shape]) for shape in shapes]
        return Measured(*np.array(rows, dtype=np.float64).reshape(-1, 5).T)


def check(measured: Measured) -> None:
    """Raise ValueError if a value is impossible for a step; the message names the first such field and value."""
    columns = [np.asarray(column) for column in measured]
    for name, column in zip(Measured._fields, columns, strict=True):
        if column.shape != columns[0].shape or column.ndim != 1:
            raise ValueError(f"{name} has shape {column.shape}; all columns must be of one shape (points,)")
    with np.errstate(invalid="ignore"):  # infinite values have no remainder
        possible_by_field = _possible(*columns)
    for name, column, possible, rule in zip(Measured._fields, columns, possible_by_field, RULES, strict=True):
        if not np.all(possible):
            row = int(np.argmin(possible))
            raise ValueError(
                f"{name}={column[row]:g} in row {row} must be {rule}; leave the row out, or measure it again"
            )


def _possible(nodes: Any, replicas: Any, atomic_batch: Any, step_s: Any, sync_s: Any) -> tuple[Any, ...]:
    """For each field of `Measured`, whether the values are possible: of arrays or, faster without NumPy, of one
    step."""
    return (
        (nodes >= 1) & (nodes < math.inf) & (nodes % 1 == 0),
        (replicas >= nodes) & (replicas < math.inf) & (replicas % 1 == 0),
        (atomic_batch >= 1) & (atomic_batch < math.inf),
        (step_s > 0) & (step_s < math.inf),
        (sync_s >= 0) & (sync_s < step_s) & (sync_s < math.inf),
    )


def _middle_half(ascending: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Weighted mean of (step, sync) over the middle half of the weight, by step time. Of two reports, the shorter."""
    if len(ascending) <= 2:
        return ascending[0][:2]
    step, sync, weight = np.array(ascending).T
    upper = np.cumsum(weight) / weight.sum()
    lower = np.concatenate([[0.0], upper[:-1]])
    share = np.clip(np.minimum(upper, 0.75) - np.maximum(lower, 0.25), 0.0, None)
    return float(np.average(step, weights=share)), float(np.average(sync, weights=share))
