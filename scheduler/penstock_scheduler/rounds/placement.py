"""Finds nodes for chosen configurations.

The rules:

- A job that fits on part of a node is never split over two nodes.
- A job on several nodes gets whole nodes. A job of a fixed size that no whole nodes add up to (10 GPUs on nodes of 8) gets the
  same part of each of its nodes.
- A job that keeps its configuration keeps its nodes, unless a larger job needs them.
- Part of a node is taken best-fit: from the node that then has the fewest GPUs left.
- Several nodes are taken from one switch where possible, from the switch with the fewest free nodes.

The steps:

1. Place the jobs from the largest to the smallest.
2. If a job finds no free nodes, take nodes that smaller jobs can leave, where moving those jobs costs least.
3. Place these smaller jobs again when it is their turn by size.

This places every set of jobs that fits by number of GPUs if all nodes of a type have the same size, a power of two, if Penstock
may use all of their GPUs, and if every job that may use one node of the type may use all of them. Proof: when a job of r GPUs
is placed, each node holds a multiple of r GPUs in jobs that are as large or larger. So the rest of each node is a multiple of
r, too. The sum of these rests is at least r, so one node has r GPUs. On other clusters a job may find no nodes. `Placed` names
such jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.model import Configuration, JobId, Node, NodeChoice, Placement, ResourceRequest
from penstock_scheduler.rounds.free_gpus import FreeGpus


@dataclass(frozen=True, slots=True)
class Placed:
    """The result of `place`."""

    placements: dict[JobId, Placement] = field(default_factory=dict)
    made_room_for: dict[JobId, JobId] = field(default_factory=dict)
    """Jobs that had to leave their nodes -> the job that has these nodes now."""
    left_over: tuple[JobId, ...] = ()
    """Jobs for which there were no nodes."""


def place(
    nodes: Sequence[Node],
    wanted: Mapping[JobId, Configuration],
    partitions: Mapping[JobId, tuple[str, ...]],
    current: Mapping[JobId, Placement],
    pinned: Mapping[JobId, Placement],
    *,
    reservations: Mapping[JobId, str] | None = None,
    choices: Mapping[JobId, NodeChoice] | None = None,
    move_cost: Mapping[JobId, float] | None = None,
    requests: Mapping[JobId, ResourceRequest] | None = None,
) -> Placed:
    """Place every job of `wanted`.

    Args:
        nodes: all nodes. No job is placed on an unusable node.
        wanted: configuration of each job. A job that has this configuration in `current` stays if possible.
        partitions: partitions that each wanted job may use, the preferred one first.
        current: placements now held by wanted jobs.
        pinned: placements of other jobs, which must stay.
        reservations: job -> its reservation. Only jobs of a reservation use its nodes.
        choices: job -> its node choice. A job without one may use all nodes.
        move_cost: GPU-seconds of work that moving a job costs, >= 0; None or absent: its GPUs.
        requests: what jobs need beside GPUs, those in `pinned` included.
    """
    placements: dict[JobId, Placement] = {}
    made_room_for: dict[JobId, JobId] = {}
    left_over: list[JobId] = []
    inside, choices = reservations or {}, choices or {}
    choice = {job: str(each) for job, each in choices.items()}
    by_text = dict(sorted((str(each), each) for each in set(choices.values())))
    free = FreeGpus(nodes)
    needs = requests or {}
    for job, placement in pinned.items():
        free.take_nodes(placement, needs.get(job))
    by_type: dict[str, dict[JobId, Configuration]] = {}
    for job, configuration in wanted.items():
        by_type.setdefault(configuration.gpu_type, {})[job] = configuration
    for gpu_type, todo in sorted(by_type.items()):
        room = free.index(gpu_type, move_cost, by_text)
        queue = []
        for job, configuration in todo.items():
            held = current.get(job)
            if (
                held is not None
                and held.configuration == configuration
                and held.partition in partitions[job]
                and room.keep(job, held, inside.get(job, ""), choice.get(job, ""), needs.get(job))
            ):
                continue
            queue.append((-configuration.gpus, -configuration.nodes, job))
        heapq.heapify(queue)
        while queue:
            _, _, job = heapq.heappop(queue)
            found, moved = room.find(
                todo[job],
                [(name, inside.get(job, ""), choice.get(job, "")) for name in partitions[job]],
                needs.get(job),
            )
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
