"""The exact choice for a small core: dynamic programming over the GPUs of each type that are left.

A site of 64 GPUs has 10,625 ways to leave some of 24, 24 and 16 GPUs free. To look up the best choice for each of them, one job
after the other, takes a tenth of the time in which HiGHS sets up and solves the core's integer program.

Axes: J jobs; K configurations and nothing; T GPU types.
"""

from __future__ import annotations

import math

import numpy as np

from penstock_scheduler.rounds.solver.reduced import Flags, Floats, Ints, Reduced

MOST_STEPS = 3_000_000
"""Numbers of GPUs left, times entries, up to which this is faster than HiGHS."""


def solve_small(reduced: Reduced, core_JK: Flags, pick_J: Ints) -> Ints | None:
    """The best choice among the entries of the core. Jobs with a single entry keep it. At least one choice must fit.

    Returns:
        None if the core is too large, or has quotas.
    """
    open_J = core_JK.sum(axis=1) > 1
    rest_J = np.where(open_J, reduced.nothing, pick_J)
    left_T = tuple(reduced.left(rest_J).tolist())
    states = math.prod(gpus + 1 for gpus in left_T)
    if len(left_T) > reduced.types or states * int(core_JK[open_J].sum()) > MOST_STEPS:
        return None
    best: Floats = np.zeros([gpus + 1 for gpus in left_T])
    """By GPUs left of each type: the least sum of the jobs so far."""
    taken: list[tuple[int, Ints]] = []
    """For each job its row, and by GPUs left the entry that it takes."""
    for row in np.flatnonzero(open_J).tolist():
        allowed = core_JK[row, reduced.nothing]
        with_job = best.copy() if allowed else np.full(best.shape, np.inf)
        entry = np.full(best.shape, reduced.nothing)
        for column in np.flatnonzero(core_JK[row, :-1]).tolist():
            gpus, axis = int(reduced.gpus_K[column]), int(reduced.type_K[column])
            if gpus > left_T[axis]:
                continue
            enough, rest = _ranges(best.ndim, axis, gpus)
            value = best[rest] + reduced.saving_JK[row, column]
            better = value < with_job[enough]
            np.copyto(with_job[enough], value, where=better)
            np.copyto(entry[enough], column, where=better)
        best = with_job
        taken.append((row, entry))
    left = list(left_T)
    for row, entry in reversed(taken):
        column = int(entry[tuple(left)])
        rest_J[row] = column
        left[int(reduced.type_K[column])] -= int(reduced.gpus_K[column])
    return rest_J


def _ranges(axes: int, axis: int, gpus: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where at least `gpus` of the type are left, and what is left there without them."""
    enough, rest = [slice(None)] * axes, [slice(None)] * axes
    enough[axis], rest[axis] = slice(gpus, None), slice(None, -gpus)
    return tuple(enough), tuple(rest)
