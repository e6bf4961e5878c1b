"""The integer program of a round: built from the matrix, its costs and its quotas, and solved within the settings' limits.

Its rows beside the capacity of each GPU type are the quotas: access to nodes, limits, and measuring.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import GpuLimit, Job, JobId, Placement
from penstock_scheduler.rounds.free_gpus import opens
from penstock_scheduler.rounds.policies.sia.costs import costs
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings
from penstock_scheduler.rounds.solver import Limits, Problem, Quota, Solution, solve

MOST_UNIONS = 6
"""Most different sets of nodes for which every union of them gets a row."""


def quotas(matrix: SiaMatrix) -> tuple[Quota, ...]:
    """All of these rows."""
    return (*_access_quotas(matrix), *_limit_quotas(matrix), *_measuring_quotas(matrix))


def _access_quotas(matrix: SiaMatrix) -> list[Quota]:
    """For each type: jobs that can use only some of its nodes get no more GPUs together than those nodes have.

    There is one row for every union of the sets of nodes that are open to some job, as in Hall's theorem. With more than
    `MOST_UNIONS` different sets there is one row for each single set, and placement settles the rest.
    """
    found = []
    for t, gpu_type in enumerate(matrix.types):
        pools = {pool: gpus for pool, gpus in matrix.free_gpus.items() if pool[0] == gpu_type}
        sets = [
            frozenset(pool for pool in pools if any(opens(door, pool[1]) for door in own)) for own in matrix.accesses
        ]
        different = sorted(set(sets), key=lambda pools: sorted(pools))
        unions = set(different)
        if len(different) <= MOST_UNIONS:
            for count in range(2, len(different) + 1):
                unions |= {frozenset().union(*some) for some in itertools.combinations(different, count)}
        for union in sorted(unions, key=lambda pools: sorted(pools)):
            gpus = sum(pools[pool] for pool in union)
            if gpus < sum(pools.values()):
                inside = [access for access, own in enumerate(sets) if own <= union]
                found.append(Quota(np.flatnonzero(np.isin(matrix.access_J, inside)), gpus, gpu_type=t))
    return found


def _measuring_quotas(matrix: SiaMatrix) -> list[Quota]:
    """Jobs that move to be measured get only GPUs that no job holds, so that no other job is moved for them."""
    found: list[Quota] = []
    if not matrix.measuring:
        return found
    for t in range(len(matrix.types)):
        there_J = (matrix.held_J >= 0) & (matrix.type_C[matrix.held_J] == t)
        free = int(matrix.capacity_T[t]) - int(matrix.gpus_C[matrix.held_J[there_J]].sum())
        rows = [
            row
            for row, measuring in matrix.measuring.items()
            if matrix.held_J[row] >= 0 and not there_J[row] and t in matrix.type_C[measuring.columns]
        ]
        if rows:
            found.append(Quota(np.array(rows, dtype=np.int64), max(free, 0), gpu_type=t))
    return found


def _limit_quotas(matrix: SiaMatrix) -> list[Quota]:
    """Limits of users, accounts and QOS, less what pinned jobs use of them."""
    found = []
    for limit in matrix.snapshot.limits:
        if limit.gpu_type and limit.gpu_type not in matrix.types:
            continue
        pinned = _counted(limit, matrix.pins, matrix.by_id)
        members = [row for row, job in enumerate(matrix.jobs) if limit.covers(job)]
        gpu_type = matrix.types.index(limit.gpu_type) if limit.gpu_type else None
        found.append(Quota(np.array(members, dtype=np.int64), max(limit.gpus - pinned, 0), gpu_type))
    return found


def _counted(limit: GpuLimit, placements: Mapping[JobId, Placement], jobs: Mapping[JobId, Job]) -> int:
    """GPUs of these placements that count against the limit."""
    return sum(p.gpus for job, p in placements.items() if limit.covers(jobs[job]) and limit.counts(p.gpu_type))


def build(matrix: SiaMatrix, settings: SiaSettings) -> tuple[Problem, NDArray[np.float64]]:
    """The program, and the cost of leaving each job out, times the job's weight.

    The solver has one cost of leaving a job out for all jobs: the average. Each job's entries are shifted by the difference.
    """
    leave_J, cost_JC = costs(matrix, settings)
    weighted_J = leave_J * matrix.weight_J
    leave_out = float(weighted_J.mean()) if len(weighted_J) else 0.0
    problem = Problem(
        cost_JC * matrix.weight_J[:, None] - weighted_J[:, None] + leave_out,
        matrix.gpus_C,
        matrix.type_C,
        matrix.capacity_T,
        leave_out,
        quotas=quotas(matrix),
        recorded_J=matrix.recorded(),
    )
    return problem, weighted_J


def solved(problem: Problem, settings: SiaSettings) -> Solution:
    """The best choice within the settings' limits. Raises RoundFailed if there is no usable one."""
    limits = Limits(gap=settings.gap, seconds=settings.max_seconds)
    return solve(problem, settings.solver, limits)
