"""The round's problem as an integer program through python-mip, exact to a stated gap, with CBC or HiGHS behind it."""

from __future__ import annotations

import time
from typing import Literal

import mip
import numpy as np

from penstock_scheduler.errors import RoundFailed
from penstock_scheduler.model import SolveReport, SolveStatus
from penstock_scheduler.solver import Limits, Problem, Solution

Backend = Literal["cbc", "highs"]

_NAMES = {"cbc": mip.CBC, "highs": mip.HIGHS}


def solve(problem: Problem, limits: Limits, *, backend: str = "cbc") -> Solution:
    """Solve `problem`. One thread and a fixed seed, so that the same problem gives the same choice.

    Entries that cannot be in a best choice are left out of the program: those that cost more than leaving the job out,
    and those that another configuration of the same type beats with no more GPUs.

    Raises:
        RoundFailed: the solver found nothing usable.
    """
    started = time.perf_counter()
    model = mip.Model(sense=mip.MINIMIZE, solver_name=_NAMES[backend])
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    model.max_mip_gap = limits.gap
    model.max_nodes = limits.nodes
    jobs_E, configs_E = np.nonzero(_useful(problem))
    # Relative to leaving the job out, every entry is a saving: an empty choice is feasible and costs 0.
    savings_E = problem.cost_JC[jobs_E, configs_E] - problem.leave_out
    variables = [model.add_var(var_type=mip.BINARY, obj=float(saving)) for saving in savings_E]
    by_job: dict[int, list[mip.Var]] = {}
    by_type: dict[int, list[mip.LinExpr]] = {}
    for variable, job, config in zip(variables, jobs_E, configs_E, strict=True):
        by_job.setdefault(int(job), []).append(variable)
        by_type.setdefault(int(problem.type_C[config]), []).append(int(problem.gpus_C[config]) * variable)
    for entries in by_job.values():
        model.add_constr(mip.xsum(entries) <= 1)
    for gpu_type, terms in by_type.items():
        model.add_constr(mip.xsum(terms) <= int(problem.capacity_T[gpu_type]))
    choice_J = np.full(len(problem.cost_JC), -1, dtype=np.int64)
    if not variables:
        value = problem.objective(choice_J)
        return Solution(
            choice_J, SolveReport(backend, SolveStatus.OPTIMAL, value, value, time.perf_counter() - started)
        )

    code = model.optimize(max_seconds=limits.seconds)
    seconds = time.perf_counter() - started
    if model.num_solutions:
        for variable, job, config in zip(variables, jobs_E, configs_E, strict=True):
            if variable.x is not None and variable.x > 0.5:
                choice_J[job] = config
    elif code is not mip.OptimizationStatus.NO_SOLUTION_FOUND:
        raise RoundFailed(
            f"{backend} ended with {code.name} and no solution after {seconds:.1f} s; the last allocation stays"
        )
    if not problem.feasible(choice_J):
        raise RoundFailed(f"{backend} gave a choice that breaks a capacity; the last allocation stays")
    out_of_time = code is not mip.OptimizationStatus.OPTIMAL and seconds >= limits.seconds
    status = {True: SolveStatus.TIME_LIMIT, False: SolveStatus.NODE_LIMIT}[out_of_time]
    if code is mip.OptimizationStatus.OPTIMAL:
        status = SolveStatus.OPTIMAL
    base = problem.leave_out * len(choice_J)
    bound = model.objective_bound
    lower = base + float(bound) if bound is not None and np.isfinite(bound) else float("-inf")
    value = problem.objective(choice_J)
    return Solution(choice_J, SolveReport(backend, status, value, min(lower, value), seconds))


def _useful(problem: Problem) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Which entries (J x C) a best choice may take."""
    cost_JC = problem.cost_JC
    useful_JC = np.isfinite(cost_JC) & (cost_JC < problem.leave_out)
    useful_JC &= problem.gpus_C <= problem.capacity_T[problem.type_C]
    for gpu_type in range(len(problem.capacity_T)):
        columns = np.flatnonzero(problem.type_C == gpu_type)
        columns = columns[np.argsort(problem.gpus_C[columns], kind="stable")]
        best_J = np.full(len(cost_JC), np.inf)
        for column in columns:
            useful_JC[:, column] &= cost_JC[:, column] < best_J
            best_J = np.minimum(best_J, np.where(useful_JC[:, column], cost_JC[:, column], np.inf))
    return np.asarray(useful_JC, dtype=np.bool_)
