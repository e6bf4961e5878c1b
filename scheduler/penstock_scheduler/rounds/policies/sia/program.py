"""The integer program of a round: built from the matrix, its costs and its quotas, and solved within the settings' limits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.rounds.policies.sia.costs import costs
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.policies.sia.quotas import quotas
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings
from penstock_scheduler.rounds.solver import Limits, Problem, Solution, solve


def build(matrix: SiaMatrix, settings: SiaSettings) -> tuple[Problem, NDArray[np.float64]]:
    """The program, and the cost of leaving each job out, times the job's weight.

    The solver has one cost of leaving a job out for all jobs: the average. Each job's entries are shifted by the difference.
    """
    leave_J, cost_JC = costs(matrix, settings)
    weighted_J = leave_J * matrix.weight_J
    leave_out = float(weighted_J.mean()) if len(weighted_J) else 0.0
    problem = Problem(
        cost_JC * matrix.weight_J[:, None] - weighted_J[:, None] + leave_out,
        matrix.gpus_C,
        matrix.type_C,
        matrix.capacity_T,
        leave_out,
        quotas=quotas(matrix),
        recorded_J=matrix.recorded(),
    )
    return problem, weighted_J


def solved(problem: Problem, settings: SiaSettings) -> Solution:
    """The best choice within the settings' limits. Raises RoundFailed if there is no usable one."""
    limits = Limits(gap=settings.gap, seconds=settings.max_seconds)
    return solve(problem, settings.solver, limits)
