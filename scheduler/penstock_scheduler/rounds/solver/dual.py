"""The solver for rounds of any size: prices first, then an exact choice for the few jobs that prices do not decide.

1. **Relax.** `prices.relax` finds the prices at which the jobs, each choosing for itself, just about fill the cluster, and
   with them a lower bound L of the objective. The regret of an entry is how much more it costs, prices included, than the
   job's best entry.
2. **Discard.** Any choice costs at least L plus the sum of its regrets (plus prices times GPUs left over). So a choice of
   cost U can only be beaten by a choice with a sum of regrets below U - L. Every entry with a larger regret is discarded.
3. **Solve the core.** Of the other entries, the `CORE_ENTRIES` with the least regret are solved exactly (`solve_core`); all other
   jobs keep their choice. With r the least regret outside the core, the optimum is at least min(bound of the core, L + r).
   This bound holds for the whole problem, not only for the core.
4. **Grow the core.** While the bound does not prove the gap, the core grows by `CORE_GROWTH`, in the end to all entries that
   were not discarded.

The prices of a small problem come from its linear relaxation at once (`relax_whole`), which takes less time than a dozen cutting
planes: its value is the maximum of L, the best prices are the multipliers of its resources, and it splits only as many jobs as
there are resources.

Axes: J jobs; K configurations and nothing; E entries of the core, or of the problem; R resources.

After Pisinger, *A minimal algorithm for the multiple-choice knapsack problem*, 1995, with HiGHS for his dynamic program.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import highspy
import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.dynamic import solve_small
from penstock_scheduler.rounds.solver.prices import GOLDEN, Relaxation, evaluate, quiet_highs, relax
from penstock_scheduler.rounds.solver.problem import Limits, SolveFailed
from penstock_scheduler.rounds.solver.reduced import Flags, Floats, Ints, Reduced, ReducedSolution, repair

TIE = 1e-9
"""Share of the largest saving that breaks ties between entries of equal regret when the core is chosen. Costs do not
change."""


@dataclass(frozen=True, slots=True)
class CoreAnswer:
    """The result of the core's integer program.

    Attributes:
        pick_J: a choice for all jobs; None if there was no time to find one.
        bound: no choice within the core has a lower objective.
        nodes: number of branch-and-bound nodes.
        finished: whether it reached its gap within its limits.
    """

    pick_J: Ints | None
    bound: float
    nodes: int
    finished: bool


def choose(regret_JK: Floats, pick_J: Ints, width: int, worth: float) -> tuple[Flags, float]:
    """The entries of the core, J x K: those of `pick_J`, and the `width` others with the least regret.

    An entry with a regret above `worth` cannot be in a better choice, and stays out.

    Returns:
        The core, and the least regret of an entry outside it; `inf` if there is none.
    """
    jobs_J = np.arange(len(pick_J))
    core_JK = np.zeros(regret_JK.shape, dtype=np.bool_)
    # A job for which repair took a worse entry gains most from another one: what counts is the regret beyond its own.
    more_JK = regret_JK - regret_JK[jobs_J, pick_J][:, None]
    more_JK[regret_JK > worth] = np.inf
    more_JK[jobs_J, pick_J] = np.inf
    candidates = np.flatnonzero(np.isfinite(more_JK))
    if len(candidates) > width:
        more = more_JK.ravel()[candidates]
        scale = TIE * max(float(np.abs(more).max()), 1e-9)
        more = more + scale * (candidates * GOLDEN % 1)
        candidates = candidates[np.argpartition(more, width)[:width]]
    core_JK.ravel()[candidates] = True
    core_JK[jobs_J, pick_J] = True
    return core_JK, float(regret_JK[~core_JK].min(initial=np.inf))


def solve_core(reduced: Reduced, core_JK: Flags, pick_J: Ints, *, gap: float, nodes: int, seconds: float) -> CoreAnswer:
    """Choose among the entries of the core. Jobs with a single entry keep it.

    Raises:
        SolveFailed: HiGHS has numerical trouble.
    """
    open_J = core_JK.sum(axis=1) > 1
    if not open_J.any():
        return CoreAnswer(pick_J, reduced.value(pick_J), 0, True)
    if (best_J := solve_small(reduced, core_JK, pick_J)) is not None:
        return CoreAnswer(best_J, reduced.value(best_J), 1, True)
    lp, rest_J, job_E, config_E = program(reduced, core_JK, pick_J)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(job_E)
    highs = quiet_highs(
        mip_rel_gap=gap,
        mip_abs_gap=0.0,
        mip_max_nodes=nodes,
        time_limit=seconds,
        mip_heuristic_run_feasibility_jump=False,  # 4 ms a call, as long as the rest, and no better choice
    )
    highs.passModel(lp)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    limits = {highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kSolutionLimit}
    if status not in {highspy.HighsModelStatus.kOptimal, *limits}:
        raise SolveFailed(SolveStatus.NUMERICAL, f"HiGHS calls a core that has a solution {status.name}")
    found_J: Ints | None = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        found_J = rest_J.copy()
        taken = np.array(highs.getSolution().col_value) > 0.5
        found_J[job_E[taken]] = config_E[taken]
    finished = status == highspy.HighsModelStatus.kOptimal
    return CoreAnswer(found_J, float(info.mip_dual_bound), max(int(info.mip_node_count), 1), finished)


def program(reduced: Reduced, core_JK: Flags, pick_J: Ints) -> tuple[highspy.HighsLp, Ints, Ints, Ints]:
    """The linear program over the entries E of the core. Jobs with a single entry keep it.

    Returns:
        The program, with the resources R as its last rows; the choice of the jobs outside it, J; and the job and the
        configuration of each entry.
    """
    open_J = core_JK.sum(axis=1) > 1
    jobs = np.flatnonzero(open_J)
    rest_J = np.where(open_J, reduced.nothing, pick_J)
    row_E, config_E = np.nonzero(core_JK[jobs][:, :-1])
    job_E, entry_E = jobs[row_E], np.arange(len(row_E))
    gpus_E = reduced.gpus_K[config_E]
    # Rows: one for each open job, then the types, then the quotas.
    counts_EQ = reduced.member_BQ[reduced.block_J[job_E]] & reduced.counts_QT.T[reduced.type_K[config_E]]
    member_M, quota_M = np.nonzero(counts_EQ)
    columns = np.concatenate([entry_E, entry_E, member_M])
    first_type = len(jobs)
    first_quota = first_type + reduced.types
    rows = np.concatenate([row_E, first_type + reduced.type_K[config_E], first_quota + quota_M])
    values = np.concatenate([np.ones(len(entry_E)), gpus_E, gpus_E[member_M]])
    order = np.argsort(columns, kind="stable")

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(entry_E), len(jobs) + len(reduced.limit_R)
    lp.offset_ = reduced.value(rest_J)
    lp.col_cost_ = reduced.saving_JK[job_E, config_E]
    lp.col_lower_, lp.col_upper_ = np.zeros(len(entry_E)), np.ones(len(entry_E))
    # Exactly one entry for a job that cannot get nothing: with equal jobs in quotas, this took a thirtieth of the time.
    least = np.where(core_JK[jobs, -1], -highspy.kHighsInf, 1.0)
    lp.row_lower_ = np.concatenate([least, np.full(len(reduced.limit_R), -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([np.ones(len(jobs)), reduced.left(rest_J)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(columns[order], np.arange(len(entry_E) + 1)).astype(np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order].astype(np.int32), values[order].astype(np.float64)
    return lp, rest_J, job_E, config_E


def relax_whole(reduced: Reduced) -> Relaxation:
    """As `prices.relax`, but exact.

    Raises:
        SolveFailed: HiGHS has numerical trouble.
    """
    nothing_J = np.full(len(reduced.block_J), reduced.nothing)
    lp, _, job_E, config_E = program(reduced, np.isfinite(reduced.saving_JK), nothing_J)
    highs = quiet_highs(presolve="off")
    highs.passModel(lp)
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise SolveFailed(SolveStatus.NUMERICAL, f"HiGHS ended the linear relaxation with {status.name}")
    solved = highs.getSolution()
    price_R = np.maximum(-np.array(solved.row_dual[-len(reduced.limit_R) :]), 0.0)
    priced_JK = np.empty_like(reduced.saving_JK)
    bound, _ = evaluate(reduced, price_R, priced_JK)
    taken_JK = np.zeros_like(reduced.saving_JK)
    taken_JK[job_E, config_E] = solved.col_value
    # A split job takes the share in which its own number falls, as in `prices`; the last share is "nothing".
    number_J = np.arange(1, len(nothing_J) + 1) * GOLDEN % 1
    mixed_J = (np.cumsum(taken_JK[:, :-1], axis=1) <= number_J[:, None]).sum(axis=1)
    return Relaxation(price_R, bound, priced_JK - priced_JK.min(axis=1, keepdims=True), mixed_J, 1)


CORE_ENTRIES = 50
"""Entries of the first core for each GPU type and quota. With 150 for three types one core proves a gap of 1e-4 on all but
one of the rounds of docs/developer/solver.md; 400 take twice the time."""

WHOLE_ENTRIES = 500
"""Entries up to which all prices come from one linear program. Measured on the rounds of docs/developer/solver.md: of 100
entries a quarter of the time of cutting planes, of 450 two thirds, of 1,500 as long, of 6,000 four times as long."""

CORE_GROWTH = 4
"""Factor by which the core grows."""

CORE_MOST = 10_000
"""Entries from which on the core does not grow: HiGHS takes 1 to 10 s for this many."""

SMALLEST_GAP = 1e-9
"""Relative difference below which two objectives count as equal: floating point does not resolve smaller ones."""


def solve(reduced: Reduced, limits: Limits) -> ReducedSolution:
    """Solve with prices and a core. The answer has the prices of the types, in the objective's unit per GPU.

    Raises:
        SolveFailed: HiGHS has numerical trouble.
    """
    deadline = time.perf_counter() + limits.seconds
    gap = max(limits.gap, SMALLEST_GAP)
    best_J = reduced.saving_JK.argmin(axis=1)
    if np.all(reduced.left(best_J) >= 0):  # enough for all jobs: no GPU has a price
        return ReducedSolution("dual", best_J, reduced.value(best_J), SolveStatus.OPTIMAL, (0.0,) * reduced.types)
    small = np.isfinite(reduced.saving_JK).sum() <= WHOLE_ENTRIES
    relaxed = relax_whole(reduced) if small else relax(reduced, tolerance=gap / 10)
    pick_J = repair(reduced, relaxed.mixed_J, relaxed.regret_JK)
    value, bound, nodes, width = reduced.value(pick_J), relaxed.bound, limits.nodes, CORE_ENTRIES * len(relaxed.price_R)
    while True:
        seconds = deadline - time.perf_counter()
        if seconds <= 0:
            status = SolveStatus.TIME_LIMIT
            break
        worth = value - relaxed.bound
        core_JK, outside = choose(relaxed.regret_JK, pick_J, width, worth)
        core = solve_core(reduced, core_JK, pick_J, gap=limits.gap / 2, nodes=nodes, seconds=seconds)
        if core.pick_J is not None and reduced.value(core.pick_J) < value:
            pick_J, value = core.pick_J, reduced.value(core.pick_J)
        bound = max(bound, min(core.bound, relaxed.bound + outside))
        if value - bound <= gap * abs(value) or (core.finished and outside > worth):
            status = SolveStatus.OPTIMAL
            break
        nodes -= core.nodes
        if nodes <= 0 or width >= CORE_MOST:
            status = SolveStatus.NODE_LIMIT
            break
        width = min(width * CORE_GROWTH, CORE_MOST)
    return ReducedSolution("dual", pick_J, bound, status, tuple(relaxed.price_R[: reduced.types].tolist()))
