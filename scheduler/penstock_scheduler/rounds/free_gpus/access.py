"""Which nodes are open to a job: those of its partitions, of its reservation or of none, and of its user's choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock_scheduler.model import Job, Node, NodeChoice

Door = tuple[str, str, str]
"""A partition, the reservation in which a job runs, and its node choice as text; an empty text is none."""

Access = tuple[tuple[str, ...], str, tuple[str, ...]]
"""Partitions of a node, the reservation for which it is kept, and the node choices that admit it."""

Choices = Mapping[str, NodeChoice]
"""The node choices of some jobs, by their text."""


def choices_of(jobs: Iterable[Job]) -> Choices:
    """The different node choices of these jobs, in an order that does not depend on that of the jobs."""
    found = {str(choice): choice for choice in {job.nodes for job in jobs} if choice is not None}
    return dict(sorted(found.items()))


def access_of(node: Node, choices: Choices) -> Access:
    """What decides to which jobs a node is open. `choices`: those of all jobs in question."""
    return node.partitions, node.reservation, tuple(text for text, choice in choices.items() if choice.admits(node))


def opens(door: Door, access: Access) -> bool:
    """Whether a job with this door may use such a node."""
    return door[0] in access[0] and door[1] == access[1] and door[2] in ("", *access[2])


def doors(job: Job) -> list[Door]:
    """The doors of a job, the one of its preferred partition first."""
    choice = choice_text(job)
    return [(partition, job.reservation, choice) for partition in job.partitions]


def choice_text(job: Job) -> str:
    """The job's node choice as text; empty: it has none."""
    return "" if job.nodes is None else str(job.nodes)


def is_open(node: Node, job: Job) -> bool:
    """Whether a job may use a node, by partition, reservation and node choice."""
    return (
        node.reservation == job.reservation
        and not set(job.partitions).isdisjoint(node.partitions)
        and (job.nodes is None or job.nodes.admits(node))
    )


def open_nodes(nodes: Iterable[Node], job: Job) -> list[Node]:
    """Nodes that a job may use, by partition, reservation and node choice."""
    return [node for node in nodes if is_open(node, job)]
