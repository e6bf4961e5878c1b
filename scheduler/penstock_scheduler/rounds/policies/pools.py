"""Pools: the GPUs that some jobs may use, who holds them, and the fewest that a job needs; for `turns`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from penstock_scheduler.model import Adaptivity, Configuration, Job, Node, Phase, Placement, Snapshot
from penstock_scheduler.rounds.free_gpus import is_open, open_nodes
from penstock_scheduler.rounds.policies import common


class Pool:
    """The GPUs that some jobs may use, and who holds them."""

    def __init__(self, snapshot: Snapshot, job: Job, holding: Iterable[tuple[Job, Placement]]) -> None:
        self.nodes = {
            node.name: node for node in open_nodes(snapshot.nodes, job) if job.spec.allows_type(node.gpu_type)
        }
        self.held = Counter[str]()
        """User -> GPUs."""
        for other, where in holding:
            self.held[other.user] += self.on(where)
        unseen = sum(self.on(place) for other in snapshot.unseen if (place := place_of(other)) is not None)
        self.gpus = sum(node.gpus_for_us for node in self.nodes.values()) + unseen
        queued = {pool_key(other): other for other in snapshot.jobs if other.phase is Phase.QUEUED}
        want = {key for key, other in queued.items() if any(_may_use(other, node) for node in self.nodes.values())}
        want.add(pool_key(job))
        self.users = sorted(
            {user for user, gpus in self.held.items() if gpus > 0}
            | {other.user for other in snapshot.jobs if other.phase is Phase.QUEUED and pool_key(other) in want}
        )
        """Users who hold or want some of them."""
        self.share = self.gpus / max(len(self.users), 1)

        self._shapes: dict[tuple[int, int], list[Configuration]] = {}

    def shapes(self, job: Job) -> list[Configuration]:
        """The configurations of the pool that are no larger than the job's largest, the smallest first."""
        least, most = job.spec.min_gpus, job.spec.max_gpus
        if (least, most) not in self._shapes:
            found = common.configurations(self.nodes.values(), {least} if least == most else (), most)
            self._shapes[least, most] = sorted(found, key=lambda each: each.gpus)
        return self._shapes[least, most]

    def on(self, where: Placement) -> int:
        """GPUs of a placement that are in the pool."""
        return sum(share.gpus for share in where.shares if share.node in self.nodes)


def place_of(job: Job) -> Placement | None:
    """The GPUs on which a job runs, or to which it is on its way."""
    return job.running_on or job.bound_for


PoolKey = tuple[object, ...]


def pool_key(job: Job) -> PoolKey:
    """Jobs with the same key may use the same GPUs."""
    return job.partitions, job.reservation, job.nodes, job.spec.gpu_types, job.spec.excluded_gpu_types


def _may_use(job: Job, node: Node) -> bool:
    return is_open(node, job) and job.spec.allows_type(node.gpu_type)


def asks(job: Job) -> tuple[object, ...]:
    """Jobs of a user with the same pool and these are alike: if there is no room for one, there is none for the others."""
    return job.account, job.qos, job.spec.min_gpus, job.spec.max_gpus, str(job.spec.scale_unit), job.spec.adaptivity


def fewest(snapshot: Snapshot, job: Job, pool: Pool) -> dict[Configuration, float]:
    """The smallest configurations on which the job makes progress -> its goodput there, the fastest first."""
    found: dict[Configuration, float] = {}
    for shape in pool.shapes(job):
        if found and shape.gpus > next(iter(found)).gpus:
            break
        if common.allowed(job, shape):
            rate = common.rate(snapshot.facts[job.id].model, shape)
            if rate > 0 and math.isfinite(rate):
                found[shape] = rate
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))


def shrinks(job: Job, held: Placement, gpus: int) -> bool:
    """Whether a running job can go on without this many of its GPUs."""
    rigid = job.spec.adaptivity in (Adaptivity.RIGID, Adaptivity.FIXED)
    return not rigid and held.gpus - gpus >= job.spec.min_gpus
