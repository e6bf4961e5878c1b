"""The core of a round's problem: the few entries that prices alone cannot decide, solved exactly with HiGHS.

Axes: J jobs, K configurations and nothing, E entries of the core.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.prices import GOLDEN, quiet_highs
from penstock_scheduler.rounds.solver.problem import SolveFailed
from penstock_scheduler.rounds.solver.reduced import Flags, Floats, Ints, Reduced

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
