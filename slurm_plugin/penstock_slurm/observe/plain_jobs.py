"""Room for plain jobs, which Penstock does not manage.

Slurm starts plain jobs by itself wherever GPUs are free, but adaptive jobs grow until none are. A plain job that needs several
GPUs would wait forever. Therefore GPUs are set aside for the plain job that has waited longest, if it has waited longer than
every queued adaptive job: the next round allocates these GPUs to no job, the jobs on them leave, and Slurm finds them free.
This happens for one plain job at a time, so plain jobs cannot push out all adaptive jobs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from penstock_scheduler.model import Adaptivity, Job, Node, Phase
from penstock_slurm.gateway import SlurmJob

WAITS = frozenset({"Resources", "Priority", "None", ""})
"""Reasons of pending jobs that more free GPUs would start."""


def with_room(
    nodes: tuple[Node, ...],
    plain: Iterable[SlurmJob],
    managed: Collection[Job],
    partitions: Iterable[str],
    *,
    now_s: float,
    patience_s: float,
) -> tuple[Node, ...]:
    """The nodes without the GPUs that are set aside for a plain job.

    It is the one that has waited longest, if that is longer than `patience_s` and than every queued managed job.
    """
    job = longest_waiting(plain, partitions, now_s, patience_s)
    if job is None:
        return nodes
    first_s = min((each.submit_s for each in managed if each.phase is Phase.QUEUED), default=now_s)
    if (job.eligible_s or now_s) > first_s:
        return nodes
    held: Counter[str] = Counter()
    pinned: Counter[str] = Counter()
    for each in managed:
        for share in each.allocation.shares if each.allocation is not None else ():
            held[share.node] += share.gpus
            if not each.spec.preemptible or each.spec.adaptivity is Adaptivity.FIXED:
                pinned[share.node] += share.gpus
    aside = set_aside(job, nodes, pinned, held)
    return tuple(
        dataclasses.replace(node, gpus_others=node.gpus_others + aside[node.name], set_aside_for=job.id)
        if node.name in aside
        else node
        for node in nodes
    )


def longest_waiting(
    jobs: Iterable[SlurmJob], partitions: Iterable[str], now_s: float, patience_s: float
) -> SlurmJob | None:
    """The plain job to make room for; None: none has waited for `patience_s`."""
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
    """Node -> GPUs to set aside so that `job` can start, on the nodes where managed jobs lose the fewest GPUs.

    Args:
        job: a pending job.
        nodes: the managed nodes.
        pinned: GPUs of each node that managed jobs hold and that cannot be freed.
        held: GPUs of each node that managed jobs hold.

    Returns:
        Empty if the job cannot start that way.
    """
    gpus = job.gpus_per_node or 0
    fitting = [
        node
        for node in nodes
        if node.may_start
        and not node.reservation
        and set(node.partitions) & set(job.partition)
        and job.gpu_type in (None, node.gpu_type)
        and (not job.required_nodes or node.name in job.required_nodes)
        and node.gpus_for_us - pinned.get(node.name, 0) >= gpus
    ]
    fitting.sort(key=lambda node: (max(gpus - (node.gpus_for_us - held.get(node.name, 0)), 0), node.name))
    wanted = fitting[: max(job.node_count, 1)]
    return {node.name: gpus for node in wanted} if len(wanted) == max(job.node_count, 1) else {}
