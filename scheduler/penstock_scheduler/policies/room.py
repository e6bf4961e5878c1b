"""Room for jobs, now and later: what policies that fill a cluster job by job keep count with.

Axes: N nodes, B moments at which somebody is expected to leave.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import Configuration, GpuLimit, Job, JobId, Node, Phase, Placement, Snapshot
from penstock_scheduler.placement import place

Fit = Literal["first", "best"]
"""Which node part of a node is taken from: the first with enough free GPUs, or the one that then has fewest left."""


class Allowance:
    """What limits on users, accounts and QOS leave to be given out."""

    def __init__(self, limits: Iterable[GpuLimit]) -> None:
        self._left = {limit: limit.gpus for limit in limits}

    def copy(self) -> Allowance:
        """Another one, to try things in."""
        other = Allowance(())
        other._left = dict(self._left)
        return other

    def left(self) -> tuple[GpuLimit, ...]:
        """The limits, less what was given out."""
        return tuple(dataclasses.replace(limit, gpus=max(left, 0)) for limit, left in self._left.items())

    def refuses(self, job: Job, gpus: int, gpu_type: str) -> GpuLimit | None:
        """The limit that does not allow the job so many GPUs of this type now."""
        bears = (limit for limit, left in self._left.items() if gpus > left and limit.counts(gpu_type))
        return next((limit for limit in bears if limit.covers(job)), None)

    def take(self, job: Job, gpus: int, gpu_type: str) -> None:
        """Count GPUs that the job is given; with fewer than 0, those that it gives back."""
        for limit in self._left:
            if limit.counts(gpu_type) and limit.covers(job):
                self._left[limit] -= gpus


class Room:
    """The free GPUs of each node while jobs are given theirs."""

    def __init__(self, nodes: Sequence[Node], limits: Iterable[GpuLimit], fit: Fit) -> None:
        self._nodes = nodes
        self._fit = fit
        self._index = {node.name: index for index, node in enumerate(nodes)}
        self._types = np.array([node.gpu_type for node in nodes], dtype=np.str_)
        self._gpus_N = np.array([node.gpus for node in nodes], dtype=np.int64)
        self.free_N = np.array([node.gpus_for_us for node in nodes], dtype=np.int64)
        self.allowance = Allowance(limits)

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
            (index := self._index.get(share.node)) is None
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
            candidates = np.flatnonzero(self.enough(option, free_N)).tolist()
            if len(candidates) < option.nodes:
                continue
            one_by_one = self._fit == "first" and option.nodes == 1
            for some in [[index] for index in candidates] if one_by_one else [candidates]:
                nodes = [
                    dataclasses.replace(self._nodes[index], gpus_others=int(self._gpus_N[index] - free_N[index]))
                    for index in some
                ]
                reservations = {job.id: job.reservation} if job.reservation else {}
                placed = place(nodes, {job.id: option}, {job.id: job.partitions}, {}, {}, reservations=reservations)
                if placed.placements:
                    return placed.placements[job.id]
        return None

    def enough(self, option: Configuration, free: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which nodes could be part of a configuration; of the shape of `free`, whose last axis are the nodes."""
        per_node = option.gpus // option.nodes
        right_N = self._types == option.gpu_type
        if option.nodes > 1 and (whole_N := right_N & (self._gpus_N == per_node)).any():
            right_N = whole_N
        enough: NDArray[np.bool_] = (free >= per_node) & right_N
        return enough

    def add_to(self, free_N: NDArray[np.int64], placement: Placement, sign: int) -> None:
        """Add the GPUs of a placement to `free_N`, or take them from it."""
        for share in placement.shares:
            index = self._index.get(share.node)
            if index is not None and self._nodes[index].usable:
                free_N[index] += sign * share.gpus


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
