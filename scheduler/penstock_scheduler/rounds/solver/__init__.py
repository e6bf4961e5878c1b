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
from penstock_scheduler.rounds.solver.reduced import Answer, Reduced, reduce

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


def _milp(reduced: Reduced, limits: Limits, backend: str) -> Answer:
    chosen = python_mip.backend(backend)
    from penstock_scheduler.rounds.solver import (
        milp,  # loading CBC takes longer than most solves: only where it is asked for
    )

    return milp.solve(reduced, limits, backend=chosen)


def _dual(reduced: Reduced, limits: Limits, backend: str) -> Answer:
    return dual.solve(reduced, limits)


def _auto(reduced: Reduced, limits: Limits, backend: str) -> Answer:
    """The dual was the cheaper one at every size that was measured; python-mip, if it is installed, is asked when it has trouble.

    Of its libraries, `backend` is asked if it is installed, and the other one if not.
    """
    try:
        return dual.solve(reduced, limits)
    except SolveFailed as trouble:
        here = python_mip.backends()
        if not here:
            absent = "python-mip, which could try in its place, is not installed (pip install mip highsbox)"
            raise SolveFailed(trouble.status, f"{trouble.text}; {absent}") from trouble
        return _milp(reduced, limits, backend if backend in here else here[0])


SOLVERS: dict[str, Callable[[Reduced, Limits, str], Answer]] = {"auto": _auto, "milp": _milp, "dual": _dual}
"""Name -> solver of a reduced problem; the last argument is the back end of `milp`."""


def solve(problem: Problem, solver: str = "auto", limits: Limits | None = None, *, backend: str = "cbc") -> Solution:
    """Solve with the solver of this name. The same problem gives the same choice, unless the time limit was met.

    Args:
        problem: what is to be chosen.
        solver: a name in SOLVERS.
        limits: when to stop; None: the defaults of `Limits`.
        backend: what `milp` runs: "cbc" or "highs".

    Raises:
        SolveFailed: there is no usable answer; its `status` says why.
        ConfigError: `milp` was asked for, and python-mip or its back end is not installed.
    """
    started = time.perf_counter()
    if problem.recorded_J is not None:
        value = problem.objective(problem.recorded_J)
        return Solution(problem.recorded_J, SolveReport("recorded", SolveStatus.INCUMBENT, value, value, 0.0))
    reduced = reduce(problem)
    if np.isfinite(reduced.saving_JK[:, :-1]).any():
        answer = SOLVERS[solver](reduced, limits or Limits(), backend)
    else:
        empty_J = np.full(len(reduced.job_J), reduced.nothing)
        prices = (0.0,) * reduced.types
        answer = Answer(solver, empty_J, reduced.base, SolveStatus.OPTIMAL, prices)
    choice_J = reduced.expand(answer.pick_J)
    if not problem.feasible(choice_J):
        raise SolveFailed(SolveStatus.NUMERICAL, f"the choice of {answer.solver} breaks a capacity or a quota")
    value = problem.objective(choice_J)
    bound, seconds = min(answer.bound, value), time.perf_counter() - started
    return Solution(choice_J, SolveReport(answer.solver, answer.status, value, bound, seconds, answer.price_T))
