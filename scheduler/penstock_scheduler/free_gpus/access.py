"""Which nodes are open to a job: those of its partitions, and of its reservation or of none."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_scheduler.model import Job, Node

Door = tuple[str, str]
"""A partition, and the reservation in which a job runs; an empty reservation is none."""

Access = tuple[tuple[str, ...], str]
"""Partitions of a node, and the reservation for which it is kept."""


def access_of(node: Node) -> Access:
    """What decides to which jobs a node is open."""
    return node.partitions, node.reservation


def opens(door: Door, access: Access) -> bool:
    """Whether a job in this partition and reservation may use such a node."""
    return door[0] in access[0] and door[1] == access[1]


def doors(job: Job) -> list[Door]:
    """The doors of a job, the one of its preferred partition first."""
    return [(partition, job.reservation) for partition in job.partitions]


def is_open(node: Node, job: Job) -> bool:
    """Whether a job may use a node, by partition and reservation."""
    return node.reservation == job.reservation and not set(job.partitions).isdisjoint(node.partitions)


def open_nodes(nodes: Iterable[Node], job: Job) -> list[Node]:
    """Nodes that a job may use, by partition and reservation."""
    return [node for node in nodes if is_open(node, job)]
