"""The round's problem as one integer program through python-mip, exact to a stated gap, with CBC or HiGHS behind it.

The reference for `dual`. `auto` uses it if `dual` has numerical trouble.
"""

from __future__ import annotations

import contextlib
import time

import mip
import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.prices import relax
from penstock_scheduler.rounds.solver.problem import Limits, SolveFailed
from penstock_scheduler.rounds.solver.reduced import Answer, Reduced, repair

_NAMES = {"cbc": mip.CBC, "highs": mip.HIGHS}

_ENDED = {
    mip.OptimizationStatus.OPTIMAL: SolveStatus.OPTIMAL,
    mip.OptimizationStatus.FEASIBLE: SolveStatus.NODE_LIMIT,
    mip.OptimizationStatus.NO_SOLUTION_FOUND: SolveStatus.NODE_LIMIT,
}
"""python-mip's status -> ours, if time is left. Any other status is numerical trouble: "no job gets GPUs" is feasible."""


def solve(reduced: Reduced, limits: Limits, *, backend: str = "cbc") -> Answer:
    """Solve `reduced` on one thread with a fixed seed, so that the same problem gives the same choice.

    If it reaches its limits first, the choice that prices alone give is used if it is better.

    Raises:
        SolveFailed: the solver has numerical trouble.
    """
    started = time.perf_counter()
    best_J = reduced.saving_JK.argmin(axis=1)
    greedy_J = repair(reduced, best_J, reduced.saving_JK)
    lowest, highest = reduced.value(best_J), reduced.value(greedy_J)
    model = mip.Model(sense=mip.MINIMIZE, solver_name=_NAMES[backend])
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    # The program's objective is the saving alone: convert the gap by the least size that the whole objective can have.
    model.max_mip_gap = 0.0
    model.max_mip_gap_abs = limits.gap * max(lowest, -highest, 0.0)
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
    picks, bound = [greedy_J], lowest
    if model.num_solutions:
        taken = np.array([variable.x > 0.5 for variable in variables])
        found_J = np.full(len(greedy_J), reduced.nothing)
        found_J[jobs_E[taken]] = configs_E[taken]
        picks.append(found_J)
        # Without a solution of its own CBC may give 0 for a bound, which is too high: all savings are negative.
        bound = max(bound, reduced.base + float(model.objective_bound))
    if status is not SolveStatus.OPTIMAL:
        with contextlib.suppress(SolveFailed):
            relaxed = relax(reduced, tolerance=limits.gap)
            picks.append(repair(reduced, relaxed.mixed_J, relaxed.regret_JK))
            bound = max(bound, relaxed.bound)
    return Answer(f"milp-{backend}", min(picks, key=reduced.value), bound, status)
