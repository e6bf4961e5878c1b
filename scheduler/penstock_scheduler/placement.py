"""From configurations to nodes: which GPUs where.

Rules: a job on part of a node is never split over two; a job on several nodes takes them whole; a job that keeps its
configuration keeps its nodes unless it stands in the way; parts of nodes are filled best-fit. When what is free is
scattered, the job in the way with the fewest GPUs is moved, then the next, until everything fits or nothing is left to
move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock_scheduler.model import Configuration, JobId, Node, Placement, Share


def place(
    nodes: Sequence[Node],
    wanted: Mapping[JobId, Configuration],
    partitions: Mapping[JobId, tuple[str, ...]],
    current: Mapping[JobId, Placement],
    pinned: Mapping[JobId, Placement],
) -> tuple[dict[JobId, Placement], tuple[JobId, ...]]:
    """Place every job of `wanted`.

    Args:
        nodes: all nodes; unusable ones offer nothing.
        wanted: configuration per job. Where it equals the job's `current` placement's, the job should stay.
        partitions: partitions that each wanted job may use, the preferred one first.
        current: placements now held by wanted jobs.
        pinned: placements of other jobs, which must stay.

    Returns:
        Placements of the wanted jobs, and the jobs for which there was no room in one piece.
    """
    placed: dict[JobId, Placement] = {}
    failed: list[JobId] = []
    for gpu_type in sorted({configuration.gpu_type for configuration in wanted.values()}):
        typed = {node.name: node for node in nodes if node.gpu_type == gpu_type}
        free = {name: node.gpus_for_us for name, node in typed.items()}
        for placement in pinned.values():
            _take(free, placement)
        todo = {job: configuration for job, configuration in wanted.items() if configuration.gpu_type == gpu_type}
        while True:
            done, stuck = _place_type(typed, free, todo, partitions, current)
            if stuck is None:
                break
            failed.append(stuck)
            del todo[stuck]
        placed |= done
    return placed, tuple(sorted(failed))


def _place_type(
    nodes: Mapping[str, Node],
    free: Mapping[str, int],
    todo: Mapping[JobId, Configuration],
    partitions: Mapping[JobId, tuple[str, ...]],
    current: Mapping[JobId, Placement],
) -> tuple[dict[JobId, Placement], JobId | None]:
    """Place `todo`, all of one type; or name a job that cannot be placed even when all others may move."""
    kept = {
        job: current[job]
        for job, configuration in todo.items()
        if job in current
        and current[job].configuration == configuration
        and current[job].partition in partitions[job]
        and all(name in nodes and nodes[name].usable for name in current[job].nodes)
    }
    # Largest first: a job on whole nodes has the fewest ways to fit.
    order = sorted(todo, key=lambda job: (-todo[job].nodes, -todo[job].gpus, job))
    while True:
        left = dict(free)
        for placement in kept.values():
            _take(left, placement)
        placed = dict(kept)
        stuck = None
        for job in order:
            if job in kept:
                continue
            placement_or_none = _fit(nodes, left, todo[job], partitions[job])
            if placement_or_none is None:
                stuck = job
                break
            placed[job] = placement_or_none
            _take(left, placement_or_none)
        if stuck is None or not kept:
            return placed, stuck
        del kept[min(kept, key=lambda job: (kept[job].gpus, job))]


def _fit(
    nodes: Mapping[str, Node], left: Mapping[str, int], configuration: Configuration, partitions: Sequence[str]
) -> Placement | None:
    per_node = configuration.gpus // configuration.nodes
    for partition in partitions:
        inside = [name for name in left if partition in nodes[name].partitions and left[name] >= per_node]
        if configuration.nodes > 1:
            inside = [name for name in inside if left[name] == nodes[name].gpus == per_node]
        inside.sort(key=lambda name: (left[name], name))
        if len(inside) >= configuration.nodes:
            chosen = sorted(inside[: configuration.nodes])
            return Placement(configuration.gpu_type, partition, tuple(Share(name, per_node) for name in chosen))
    return None


def _take(free: dict[str, int], placement: Placement) -> None:
    for share in placement.shares:
        if share.node in free:
            free[share.node] -= share.gpus
