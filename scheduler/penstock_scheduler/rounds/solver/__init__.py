"""The round's problem, a multiple-choice knapsack, and its solvers behind one interface.

Minimise ``sum cost[j, c] x[j, c] + leave_out * (J - sum x)`` where each job takes at most one configuration, the GPUs of
each type suffice, and quotas are kept (Sia, equation 2, for either sign of the fairness power). docs/developer/solver.md
explains.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from penstock_scheduler.model import SolveReport, SolveStatus
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.solver import dual, python_mip
from penstock_scheduler.rounds.solver.problem import (
    STATUS_MEANING,
    BadProblem,
    Limits,
    Problem,
    Quota,
    Solution,
    SolveFailed,
)
from penstock_scheduler.rounds.solver.reduced import Reduced, ReducedSolution, reduce

__all__ = [
    "SOLVERS",
    "STATUS_MEANING",
    "BadProblem",
    "Limits",
    "Problem",
    "Quota",
    "Solution",
    "SolveFailed",
    "solve",
]


def _auto(reduced: Reduced, limits: Limits) -> ReducedSolution:
    """The dual, which was the cheaper one at every size that was measured. If it has trouble, python-mip, where installed."""
    try:
        return dual.solve(reduced, limits)
    except SolveFailed as trouble:
        try:
            return python_mip.solve(reduced, limits)
        except ConfigError as absent:
            raise SolveFailed(trouble.status, f"{trouble.text}; {absent}") from trouble


SOLVERS: dict[str, Callable[[Reduced, Limits], ReducedSolution]] = {
    "auto": _auto,
    "milp": python_mip.solve,
    "dual": dual.solve,
}
"""Name -> solver of a reduced problem."""


def solve(problem: Problem, solver: str = "auto", limits: Limits | None = None) -> Solution:
    """Solve with the solver of this name. The same problem gives the same choice, unless the time limit was met.

    Args:
        problem: what is to be chosen.
        solver: a name in SOLVERS.
        limits: when to stop; None: the defaults of `Limits`.

    Raises:
        SolveFailed: there is no usable answer; its `status` says why.
        ConfigError: `milp` was asked for, and python-mip is not installed.
    """
    started = time.perf_counter()
    if problem.recorded_J is not None:
        value = problem.objective(problem.recorded_J)
        return Solution(problem.recorded_J, SolveReport("recorded", SolveStatus.INCUMBENT, value, value, 0.0))
    reduced = reduce(problem)
    if np.isfinite(reduced.saving_JK[:, :-1]).any():
        answer = SOLVERS[solver](reduced, limits or Limits())
    else:
        empty_J = np.full(len(reduced.job_J), reduced.nothing)
        prices = (0.0,) * reduced.types
        answer = ReducedSolution(solver, empty_J, reduced.base, SolveStatus.OPTIMAL, prices)
    choice_J = reduced.expand(answer.pick_J)
    if not problem.feasible(choice_J):
        raise SolveFailed(SolveStatus.NUMERICAL, f"the choice of {answer.solver} breaks a capacity or a quota")
    value = problem.objective(choice_J)
    bound, seconds = min(answer.bound, value), time.perf_counter() - started
    return Solution(choice_J, SolveReport(answer.solver, answer.status, value, bound, seconds, answer.price_T))
