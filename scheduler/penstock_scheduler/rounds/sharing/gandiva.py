"""Gandiva's reactive mode: the nodes for a new job (OSDI '18, section 4.1, Algorithm 1).

Nodes have an *affinity*: the size of their jobs. Jobs of one size fill a node without leaving fragments. The *height*
of a node is the number of GPUs that its jobs need over the number of its GPUs. Above 1, its jobs are time-sliced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_scheduler.model import SharedGpus


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a new job goes."""

    shares: tuple[tuple[str, int], ...]
    """(node, GPUs there)."""
    sliced: bool = False
    """Whether it is time-sliced with other jobs there."""


def affinity(node: SharedGpus) -> int:
    """Number of GPUs of the node's largest job; 0: it is empty, and takes jobs of any size."""
    return max((pack.gpus for pack in node.packs), default=0)


def height(node: SharedGpus) -> float:
    """Number of GPUs that the node's packs need over the number of its GPUs."""
    return node.wanted / node.gpus


def land(
    gpus: int, nodes: Sequence[SharedGpus], max_height: float = math.inf, *, spread: bool = True
) -> Landing | None:
    """Algorithm 1 for one new job.

    It goes to the first of these that exists:

    1. the least loaded node of its affinity with enough free GPUs;
    2. an empty node;
    3. free GPUs anywhere, on as few nodes as possible;
    4. time slices on the least loaded node, preferably one of its affinity.

    The paper over-subscribes only nodes of the same affinity. Then a job would queue beside nodes that it fits.

    Args:
        gpus: number of GPUs that the job needs.
        nodes: the nodes of one GPU type, in the order that breaks ties.
        max_height: greatest height to which a node may be over-subscribed; 1: no time slicing.
        spread: whether the job may run on several nodes, with different numbers of GPUs on each.

    Returns:
        Where the job goes; None: it waits in the queue.

    Raises:
        ValueError: `gpus` is not positive.
    """
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: a job needs 1 GPU or more")
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
    """Free GPUs of nodes of any affinity: of the one node that the job fills best, else of the fewest nodes; (): too
    few."""
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
