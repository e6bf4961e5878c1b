"""Room for jobs, now and later: what policies that fill a cluster job by job keep count with.

Axes: N nodes, B moments at which somebody is expected to leave.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import Configuration, GpuLimit, Job, JobId, Node, Phase, Placement, Share, Snapshot
from penstock_scheduler.placement import place
from penstock_scheduler.policies.common import changed_nodes

Fit = Literal["first", "best"]
"""Which node part of a node is taken from: the first with enough free GPUs, or the one that then has fewest left."""


class Allowance:
    """What limits on users, accounts and QOS leave to be allocated."""

    def __init__(self, limits: Iterable[GpuLimit]) -> None:
        self._left = {limit: limit.gpus for limit in limits}

    def copy(self) -> Allowance:
        """Another one, to try things in."""
        other = Allowance(())
        other._left = dict(self._left)
        return other

    def left(self) -> tuple[GpuLimit, ...]:
        """The limits, less what was allocated."""
        return tuple(dataclasses.replace(limit, gpus=max(left, 0)) for limit, left in self._left.items())

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self._left)

    def refuses(self, job: Job, gpus: int, gpu_type: str) -> GpuLimit | None:
        """The limit that does not allow the job so many GPUs of this type now."""
        bears = (limit for limit, left in self._left.items() if gpus > left and limit.counts(gpu_type))
        return next((limit for limit in bears if limit.covers(job)), None)

    def within(self, job: Job, options: dict[Configuration, float]) -> tuple[dict[Configuration, float], str]:
        """Those of the options that are allowed the job now; if there is none, what its user is told."""
        if not self._left or not options:
            return options, ""
        limits = {option: self.refuses(job, option.gpus, option.gpu_type) for option in options}
        allowed = {option: value for option, value in options.items() if limits[option] is None}
        return allowed, "" if allowed else f"{next(iter(limits.values()))} does not allow more now"

    def take(self, job: Job, gpus: int, gpu_type: str) -> None:
        """Count GPUs that the job is given; with fewer than 0, those that it gives back."""
        for limit in self._left:
            if limit.counts(gpu_type) and limit.covers(job):
                self._left[limit] -= gpus


class _Frame:
    """What stays the same of the nodes, whoever holds their GPUs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.index = {node.name: index for index, node in enumerate(nodes)}
        self.by_name_N = np.argsort(np.argsort(np.array([node.name for node in nodes], dtype=np.str_)))
        self._types = np.array([node.gpu_type for node in nodes], dtype=np.str_)
        self._gpus_N = np.array([node.gpus for node in nodes], dtype=np.int64)
        self._right: dict[Configuration, NDArray[np.bool_]] = {}

    def right(self, option: Configuration) -> NDArray[np.bool_]:
        """Nodes that could be part of a configuration if they were free."""
        if option not in self._right:
            right_N: NDArray[np.bool_] = self._types == option.gpu_type
            if option.nodes > 1 and (whole_N := right_N & (self._gpus_N == option.gpus // option.nodes)).any():
                right_N = whole_N
            self._right[option] = right_N
        return self._right[option]


class Room:
    """The free GPUs of each node while jobs are given theirs.

    Args:
        nodes: all nodes.
        limits: on users, accounts and QOS.
        fit: where part of a node is taken from.
        like: of an earlier round, as it was then made: what is the same of the nodes is taken from it.
    """

    def __init__(self, nodes: Sequence[Node], limits: Iterable[GpuLimit], fit: Fit, like: Room | None = None) -> None:
        self._nodes = nodes
        self._fit = fit
        self._frame: _Frame
        self._free_at_first_N: NDArray[np.int64]
        self.allowance = Allowance(limits)
        changed = None if like is None else changed_nodes(like._nodes, nodes)
        if like is not None and changed is not None and all(_alike(like._nodes[n], nodes[n]) for n in changed):
            self._frame = like._frame
            self._free_at_first_N = like._free_at_first_N.copy()
            for n in changed:
                self._free_at_first_N[n] = nodes[n].gpus_for_us
        else:
            self._frame = _Frame(nodes)
            self._free_at_first_N = np.array([node.gpus_for_us for node in nodes], dtype=np.int64)
        self.free_N = self._free_at_first_N.copy()

    def copy(self) -> Room:
        """Another one, to try things in."""
        other = object.__new__(Room)
        other.__dict__ |= self.__dict__ | {"free_N": self.free_N.copy(), "allowance": self.allowance.copy()}
        return other

    def take(self, job: Job, placement: Placement) -> None:
        """Let the job have these GPUs."""
        self.add_to(self.free_N, placement, -1)
        self.allowance.take(job, placement.gpus, placement.gpu_type)

    def give(self, job: Job, placement: Placement) -> None:
        """Take them back."""
        self.add_to(self.free_N, placement, 1)
        self.allowance.take(job, -placement.gpus, placement.gpu_type)

    def has(self, placement: Placement) -> bool:
        """Whether all its GPUs are free, or on nodes that are out of service: who runs there may stay."""
        return all(
            (index := self._frame.index.get(share.node)) is None
            or self.free_N[index] >= share.gpus
            or not self._nodes[index].usable
            for share in placement.shares
        )

    def find(
        self, job: Job, options: Iterable[Configuration], free_N: NDArray[np.int64] | None = None
    ) -> Placement | None:
        """Nodes for the first of `options` that there is room for. `free_N`: free GPUs at another time than now."""
        free_N = self.free_N if free_N is None else free_N
        for option in options:
            candidates = self.enough(option, free_N).nonzero()[0]
            if len(candidates) < option.nodes:
                continue
            if option.nodes == 1:
                found = self._on_one_node(job, option, candidates, free_N)
            else:
                nodes = [self._with_free(index, int(free_N[index])) for index in candidates.tolist()]
                reservations = {job.id: job.reservation} if job.reservation else {}
                placed = place(nodes, {job.id: option}, {job.id: job.partitions}, {}, {}, reservations=reservations)
                found = placed.placements.get(job.id)
            if found is not None:
                return found
        return None

    def _with_free(self, index: int, free: int) -> Node:
        node = self._nodes[index]
        return node if node.gpus_for_us == free else dataclasses.replace(node, gpus_others=node.gpus - free)

    def _on_one_node(
        self, job: Job, option: Configuration, candidates: NDArray[np.int64], free_N: NDArray[np.int64]
    ) -> Placement | None:
        """The first node with enough free GPUs, or the fullest of the job's first partition that has one, as `place` takes it."""
        tried: Iterable[tuple[int, str]]
        if self._fit == "first":
            tried = itertools.product(candidates.tolist(), job.partitions)
        else:
            order = candidates[np.lexsort((self._frame.by_name_N[candidates], free_N[candidates]))].tolist()
            tried = ((index, partition) for partition in job.partitions for index in order)
        for index, partition in tried:
            node = self._nodes[index]
            if partition in node.partitions and node.reservation == job.reservation:
                return Placement(option.gpu_type, partition, (Share(node.name, option.gpus),))
        return None

    def enough(self, option: Configuration, free: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which nodes could be part of a configuration; of the shape of `free`, whose last axis are the nodes."""
        per_node = option.gpus // option.nodes
        right_N = self._frame.right(option)
        enough: NDArray[np.bool_] = (free >= per_node) & right_N
        return enough

    def add_to(self, free_N: NDArray[np.int64], placement: Placement, sign: int) -> None:
        """Add the GPUs of a placement to `free_N`, or take them from it."""
        for share in placement.shares:
            index = self._frame.index.get(share.node)
            if index is not None and self._nodes[index].usable:
                free_N[index] += sign * share.gpus


def _alike(old: Node, new: Node) -> bool:
    """Whether this is the same node, of the same type and size."""
    return (old.name, old.gpu_type, old.gpus) == (new.name, new.gpu_type, new.gpus)


class Timeline:
    """Free GPUs from now on, as far as it is known when jobs end, less what is reserved.

    Args:
        room: what is free now; it is not changed here.
        ends: when those that hold GPUs now give them back, s since 1970; `inf`: not known.
    """

    def __init__(self, room: Room, now_s: float, ends: Iterable[tuple[float, Placement]]) -> None:
        self._room = room
        self._times_s = [now_s]
        frees = [room.free_N.copy()]
        for end_s, placement in sorted((end for end in ends if math.isfinite(end[0])), key=lambda end: end[0]):
            assert end_s > now_s
            if end_s > self._times_s[-1]:
                self._times_s.append(end_s)
                frees.append(frees[-1].copy())
            room.add_to(frees[-1], placement, 1)
        self._free_BN = np.stack(frees)

    def earliest(
        self,
        job: Job,
        options: Sequence[Configuration],
        seconds: Callable[[Configuration], float],
        *,
        now: bool = False,
    ) -> tuple[float, float, Placement] | None:
        """When and until when, and where, a job of this duration finds room; None if that is not known.

        With `now` only now will do.
        """
        times = slice(1) if now else slice(None)
        ready = [self._room.enough(option, self._free_BN[times]).sum(axis=1) >= option.nodes for option in options]
        for begin in np.flatnonzero(np.any(ready, axis=0)).tolist():
            for option in options:
                until_s = self._times_s[begin] + seconds(option)
                end = bisect.bisect_left(self._times_s, until_s)
                found = self._room.find(job, (option,), self._free_BN[begin : max(end, begin + 1)].min(axis=0))
                if found is not None:
                    return self._times_s[begin], until_s, found
        return None

    def reserve(self, begin_s: float, until_s: float, placement: Placement) -> None:
        """Keep these GPUs for somebody, from a moment that `earliest` found."""
        begin, end = self._times_s.index(begin_s), bisect.bisect_left(self._times_s, until_s)
        if math.isfinite(until_s) and until_s not in self._times_s[end : end + 1]:
            self._times_s.insert(end, until_s)
            self._free_BN = np.insert(self._free_BN, end, self._free_BN[end - 1], axis=0)
        for b in range(begin, end):
            self._room.add_to(self._free_BN[b], placement, -1)


def settle(
    snapshot: Snapshot,
    pins: Mapping[JobId, Placement],
    chosen: Mapping[JobId, Configuration],
    instead: Iterable[tuple[JobId, Configuration]],
) -> dict[JobId, Placement]:
    """Nodes for a choice that was made by numbers of GPUs: in the order of `chosen`, as far as limits allow.

    Then the jobs of `instead` that have none so far get the first of their entries that there is room for.
    """
    jobs = {job.id: job for job in snapshot.jobs}
    allowance = Allowance(snapshot.limits)
    for job_id, pin in pins.items():
        allowance.take(jobs[job_id], pin.gpus, pin.gpu_type)
    wanted = {}
    for job_id, option in chosen.items():
        if allowance.refuses(jobs[job_id], option.gpus, option.gpu_type) is None:
            allowance.take(jobs[job_id], option.gpus, option.gpu_type)
            wanted[job_id] = option
    running = {job.id: job.allocation for job in snapshot.jobs if job.phase is Phase.RUNNING and job.allocation}
    placements = place(
        snapshot.nodes,
        wanted,
        {job_id: jobs[job_id].partitions for job_id in wanted},
        {job_id: running[job_id] for job_id in wanted if job_id in running},
        pins,
        reservations={job.id: job.reservation for job in snapshot.jobs if job.reservation},
    ).placements
    room = Room(snapshot.nodes, snapshot.limits, "best")
    for job_id, placement in (*pins.items(), *placements.items()):
        room.take(jobs[job_id], placement)
    for job_id, option in instead:
        if job_id in placements or room.allowance.refuses(jobs[job_id], option.gpus, option.gpu_type) is not None:
            continue
        if (found := room.find(jobs[job_id], (option,))) is not None:
            placements[job_id] = found
            room.take(jobs[job_id], found)
    return placements
