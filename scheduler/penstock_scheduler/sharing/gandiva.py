"""Gandiva's reactive mode: on which nodes a new job goes (OSDI '18, section 4.1, Algorithm 1).

Nodes have an *affinity*: the size of the jobs that they hold. Jobs of one size fill a node without leaving pieces. The *height*
of a node is the GPUs that its jobs want over the GPUs it has; above 1 its jobs take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_scheduler.model import SharedGpus


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a job goes."""

    shares: tuple[tuple[str, int], ...]
    """(node, GPUs there)."""
    sliced: bool = False
    """Whether it takes turns with others there."""


def affinity(node: SharedGpus) -> int:
    """GPUs of the largest job there; 0: it is empty, and takes any."""
    return max((pack.gpus for pack in node.packs), default=0)


def height(node: SharedGpus) -> float:
    """GPUs wanted over GPUs there; a pack wants its GPUs once."""
    return node.wanted / node.gpus


def land(
    gpus: int, nodes: Sequence[SharedGpus], max_height: float = math.inf, *, spread: bool = True
) -> Landing | None:
    """Algorithm 1 for one new job.

    In this order: the least loaded node of its affinity with room; an empty node; free GPUs wherever they are, on as few nodes
    as do; a turn on the least loaded node, of its affinity first. The paper over-subscribes nodes of the same affinity
    only; then a job would queue beside nodes that it fits.

    Args:
        gpus: GPUs that the job wants.
        nodes: of one GPU type, in the order that breaks ties.
        max_height: most height to which a node may be over-subscribed; 1: nobody takes turns.
        spread: whether it may have pieces of several nodes, as many as there happen to be on each.

    Returns:
        Where it goes; None: it waits in the queue.

    Raises:
        ValueError: `gpus` is not positive.
    """
    if gpus < 1:
        raise ValueError(f"a job of {gpus} GPUs lands nowhere; give 1 or more")
    for wanted in (gpus, 0):
        fitting = [node for node in nodes if affinity(node) == wanted and _free(node) >= gpus]
        if fitting:
            return Landing(((min(fitting, key=height).node, gpus),))
    pieces = _spread(gpus, nodes)
    if pieces and (spread or len(pieces) == 1):
        return Landing(pieces)
    able = [node for node in nodes if node.gpus >= gpus and (node.wanted + gpus) / node.gpus <= max_height]
    if not able:
        return None
    return Landing(((min(able, key=lambda node: (affinity(node) != gpus, height(node))).node, gpus),), sliced=True)


def _spread(gpus: int, nodes: Sequence[SharedGpus]) -> tuple[tuple[str, int], ...]:
    """Free GPUs beyond the job's class: of the one node that it fills best, or of the fewest nodes; empty: too few."""
    whole = [node for node in nodes if _free(node) >= gpus]
    if whole:
        return ((min(whole, key=_free).node, gpus),)
    shares: list[tuple[str, int]] = []
    for node in sorted((node for node in nodes if _free(node) > 0), key=lambda node: -_free(node)):
        shares.append((node.node, min(_free(node), gpus)))
        gpus -= shares[-1][1]
        if gpus == 0:
            return tuple(shares)
    return ()


def _free(node: SharedGpus) -> int:
    return max(node.gpus - node.wanted, 0)
