"""How much work each job has left, as a distribution: how much its size weighs, and whether a move still pays.

Sia does not ask how long jobs still run. A job that needs two more minutes and one that needs a week weigh the same, and a job
is moved a minute before its end. Here, what a job has left is `POINTS` equally likely values, from the first of these that is
known:

1. what the job itself reports (`JobFacts.remaining_work`): one value;
2. what earlier jobs of its kind had left after as much work (`JobFacts.likely_work`);
3. its age. Lengths of jobs have a heavy tail: the longer a job has run, the longer it is likely to run on. A job that has had
   `a` GPU-seconds needs more than another x with the probability (a + NEW_S) / (a + NEW_S + x).

The unit is seconds on the job's slowest configuration, which is one GPU for most jobs, so that jobs of different models
compare.

No weight is above 1, and no restart counts more than `KEPT_LEAST`. Both keep the promise to jobs that wait: see
docs/developer/sia.md#aging.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import JobFacts
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix

POINTS = 8
"""Equally likely values for each job."""

NEW_S = 1800.0
"""Median of what a job has left that has not run yet and of which nothing is known, s on one GPU."""

FLOOR_S = 360.0
"""Added to what is left. Among jobs that end within minutes, size makes little difference."""

SIZE_LEAST = 0.05
"""Weight of the longest jobs; that of a job which is about to end is 1."""

KEPT_LEAST = 0.25
"""Least share of a job's coming work that a restart is taken to leave. A job that always reports to be about to end can still be
moved."""


def remaining(matrix: SiaMatrix) -> NDArray[np.float64]:
    """Seconds that each job has left on its slowest configuration, shape (J, POINTS), each row ascending."""
    share_P = (np.arange(POINTS) + 0.5) / POINTS
    left_JP = share_P / (1 - share_P) * (matrix.attained_J + NEW_S)[:, None]
    for row, (facts, scale) in enumerate(zip(matrix.facts, matrix.scale_J.tolist(), strict=True)):
        if facts.remaining_work is not None and scale > 0:
            left_JP[row] = facts.remaining_work * scale
        elif facts.likely_work and scale > 0:
            left_JP[row] = _quantiles(facts.likely_work, share_P) * scale
    return left_JP


def _quantiles(values: tuple[float, ...], share_P: NDArray[np.float64]) -> NDArray[np.float64]:
    """As `np.quantile`, in a tenth of its 70 us: a round may ask for tens of thousands of jobs."""
    return np.interp(share_P * (len(values) - 1), np.arange(len(values)), sorted(values))


def source(facts: JobFacts) -> str:
    """Where `remaining` has a job's remaining work from, in words."""
    if facts.remaining_work is not None:
        return "as it reports"
    return "by earlier jobs of its kind" if facts.likely_work else "judged by its age"


def size_weights(left_JP: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Weight of each job, in [SIZE_LEAST, 1]: the mean over what may be left. `power` 0: all weigh 1."""
    weights_J: NDArray[np.float64] = np.mean((FLOOR_S / (left_JP + FLOOR_S)) ** power, axis=1)
    return np.maximum(weights_J, SIZE_LEAST)


def kept_shares(matrix: SiaMatrix, left_JP: NDArray[np.float64], most_s: float) -> NDArray[np.float64]:
    """Share of each job's coming work that a move leaves: T / (T + S), the mean over what may be left.

    T is what is left where the job is now, at most `most_s`: later rounds may move the job again. S is what a move costs it.
    """
    held = matrix.held_J >= 0
    gain_J = np.ones(len(matrix.jobs))
    gain_J[held] = matrix.gain_JC[held, matrix.held_J[held]]
    time_JP = np.minimum(left_JP / np.where(gain_J > 0, gain_J, 1.0)[:, None], most_s)
    kept_J: NDArray[np.float64] = np.mean(time_JP / (time_JP + matrix.restart_cost_s_J[:, None]), axis=1)
    return np.maximum(kept_J, KEPT_LEAST)
