"""The round's problem as one integer program through python-mip, exact to a stated gap, with CBC or HiGHS behind it.

The yardstick for `dual`, and what `auto` turns to if that has numerical trouble.
"""

from __future__ import annotations

import time

import mip
import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.solver.problem import Limits, SolveFailed
from penstock_scheduler.solver.reduced import Answer, Ints, Reduced, repair

_NAMES = {"cbc": mip.CBC, "highs": mip.HIGHS}

_ENDED = {
    mip.OptimizationStatus.OPTIMAL: SolveStatus.OPTIMAL,
    mip.OptimizationStatus.FEASIBLE: SolveStatus.NODE_LIMIT,
    mip.OptimizationStatus.NO_SOLUTION_FOUND: SolveStatus.NODE_LIMIT,
}
"""What python-mip's statuses mean if time is left. Any other is trouble: giving nothing to anybody is always feasible."""


def solve(reduced: Reduced, limits: Limits, *, backend: str = "cbc") -> Answer:
    """Solve `reduced` on one thread with a fixed seed, so that the same problem gives the same choice.

    What the solver found within its limits is taken if it is better than a greedy choice, so that there always is one.

    Raises:
        SolveFailed: the solver has numerical trouble.
    """
    started = time.perf_counter()
    greedy_J, lowest = _greedy(reduced)
    model = mip.Model(sense=mip.MINIMIZE, solver_name=_NAMES[backend])
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    # The program's own objective is the saving, so the gap of the whole one is asked for in absolute terms.
    model.max_mip_gap = 0.0
    model.max_mip_gap_abs = limits.gap * min(abs(reduced.value(greedy_J)), abs(lowest))
    model.max_nodes = limits.nodes
    jobs_E, configs_E = np.nonzero(np.isfinite(reduced.saving_JK[:, :-1]))
    variables = [
        model.add_var(var_type=mip.BINARY, obj=float(saving)) for saving in reduced.saving_JK[jobs_E, configs_E]
    ]
    by_row: dict[tuple[str, int], list[mip.LinExpr]] = {}
    for variable, job, config in zip(variables, jobs_E.tolist(), configs_E.tolist(), strict=True):
        gpus = int(reduced.gpus_K[config])
        by_row.setdefault(("job", job), []).append(variable)
        by_row.setdefault(("type", int(reduced.type_K[config])), []).append(gpus * variable)
        counts_Q = reduced.member_BQ[reduced.block_J[job]] & reduced.counts_QT[:, reduced.type_K[config]]
        for quota in np.flatnonzero(counts_Q).tolist():
            by_row.setdefault(("quota", quota), []).append(gpus * variable)
    most = {"job": np.ones(len(greedy_J)), "type": reduced.limit_R[: reduced.types]}
    most["quota"] = reduced.limit_R[reduced.types :]
    for (kind, index), terms in by_row.items():
        model.add_constr(mip.xsum(terms) <= int(most[kind][index]))

    code = model.optimize(max_seconds=max(limits.seconds - (time.perf_counter() - started), 0.0))
    if code not in _ENDED:
        raise SolveFailed(SolveStatus.NUMERICAL, f"{backend} calls a problem that has a solution {code.name}")
    status = _ENDED[code]
    if status is not SolveStatus.OPTIMAL and time.perf_counter() - started >= limits.seconds:
        status = SolveStatus.TIME_LIMIT
    pick_J, bound = greedy_J, lowest
    if model.num_solutions:
        taken = np.array([variable.x > 0.5 for variable in variables])
        found_J = np.full(len(greedy_J), reduced.nothing)
        found_J[jobs_E[taken]] = configs_E[taken]
        # Without a solution of its own CBC may give 0 for a bound, which is too high: all savings are negative.
        bound = max(lowest, reduced.base + float(model.objective_bound))
        if reduced.value(found_J) < reduced.value(pick_J):
            pick_J = found_J
    return Answer(f"milp-{backend}", pick_J, bound, status)


def _greedy(reduced: Reduced) -> tuple[Ints, float]:
    """Everybody's best, shrunk until it fits where that costs least per GPU; and the bound that there is nothing better."""
    best_J = reduced.saving_JK.argmin(axis=1)
    regret_JK = reduced.saving_JK - reduced.saving_JK.min(axis=1, keepdims=True)
    return repair(reduced, best_J, regret_JK), reduced.value(best_J)
