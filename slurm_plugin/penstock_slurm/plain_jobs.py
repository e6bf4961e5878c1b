"""Room for jobs that Penstock does not manage, beside those that it does.

Slurm starts plain jobs by itself wherever GPUs are free, and adaptive jobs grow until none are: a plain job that wants more
than an odd GPU would wait for ever. So the plain job that has waited longest, and longer than any adaptive job that has
nothing, gets GPUs set aside: the next round gives them to nobody, who holds them leaves, and Slurm finds them free.
One job at a time, so that plain jobs in any number cannot push the adaptive ones out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock_scheduler.model import Node
from penstock_slurm.gateway import SlurmJob

WAITS = frozenset({"Resources", "Priority", "None", ""})
"""Reasons of jobs that more free GPUs would start; others wait for something else."""


def longest_waiting(
    jobs: Iterable[SlurmJob], partitions: Iterable[str], now_s: float, patience_s: float
) -> SlurmJob | None:
    """The plain job to make room for; None if none has waited for `patience_s`."""
    ours = set(partitions)
    waiting = [
        (job.eligible_s, job.number, job)
        for job in jobs
        if job.state == "PENDING"
        and not job.held
        and job.reason in WAITS
        and job.gpus_per_node
        and not job.reservation
        and ours & set(job.partition)
        and job.eligible_s is not None
        and now_s - job.eligible_s >= patience_s
    ]
    return min(waiting, key=lambda each: each[:2])[2] if waiting else None


def set_aside(
    job: SlurmJob, nodes: Iterable[Node], pinned: Mapping[str, int], held: Mapping[str, int]
) -> dict[str, int]:
    """Node -> GPUs to give to nobody so that `job` can start, on the nodes where the fewest have to be given back.

    Args:
        job: a pending job.
        nodes: the managed nodes.
        pinned: GPUs of each node that managed jobs hold which cannot be moved.
        held: GPUs of each node that managed jobs hold.

    Returns:
        Nothing if its nodes can never be had so.
    """
    gpus = job.gpus_per_node or 0
    fitting = [
        node
        for node in nodes
        if node.usable
        and not node.reservation
        and set(node.partitions) & set(job.partition)
        and job.gpu_type in (None, node.gpu_type)
        and (not job.required_nodes or node.name in job.required_nodes)
        and node.gpus_for_us - pinned.get(node.name, 0) >= gpus
    ]
    fitting.sort(key=lambda node: (max(gpus - (node.gpus_for_us - held.get(node.name, 0)), 0), node.name))
    wanted = fitting[: max(job.node_count, 1)]
    return {node.name: gpus for node in wanted} if len(wanted) == max(job.node_count, 1) else {}
