"""Pools: the GPUs that some jobs may use, who holds them, and the fewest that a job needs; for `turns`."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable

from penstock_scheduler.model import Adaptivity, Configuration, Job, JobId, Node, NodeChoice, Phase, Placement, Snapshot
from penstock_scheduler.rounds.free_gpus import open_nodes
from penstock_scheduler.rounds.policies import common

Words = tuple[tuple[str, ...], str, NodeChoice | None, int]
"""How a job asks for its nodes: partitions, reservation, node choice, and as bits the nodes of its GPU types."""


class Pool:
    """The GPUs that some jobs may use, and who holds them. `Pools` makes it."""

    def __init__(self, nodes: dict[str, Node], held: Counter[str], unseen: int, wants: Iterable[str]) -> None:
        self.nodes = nodes
        self.held = held
        """User -> GPUs."""
        self.gpus = sum(node.gpus_for_us for node in nodes.values()) + unseen
        self.users = sorted({user for user, gpus in held.items() if gpus > 0}.union(wants))
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
        return _on(where, self.nodes)


class Pools:
    """The pools of a round. Jobs that may use the same nodes share one, however they ask for these nodes: what one pool costs
    must not grow with the ways in which all other jobs ask.

    Args:
        snapshot: the round.
        holding: jobs, and the GPUs that they hold.
    """

    def __init__(self, snapshot: Snapshot, holding: Iterable[tuple[Job, Placement]]) -> None:
        self._nodes = snapshot.nodes
        self._bits = {node.name: 1 << n for n, node in enumerate(snapshot.nodes)}
        self._of_type = dict.fromkeys((node.gpu_type for node in snapshot.nodes), 0)
        for node in snapshot.nodes:
            self._of_type[node.gpu_type] |= self._bits[node.name]
        self._allowed: dict[tuple[object, ...], int] = {}
        """GPU types of a job spec -> nodes of all that it allows. No node is of two types."""
        self._open: dict[tuple[object, ...], int] = {}
        """Partitions, reservation and node choice -> nodes."""
        self._wanted = dict.fromkeys((job.user for job in snapshot.jobs), 0)
        """User -> nodes that any of their queued jobs may use."""
        for job in snapshot.jobs:
            if job.phase is Phase.QUEUED:
                self._wanted[job.user] |= self.mask(job)
        self._unseen = [
            (self._union(where.nodes), where) for job in snapshot.unseen if (where := place_of(job)) is not None
        ]
        self._held = [(job.user, self._union(where.nodes), where, 1) for job, where in holding]
        self._pools: dict[int, Pool] = {}

    def words(self, job: Job) -> Words:
        """How a job asks for its nodes; types that the site has not make no difference."""
        spec = job.spec
        types = spec.gpu_types, spec.excluded_gpu_types
        if types not in self._allowed:
            self._allowed[types] = sum(nodes for name, nodes in self._of_type.items() if spec.allows_type(name))
        return job.partitions, job.reservation, job.nodes, self._allowed[types]

    def mask(self, job: Job) -> int:
        """The nodes that a job may use, as bits: the first bit is the first node of the snapshot."""
        *door, types = self.words(job)
        if (key := tuple(door)) not in self._open:
            self._open[key] = self._union(node.name for node in open_nodes(self._nodes, job))
        return self._open[key] & types

    def of(self, job: Job) -> Pool:
        """The pool of a job."""
        mask = self.mask(job)
        if mask not in self._pools:
            nodes = {node.name: node for node in self._nodes if mask & self._bits[node.name]}
            held = Counter[str]()
            for user, bits, where, sign in self._held:
                if bits & mask:
                    held[user] += sign * _on(where, nodes)
            unseen = sum(_on(where, nodes) for bits, where in self._unseen if bits & mask)
            wants = (user for user, wanted in self._wanted.items() if wanted & mask)
            self._pools[mask] = Pool(nodes, held, unseen, wants)
        return self._pools[mask]

    def count(self, user: str, where: Placement, sign: int) -> None:
        """Count in all pools that a user gets (1) or loses (-1) these GPUs."""
        bits, gpus = self._union(where.nodes), _on(where, self._bits)
        self._held.append((user, bits, where, sign))
        for mask, pool in self._pools.items():
            if inside := bits & mask:
                pool.held[user] += sign * (gpus if inside == bits else pool.on(where))

    def _union(self, names: Iterable[str]) -> int:
        return functools.reduce(operator.or_, (self._bits.get(name, 0) for name in names), 0)


def _on(where: Placement, nodes: Collection[str]) -> int:
    return sum(share.gpus for share in where.shares if share.node in nodes)


def place_of(job: Job) -> Placement | None:
    """The GPUs on which a job runs, or to which it is on its way."""
    return job.running_on or job.bound_for


def asks(job: Job) -> tuple[object, ...]:
    """Jobs of a user with the same pool and these are alike: if there is no room for one, there is none for the others."""
    spec = job.spec
    counts = spec.min_gpus, spec.max_gpus, str(spec.scale_unit), spec.max_nodes, spec.gpus_per_task
    return job.account, job.qos, *counts, spec.adaptivity


def look_up_fewest(snapshot: Snapshot, jobs: Iterable[tuple[Job, Pool]]) -> None:
    """Find what `fewest` needs for each of these jobs and its pool, in one pass."""
    asked: list[tuple[JobId, Configuration]] = []
    for job, pool in jobs:
        able = (shape for shape in pool.shapes(job) if common.allowed(job, shape))
        if (first := next(able, None)) is not None:
            more = itertools.takewhile(lambda shape, gpus=first.gpus: shape.gpus == gpus, able)  # type: ignore[misc]
            asked += ((job.id, shape) for shape in (first, *more))
    common.look_up(snapshot, asked)


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
