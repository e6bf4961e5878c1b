"""Shares of CPU and memory that add up to the most speed: Synergy's optimal programs (section 4.1).

The first is an integer program: each job takes one of its options, within the pooled CPUs and memory of all nodes of a class,
and no job is slower than with the proportional share. Its result is an upper bound, because it ignores the borders between
nodes. The second, a linear program, distributes jobs over nodes. It may split jobs: with S nodes at most 3 S of them. Equal
jobs count as one kind, with a number for each option. So the program grows with the number of models, not of jobs.

Axes: K kinds of jobs, O options of a kind, S nodes, J jobs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import SolveReport, SolveStatus
from penstock_scheduler.rounds.solver import python_mip
from penstock_scheduler.rounds.solver.problem import Limits, SolveFailed


@dataclass(frozen=True, slots=True)
class ValuedShare:
    """A share that a job may have, and its value."""

    cpus: int
    memory_mb: int
    value: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The options of a job. The first is its proportional share, which it gets if no better choice is found.

    The first options of all jobs together must fit.
    """

    options: tuple[ValuedShare, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """The options that the program chose."""

    option_J: tuple[int, ...]
    """Index of each job's option."""
    report: SolveReport
    """Here the objective is maximised, unlike in the round's problem."""


def choose_shares(
    choices: Sequence[Choice],
    cpus: int,
    memory_mb: int,
    limits: Limits | None = None,
    *,
    incumbent: Sequence[int] | None = None,
) -> Shares:
    """Choose an option for each job that maximises the sum of values within the CPUs and the memory.

    Among equal jobs, the first ones get the options of higher value.

    Args:
        choices: one for each job.
        cpus: CPUs of all nodes together.
        memory_mb: their memory, MB.
        limits: when to stop; None: the defaults of `Limits`.
        incumbent: options of a known answer; None: the first options. The result is never worse.

    Raises:
        SolveFailed: the incumbent does not fit, or the solver has numerical trouble.
        ConfigError: python-mip is not installed.
    """
    library = python_mip.library()
    import mip  # loading a library of solvers takes longer than most rounds: only where it is asked for

    started, limits = time.perf_counter(), limits or Limits()
    known = tuple(incumbent) if incumbent is not None else (0,) * len(choices)
    if not _fits(choices, known, cpus, memory_mb):
        raise SolveFailed(SolveStatus.INFEASIBLE, "the proportional shares do not fit together")
    kinds: dict[Choice, list[int]] = {}
    for index, choice in enumerate(choices):
        kinds.setdefault(choice, []).append(index)
    best = sum(max(option.value for option in choice.options) for choice in choices)
    if not any(len(kind.options) > 1 for kind in kinds):
        return _answer("none", SolveStatus.OPTIMAL, choices, known, best, started)
    model = python_mip.quiet(mip.Model(sense=mip.MAXIMIZE, solver_name=library.upper()), limits)
    model.max_mip_gap = limits.gap
    number_KO = [
        [model.add_var(var_type=mip.INTEGER, ub=len(jobs), obj=option.value) for option in kind.options]
        for kind, jobs in kinds.items()
    ]
    for number_O, jobs in zip(number_KO, kinds.values(), strict=True):
        model.add_constr(mip.xsum(number_O) == len(jobs))
    flat = [
        (number, option)
        for number_O, kind in zip(number_KO, kinds, strict=True)
        for number, option in zip(number_O, kind.options, strict=True)
    ]
    model.add_constr(mip.xsum(option.cpus * number for number, option in flat) <= cpus)
    model.add_constr(mip.xsum(option.memory_mb * number for number, option in flat) <= memory_mb)
    status = python_mip.ended(model, started, limits, library)
    found = known
    if model.num_solutions:
        option_J = _dealt(kinds, number_KO)
        if _fits(choices, option_J, cpus, memory_mb) and _value(choices, option_J) >= _value(choices, known):
            found = option_J
        best = min(best, float(model.objective_bound)) if np.isfinite(model.objective_bound) else best
    return _answer(f"shares-{library}", status, choices, found, best, started)


def _dealt(kinds: Mapping[Choice, Sequence[int]], number_KO: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Each job's option, from the solved counts of jobs by option: the first jobs of a kind get the options of higher value."""
    option_of: dict[int, int] = {}
    for number_O, (kind, jobs) in zip(number_KO, kinds.items(), strict=True):
        by_value = sorted(enumerate(kind.options), key=lambda option: -option[1].value)
        dealt = [o for o, _ in by_value for _ in range(round(number_O[o].x))]
        option_of |= zip(jobs, dealt, strict=True)
    return tuple(option_of[job] for job in range(len(option_of)))


def _value(choices: Sequence[Choice], option_J: Sequence[int]) -> float:
    return float(sum(choice.options[o].value for choice, o in zip(choices, option_J, strict=True)))


def _fits(choices: Sequence[Choice], option_J: Sequence[int], cpus: int, memory_mb: int) -> bool:
    taken = [choice.options[o] for choice, o in zip(choices, option_J, strict=True)]
    return sum(option.cpus for option in taken) <= cpus and sum(option.memory_mb for option in taken) <= memory_mb


def _answer(
    solver: str, status: SolveStatus, choices: Sequence[Choice], found: Sequence[int], bound: float, started: float
) -> Shares:
    value = _value(choices, found)
    report = SolveReport(solver, status, value, max(bound, value), time.perf_counter() - started)
    return Shares(tuple(found), report)


def spread(needs_J3: NDArray[np.float64], nodes_S3: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The second program: the part of each job that goes to each node, S x J; None if the jobs do not fit.

    Columns of both arrays are GPUs, CPUs and MB.
    """
    from scipy.optimize import linprog  # takes a second to load
    from scipy.sparse import coo_array, vstack

    nodes, jobs = len(nodes_S3), len(needs_J3)
    if not jobs:
        return np.zeros((nodes, 0))
    node_V, job_V = np.divmod(np.arange(nodes * jobs), jobs)
    index_V = np.arange(nodes * jobs)
    within = [
        coo_array((needs_J3[job_V, resource], (node_V, index_V)), shape=(nodes, nodes * jobs)) for resource in range(3)
    ]
    whole = coo_array((np.ones(nodes * jobs), (job_V, index_V)), shape=(jobs, nodes * jobs))
    solved = linprog(  # type: ignore[call-overload]  # the stubs do not know that matrices may be sparse
        np.zeros(nodes * jobs),
        A_ub=vstack(within).tocsr(),
        b_ub=nodes_S3.T.ravel() * (1 + 1e-9),
        A_eq=whole.tocsr(),
        b_eq=np.ones(jobs),
        method="highs-ds",
    )
    if solved.status != 0:
        return None
    part_SJ: NDArray[np.float64] = np.where(solved.x > 1e-9, solved.x, 0.0).reshape(nodes, jobs)
    return part_SJ
