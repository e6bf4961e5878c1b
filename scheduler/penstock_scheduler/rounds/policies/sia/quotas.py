"""Rows of the integer program beside the capacity of each GPU type: access to nodes, limits, and measuring."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from penstock_scheduler.model import GpuLimit, Job, JobId, Placement
from penstock_scheduler.rounds.free_gpus import opens
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.solver import Quota

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
