"""From configurations to nodes: which GPUs where.

Rules: a job on part of a node is never split over two; a job on several nodes takes them whole, and shares none, unless it is of
a fixed size that no nodes have (10 GPUs on nodes of 8), and takes the same part of each; a job that
keeps its configuration keeps its nodes, unless it stands in the way; parts of nodes are filled best-fit; several nodes are
taken from one switch where that is possible, from the one with the fewest free.

Jobs are placed from the largest to the smallest. One that finds no room makes some: of the nodes where smaller jobs could go,
it takes those where that costs least, and the smaller jobs are placed again in their turn.

Where the nodes of a type have one size, a power of two, all GPUs are ours, and every job that could use one node of the type can
use all, this places whatever fits by number of GPUs: by the time a job of r GPUs is placed, every node holds a multiple of r
in jobs that are as large or larger, so what smaller jobs and nobody hold there is a multiple of r too; and as the sum over the
nodes is at least r, one of them has r. Elsewhere a job may be left over, and is named.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.free_gpus import FreeGpus
from penstock_scheduler.model import Configuration, JobId, Node, Placement


@dataclass(frozen=True, slots=True)
class Placed:
    """What came of a placing."""

    placements: dict[JobId, Placement] = field(default_factory=dict)
    made_room_for: dict[JobId, JobId] = field(default_factory=dict)
    """Jobs that could have kept their nodes, and the job that has them now."""
    left_over: tuple[JobId, ...] = ()
    """Jobs for which there was no room in one piece."""


def place(
    nodes: Sequence[Node],
    wanted: Mapping[JobId, Configuration],
    partitions: Mapping[JobId, tuple[str, ...]],
    current: Mapping[JobId, Placement],
    pinned: Mapping[JobId, Placement],
    *,
    reservations: Mapping[JobId, str] | None = None,
    move_cost: Mapping[JobId, float] | None = None,
) -> Placed:
    """Place every job of `wanted`.

    Args:
        nodes: all nodes; unusable ones offer nothing.
        wanted: configuration per job. Where it equals the job's `current` placement's, the job should stay.
        partitions: partitions that each wanted job may use, the preferred one first.
        current: placements now held by wanted jobs.
        pinned: placements of other jobs, which must stay.
        reservations: of jobs that run in one: they use its nodes, and nobody else does.
        move_cost: GPU-seconds of work that moving a job costs, >= 0; None or absent: its GPUs.
    """
    placements: dict[JobId, Placement] = {}
    made_room_for: dict[JobId, JobId] = {}
    left_over: list[JobId] = []
    inside = reservations or {}
    free = FreeGpus(nodes)
    for placement in pinned.values():
        free.take_nodes(placement)
    by_type: dict[str, dict[JobId, Configuration]] = {}
    for job, configuration in wanted.items():
        by_type.setdefault(configuration.gpu_type, {})[job] = configuration
    for gpu_type, todo in sorted(by_type.items()):
        room = free.index(gpu_type, move_cost)
        queue = []
        for job, configuration in todo.items():
            held = current.get(job)
            stays = held is not None and held.configuration == configuration and held.partition in partitions[job]
            if not (stays and held is not None and room.keep(job, held, inside.get(job, ""))):
                queue.append((-configuration.gpus, -configuration.nodes, job))
        heapq.heapify(queue)
        while queue:
            _, _, job = heapq.heappop(queue)
            found, moved = room.find(todo[job], [(name, inside.get(job, "")) for name in partitions[job]])
            if found is None:
                left_over.append(job)
                continue
            placements[job] = found
            for other in moved:
                made_room_for[other] = job
                heapq.heappush(queue, (-todo[other].gpus, -todo[other].nodes, other))
        placements |= room.kept
    return Placed(
        placements, {job: by for job, by in made_room_for.items() if job not in left_over}, tuple(sorted(left_over))
    )
