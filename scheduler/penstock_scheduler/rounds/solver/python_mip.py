"""`Problem.to_mip` solved through python-mip, exact to a stated gap: the reference for `dual`, and its stand-in at trouble.

python-mip is optional. `pip install mip highsbox` installs it with HiGHS (the package highsbox, 24 MB) and CBC (the package
cbcbox, 600 MB). python-mip looks for HiGHS in highspy first. Since 1.16 highspy no longer exports the C functions that it
calls; python-mip then says so once and takes highsbox. The Debian packages and the container have python-mip with HiGHS alone.
"""

from __future__ import annotations

import contextlib
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.solver.prices import relax
from penstock_scheduler.rounds.solver.problem import Limits, SolveFailed
from penstock_scheduler.rounds.solver.reduced import Reduced, ReducedSolution, repair

if TYPE_CHECKING:
    import mip

LIBRARIES = {"highs": "highsbox", "cbc": "cbcbox"}
"""Library that python-mip can run -> the package that has it. The first that is installed is used."""


def library(wanted: str | None = None) -> str:
    """The library `wanted`; None: the first that is installed.

    Raises:
        ConfigError: it is not installed, with the remedy.
    """
    here = [name for name, package in LIBRARIES.items() if find_spec("mip") and find_spec(package)]
    if not here:
        raise ConfigError("python-mip is not installed; pip install mip highsbox installs it (600 MB)")
    if wanted is not None and wanted not in here:
        raise ConfigError(f"python-mip cannot run {wanted!r}; pip install {LIBRARIES[wanted]}")
    return wanted or here[0]


def quiet(model: mip.Model, limits: Limits) -> mip.Model:
    """The model on one thread, with a fixed seed and without output, so that the same problem gives the same answer."""
    model.verbose, model.threads, model.seed = 0, 1, 1
    model.max_nodes = limits.nodes
    return model


def ended(model: mip.Model, started: float, limits: Limits, name: str) -> SolveStatus:
    """Run a model that has a solution until `limits.seconds` after `started` (of `time.perf_counter`).

    Raises:
        SolveFailed: the library has numerical trouble.
    """
    from mip import OptimizationStatus

    code = model.optimize(max_seconds=max(limits.seconds - (time.perf_counter() - started), 0.0))
    if code is OptimizationStatus.OPTIMAL:
        return SolveStatus.OPTIMAL
    if code not in (OptimizationStatus.FEASIBLE, OptimizationStatus.NO_SOLUTION_FOUND):
        raise SolveFailed(SolveStatus.NUMERICAL, f"{name} calls a problem that has a solution {code.name}")
    return SolveStatus.TIME_LIMIT if time.perf_counter() - started >= limits.seconds else SolveStatus.NODE_LIMIT


def solve(reduced: Reduced, limits: Limits, wanted: str | None = None) -> ReducedSolution:
    """Solve the integer program. If it reaches its limits first, the choice that prices alone give is used if it is better.

    Raises:
        SolveFailed: the library has numerical trouble.
        ConfigError: python-mip or the library `wanted` is not installed.
    """
    name, started = library(wanted), time.perf_counter()
    best_J = reduced.saving_JK.argmin(axis=1)
    greedy_J = repair(reduced, best_J, reduced.saving_JK)
    lowest, highest = reduced.value(best_J), reduced.value(greedy_J)
    problem = reduced.trimmed()
    model = quiet(problem.to_mip(name.upper()), limits)
    # The libraries differ in how they make a gap relative: convert it by the least size that the objective can have.
    model.max_mip_gap = 0.0
    model.max_mip_gap_abs = limits.gap * max(lowest, -highest, 0.0)
    status = ended(model, started, limits, name)
    picks, bound = [greedy_J], lowest
    if model.num_solutions:
        job_E, config_E = np.nonzero(np.isfinite(problem.cost_JC))
        taken_E = np.array([variable.x > 0.5 for variable in model.vars])
        choice_J = np.full(len(problem.cost_JC), reduced.nothing)
        choice_J[job_E[taken_E]] = config_E[taken_E]
        picks.append(choice_J[reduced.job_J])
        # Without a solution of its own CBC may give 0 for a bound, which can be too high.
        bound = max(bound, float(model.objective_bound))
    if status is not SolveStatus.OPTIMAL:
        with contextlib.suppress(SolveFailed):
            relaxed = relax(reduced, tolerance=limits.gap)
            picks.append(repair(reduced, relaxed.mixed_J, relaxed.regret_JK))
            bound = max(bound, relaxed.bound)
    return ReducedSolution(f"milp-{name}", min(picks, key=reduced.value), bound, status)
