"""The undecided part of a problem, in the form that both solvers work on.

Axes: J undecided jobs; K configurations and, as the last, nothing; T GPU types; Q quotas that may bind; R = T + Q resources;
B blocks of jobs that are in the same quotas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.problem import Problem, Quota, SolveFailed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reduced:
    """The undecided part of a problem. A job without GPUs costs 0, so the empty choice costs 0 and the best costs no more.

    Attributes:
        saving_JK: cost relative to nothing, < 0, `inf` where the entry cannot be in a best choice; 0 in the last column.
        gpus_K: GPUs that each configuration takes; 0 in the last column.
        type_K: index of its GPU type; any in the last column.
        limit_R: GPUs of each type, then of each quota, that forced entries leave.
        block_J: the block of each job.
        member_BQ: whether a block is in a quota.
        counts_QT: whether a quota counts GPUs of a type.
        base: objective of the empty choice: the forced jobs, and all others left out.
        job_J: row of each undecided job in the problem.
        problem: the whole problem.
    """

    saving_JK: Floats
    gpus_K: Ints
    type_K: Ints
    limit_R: Ints
    block_J: Ints
    member_BQ: Flags
    counts_QT: Flags
    base: float
    job_J: Ints
    problem: Problem

    @property
    def types(self) -> int:
        """Number of resources that are GPU types."""
        return len(self.limit_R) - int(self.member_BQ.shape[1])

    @property
    def nothing(self) -> int:
        """The column "nothing": the job gets no GPUs."""
        return len(self.gpus_K) - 1

    def value(self, pick_J: Ints) -> float:
        """Objective of the whole problem if the undecided jobs take these columns."""
        return self.base + float(self.saving_JK[np.arange(len(pick_J)), pick_J].sum())

    def used(self, pick_J: Ints) -> Ints:
        """GPUs that each block takes of each resource, B x R."""
        blocks, types = len(self.member_BQ), self.types
        cell_J = self.block_J * types + self.type_K[pick_J]
        used_BT = np.bincount(cell_J, self.gpus_K[pick_J], blocks * types).reshape(blocks, types).astype(np.int64)
        return np.hstack([used_BT, (used_BT @ self.counts_QT.T) * self.member_BQ])

    def left(self, pick_J: Ints) -> Ints:
        """GPUs that a choice leaves of each resource, R; negative where it takes too many."""
        return np.asarray(self.limit_R - self.used(pick_J).sum(axis=0), dtype=np.int64)

    def expand(self, pick_J: Ints) -> Ints:
        """The choice for all jobs of the problem, -1 for nothing."""
        choice = self.problem.forced()
        choice[self.job_J] = np.where(pick_J == self.nothing, -1, pick_J)
        return choice

    def trimmed(self) -> Problem:
        """The whole problem without the entries that no best choice has."""
        cost_JC = self.problem.cost_JC.copy()
        cost_JC[self.job_J] = np.where(np.isfinite(self.saving_JK[:, :-1]), cost_JC[self.job_J], np.inf)
        return dataclasses.replace(self.problem, cost_JC=cost_JC)


@dataclass(frozen=True, slots=True)
class ReducedSolution:
    """What a solver found.

    Attributes:
        solver: its name, and its back end.
        pick_J: a column for each undecided job.
        bound: no choice has a lower objective.
        status: how it ended.
        price_T: objective per GPU of each type, >= 0; empty if the solver has no prices.
    """

    solver: str
    pick_J: Ints
    bound: float
    status: SolveStatus
    price_T: tuple[float, ...] = ()


def reduce(problem: Problem) -> Reduced:
    """Take out forced entries, entries that no best choice has, quotas that cannot bind, and GPUs that no job can use.

    An entry is in no best choice if it costs at least as much as nothing, takes more GPUs than there are, or another of
    the same type costs no more and takes no more.

    Raises:
        SolveFailed: the forced entries are impossible.
    """
    jobs, forced_J = len(problem.cost_JC), problem.forced()
    if not problem.feasible(forced_J):
        raise SolveFailed(SolveStatus.INFEASIBLE, "the forced entries alone break a capacity or a quota")
    free_J = forced_J < 0
    job_J = np.flatnonzero(free_J)
    forced_C = forced_J[~free_J]
    types = len(problem.capacity_T)
    capacity_T = problem.capacity_T - np.bincount(
        problem.type_C[forced_C], weights=problem.gpus_C[forced_C], minlength=types
    ).astype(np.int64)
    left_Q = [quota.gpus - problem.held(quota, forced_J) for quota in problem.quotas]
    most_JT = np.tile(capacity_T, (jobs, 1))
    for quota, left in zip(problem.quotas, left_Q, strict=True):
        counted = np.flatnonzero(quota.counts_types(np.arange(types)))
        cells = np.ix_(quota.job_M, counted)
        most_JT[cells] = np.minimum(most_JT[cells], left)

    saving_JC = problem.cost_JC[job_J] - problem.leave_out
    useful_JC = _useful(saving_JC, problem, most_JT[job_J])
    saving_JC[~useful_JC] = np.inf
    for gpu_type in range(len(capacity_T)):
        capacity_T[gpu_type] -= _unfillable(capacity_T[gpu_type], useful_JC & (problem.type_C == gpu_type), problem)
    row_J = np.full(jobs, -1)
    row_J[job_J] = np.arange(len(job_J))
    binding: list[tuple[Quota, int]] = []
    for quota, left in zip(problem.quotas, left_Q, strict=True):
        useful_MC = useful_JC[row_J[quota.job_M][free_J[quota.job_M]]] & quota.counts_types(problem.type_C)
        if np.where(useful_MC, problem.gpus_C, 0).max(axis=1, initial=0).sum() > left:
            binding.append((quota, left - _unfillable(left, useful_MC, problem)))
    counts_QT = np.zeros((len(binding), types), dtype=np.bool_)
    for index, (quota, _) in enumerate(binding):
        counts_QT[index] = quota.counts_types(np.arange(types))
    block_J, member_BQ = _blocks([quota for quota, _ in binding], jobs, job_J)
    return Reduced(
        saving_JK=np.hstack([saving_JC, np.zeros((len(job_J), 1))]),
        gpus_K=np.append(problem.gpus_C, 0),
        type_K=np.append(problem.type_C, 0),
        limit_R=np.concatenate([capacity_T, np.array([left for _, left in binding], dtype=np.int64)]),
        block_J=block_J,
        member_BQ=member_BQ,
        counts_QT=counts_QT,
        base=problem.objective(forced_J),
        job_J=job_J,
        problem=problem,
    )


def _useful(saving_JC: Floats, problem: Problem, most_JT: Ints) -> Flags:
    useful_JC = (saving_JC < 0) & (problem.gpus_C <= most_JT[:, problem.type_C])
    for gpu_type in range(most_JT.shape[1]):
        columns = np.flatnonzero(problem.type_C == gpu_type)
        best_J = np.zeros(len(saving_JC))
        for column in columns[np.argsort(problem.gpus_C[columns], kind="stable")]:
            useful_JC[:, column] &= saving_JC[:, column] < best_J
            best_J = np.where(useful_JC[:, column], saving_JC[:, column], best_J)
    return np.asarray(useful_JC, dtype=np.bool_)


def _unfillable(gpus: int, useful_JC: Flags, problem: Problem) -> int:
    """GPUs that stay free whatever is chosen, because every size is a multiple of the same number."""
    return int(gpus % max(int(np.gcd.reduce(problem.gpus_C[useful_JC.any(axis=0)])), 1))


def _blocks(quotas: list[Quota], jobs: int, job_J: Ints) -> tuple[Ints, Flags]:
    """The block of each undecided job, and the quotas of each block."""
    block_J = np.zeros(len(job_J), dtype=np.int64)
    member_JQ = np.zeros((jobs, len(quotas)), dtype=np.bool_)
    for index, quota in enumerate(quotas):
        member_JQ[quota.job_M, index] = True
        block_J = np.unique(2 * block_J + member_JQ[job_J, index], return_inverse=True)[1]
    _, first_B = np.unique(block_J, return_index=True)
    return block_J, member_JQ[job_J[first_B]]


def repair(reduced: Reduced, pick_J: Ints, regret_JK: Floats) -> Ints:
    """Make a choice fit all limits. Where it takes too much, the jobs with the least added regret per GPU shrink or get nothing.

    Args:
        reduced: the problem.
        pick_J: a choice that may take too many GPUs.
        regret_JK: how much more each entry costs than the job's best; `inf` where it is impossible.
    """
    pick_J = pick_J.copy()
    for resource in range(len(reduced.limit_R)):
        while (over := -int(reduced.left(pick_J)[resource])) > 0:
            if resource < reduced.types:
                holds_J = reduced.type_K[pick_J] == resource
            else:
                quota = resource - reduced.types
                holds_J = reduced.member_BQ[reduced.block_J, quota] & reduced.counts_QT[quota, reduced.type_K[pick_J]]
            rows = np.flatnonzero(holds_J & (pick_J != reduced.nothing))
            now = pick_J[rows]
            freed = reduced.gpus_K[now][:, None] - reduced.gpus_K
            same = (reduced.type_K == reduced.type_K[now][:, None]) | (reduced.gpus_K == 0)
            more = regret_JK[rows] - regret_JK[rows, now][:, None]
            each = np.where(same & (freed > 0), more / np.maximum(freed, 1), np.inf)
            to = each.argmin(axis=1)
            first = np.argsort(each.min(axis=1), kind="stable")
            enough = int(np.searchsorted(np.cumsum(freed[first, to[first]]), over)) + 1
            pick_J[rows[first[:enough]]] = to[first[:enough]]
    return pick_J
