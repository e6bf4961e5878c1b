"""CPUs and memory beside the GPUs: what jobs need, and the nodes where they may run out. Pure, but for a memory.

Slurm starts a job only where its CPUs and memory are free. A plan that counts GPUs alone would send the job to the same full
node again and again. A round counts CPUs and memory where they can run out at all (`Node.scarce`): on most sites that is nowhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock_scheduler.model import Job, JobId, Node, NodeChoice, ResourceRequest
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.jobs.notes import Request
from penstock_slurm.jobs.states import HOLDING


@functools.lru_cache(maxsize=4096)
def _one(request: ResourceRequest) -> ResourceRequest:
    """One object for each request: many jobs have the same."""
    return request


def resource_request(job: SlurmJob, asked: Request, node_sizes_mb: Collection[int]) -> ResourceRequest:
    """What a job needs on each of its nodes, as Penstock sends it there; of a running job at least what it has.

    Args:
        job: Slurm's record.
        asked: the request of its script's header.
        node_sizes_mb: memory of the nodes, MB; empty: Slurm does not allocate memory.
    """
    nodes, gpus = max(job.node_count, len(job.nodes), 1), job.gpus_per_node or 0
    cpus, cpus_gpus = max(job.cpus_per_task, 1), 0
    if job.cpus_per_gpu:
        cpus, cpus_gpus = job.cpus_per_gpu, 1
    elif asked.tasks:
        cpus, cpus_gpus = asked.tasks * cpus, asked.gpus
    elif asked.cpus:
        cpus, cpus_gpus = asked.cpus, asked.node_gpus
    found = ResourceRequest(cpus=cpus, cpus_gpus=cpus_gpus, all_cpus=asked.whole_nodes or job.exclusive)
    has = job.cpus // nodes
    if job.state in HOLDING and has > found.cpus_on(gpus, has):  # Slurm allocates whole cores
        found = dataclasses.replace(found, cpus=has, cpus_gpus=gpus if cpus_gpus else 0)
    if not node_sizes_mb:
        return _one(found)
    memory_mb = job.memory_mb // nodes
    if asked.memory_mb:
        found = dataclasses.replace(found, memory_mb=asked.memory_mb, memory_gpus=asked.node_gpus)
    elif not job.least_memory_mb and memory_mb in node_sizes_mb:
        found = dataclasses.replace(found, all_memory=True)
    elif not job.least_memory_mb:  # --mem-per-gpu
        found = dataclasses.replace(found, memory_mb=memory_mb, memory_gpus=gpus)
    elif job.least_memory_mb == memory_mb:
        found = dataclasses.replace(found, memory_mb=memory_mb)
    else:  # --mem-per-cpu
        found = dataclasses.replace(found, memory_mb=job.least_memory_mb * found.cpus, memory_gpus=found.cpus_gpus)
    return _one(found)


def with_partition_limits(
    nodes: Iterable[Node],
    jobs: Iterable[SlurmJob],
    ours: Collection[JobId],
    most: Mapping[str, tuple[int | None, int | None]],
) -> tuple[Node, ...]:
    """The nodes with the CPUs that MaxCPUsPerNode lets all jobs of their partitions have together.

    Args:
        nodes: the managed nodes.
        jobs: all jobs that Slurm lists.
        ours: the managed jobs among them.
        most: the partitions that have such limits, as in `Scene`.
    """
    limits = {name: cpus for name, (cpus, _) in most.items() if cpus is not None}
    nodes = tuple(nodes)
    if not any(limits.keys() & set(node.partitions) for node in nodes):
        return nodes
    used = Counter[tuple[str, str]]()
    for job in jobs:
        if job.state in HOLDING and job.nodes and job.id not in ours and job.partition[0] in limits:
            used.update({(name, job.partition[0]): job.cpus // len(job.nodes) for name in job.nodes})

    def limited(node: Node) -> Node:
        if not all(name in limits for name in node.partitions):
            return node
        cpus = max(limits[name] for name in node.partitions)
        left = max(limits[name] - used[node.name, name] for name in node.partitions)
        free = min(node.cpus - node.cpus_others, left)
        return dataclasses.replace(node, cpus=min(node.cpus, cpus), cpus_others=max(min(node.cpus, cpus) - free, 0))

    return tuple(limited(node) for node in nodes)


def with_amounts(nodes: Sequence[Node], jobs: Collection[Job]) -> tuple[Node, ...]:
    """Mark the nodes where CPUs or memory may run out before the GPUs do.

    Args:
        nodes: the managed nodes.
        jobs: the managed jobs that a round may place or stop.
    """
    requests = list({id(job.request): job.request for job in jobs if job.request is not None}.values())
    if not requests:
        return tuple(nodes)
    all_cpus = any(each.all_cpus for each in requests)
    all_memory = any(each.all_memory for each in requests)
    cpus = max(_for_a_gpu(each.cpus, each.cpus_gpus) for each in requests)
    memory_mb = max(_for_a_gpu(each.memory_mb, each.memory_gpus) for each in requests)

    def scarce(node: Node) -> bool:
        gpus = node.gpus_for_us
        return gpus > 0 and (
            node.whole(cpus) * gpus > node.cpus_for_us
            or (all_cpus and node.cpus_others > 0)
            or (node.memory_mb > 0 and (all_memory or memory_mb * gpus > node.memory_mb_for_us))
        )

    names = {node.name for node in nodes if scarce(node)}
    if not names:
        return tuple(nodes)
    held = Counter[str]()
    for job in jobs:
        for share in job.allocation.shares if job.allocation is not None else ():
            held[share.node] += share.gpus

    def marked(node: Node) -> Node:
        if node.name not in names:
            return node
        found, gpus = dataclasses.replace(node, scarce=True), node.gpus_for_us
        within = next((n for n in range(gpus, 0, -1) if any(found.has_room_for(each, n) for each in requests)), 0)
        return dataclasses.replace(found, gpus_out_of_reach=max(gpus - max(within, held[node.name]), 0))

    return tuple(marked(node) for node in nodes)


def _for_a_gpu(amount: int, gpus: int) -> int:
    """The most of an amount that a job can have for each of its GPUs."""
    return -(-amount // gpus) if gpus else amount


class Narrowed:
    """Keeps jobs off the nodes that lack the CPUs or memory for them. Remembers its answers: an unchanged job stays the same."""

    def __init__(self) -> None:
        self._made: dict[JobId, tuple[Job, Job]] = {}

    def look(self, jobs: Mapping[JobId, Job], nodes: Iterable[Node]) -> dict[JobId, Job]:
        """The jobs for which some node lacks CPUs or memory, with node choices that exclude it."""
        scarce = [node for node in nodes if node.scarce]
        made, self._made = self._made, {}
        if not scarce:
            return {}
        short: dict[tuple[int, int], bool] = {}
        for job_id, job in jobs.items():
            if (request := job.request) is None:
                continue
            gpus = job.spec.min_gpus
            if (key := (id(request), gpus)) not in short:
                short[key] = not all(node.has_room_for(request, min(gpus, node.gpus)) for node in scarce)
            if not short[key]:
                continue
            before = made.get(job_id)
            if before is None or before[0] is not job:
                choice = dataclasses.replace(job.nodes or NodeChoice(), request=request, gpus=gpus)
                before = job, dataclasses.replace(job, nodes=choice)
            self._made[job_id] = before
        return {job_id: narrowed for job_id, (_, narrowed) in self._made.items()}
