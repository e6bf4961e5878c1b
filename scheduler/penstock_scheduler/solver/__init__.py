"""The round's problem, a multiple-choice knapsack, and its solvers behind one interface.

Axes: J jobs, C configurations, T GPU types. Minimise ``sum cost[j, c] x[j, c] + leave_out * (J - sum x)`` where each job
takes at most one configuration and the GPUs of each type suffice (Sia, equation 2, for either sign of the fairness power).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import SolveReport, SolveStatus

STATUS_MEANING: dict[SolveStatus, str] = {
    SolveStatus.OPTIMAL: "proven best within the gap that was asked for; use it",
    SolveStatus.NODE_LIMIT: "best found within the node limit; the same on every machine; use it",
    SolveStatus.TIME_LIMIT: "best found within the time limit; depends on the machine; use it and mark the plan",
    SolveStatus.INCUMBENT: "taken from the record of a round that was cut short; use it",
    SolveStatus.NO_SOLUTION: "no usable answer; the round fails and the last allocation stays",
}
"""Every status that a solver may report, and what a policy does with it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One round's choices.

    Attributes:
        cost_JC: cost of giving configuration c to job j, any sign; `inf` where it cannot be.
        gpus_C: GPUs that each configuration takes, >= 1.
        type_C: index of its GPU type, 0 to T - 1.
        capacity_T: GPUs of each type, >= 0.
        leave_out: cost of giving a job nothing.
        recorded_J: a choice to take as it is, -1 where a job gets nothing, when a cut-short round is decided again.
    """

    cost_JC: NDArray[np.float64]
    gpus_C: NDArray[np.int64]
    type_C: NDArray[np.int64]
    capacity_T: NDArray[np.int64]
    leave_out: float
    recorded_J: NDArray[np.int64] | None = None

    def objective(self, choice_J: NDArray[np.int64]) -> float:
        """Cost of a choice, `inf` if it takes an impossible entry."""
        jobs_J = np.arange(len(choice_J))
        taken = choice_J >= 0
        costs = self.cost_JC[jobs_J[taken], choice_J[taken]]
        return float(costs.sum() + self.leave_out * np.count_nonzero(~taken))

    def feasible(self, choice_J: NDArray[np.int64]) -> bool:
        """Whether a choice keeps within the capacities and takes no impossible entry."""
        taken_C = choice_J[choice_J >= 0]
        used_T = np.bincount(self.type_C[taken_C], weights=self.gpus_C[taken_C], minlength=len(self.capacity_T))
        return bool(np.all(used_T <= self.capacity_T)) and np.isfinite(self.objective(choice_J))


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop looking. Nodes first, for they give the same plan on every machine; seconds as the last resort."""

    gap: float = 1e-4
    nodes: int = 10_000
    seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of configuration for each job, -1 for none, and how it was found."""

    choice_J: NDArray[np.int64]
    report: SolveReport


Solver = Callable[[Problem, Limits], Solution]


def solve(problem: Problem, solver: str, limits: Limits) -> Solution:
    """Solve with the named solver; an empty problem needs none. Raises RoundFailed if there is no usable answer."""
    from penstock_scheduler.solver import milp

    if problem.recorded_J is not None:
        value = problem.objective(problem.recorded_J)
        return Solution(problem.recorded_J, SolveReport("recorded", SolveStatus.INCUMBENT, value, value, 0.0))
    if problem.cost_JC.size == 0:
        nothing: Any = np.full(len(problem.cost_JC), -1, dtype=np.int64)
        value = problem.objective(nothing)
        return Solution(nothing, SolveReport(solver, SolveStatus.OPTIMAL, value, value, 0.0))
    return milp.solve(problem, limits, backend=solver)
