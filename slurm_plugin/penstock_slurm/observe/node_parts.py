"""Hosts with GPUs of several types, such as whole GPUs and MIG devices: each type is a node of its own for a round.

A round allocates GPUs of one type, and gives a job no mixture. So Slurm's answers are changed right after they are read: in
place of such a host they have a node for each of its types (`part_of_node`), and a job's nodes are the parts that have its
GPUs. Each part has the CPUs and memory of the whole host, and what is used of them there counts in each. `steps.py` names the
host and the type when it sends a job there, because Slurm would start an untyped request with a mixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from penstock_scheduler.model import JobId, host_of, on_parts, part_of_node
from penstock_slurm.gateway import SlurmJob, SlurmNode, SlurmReservation
from penstock_slurm.jobs.states import HOLDING
from penstock_slurm.observe.records import Records

Named = TypeVar("Named", SlurmNode, SlurmReservation)


class NodeParts:
    """Divides the hosts. It remembers their types, because an answer may lack a host on which a job runs.

    Args:
        whole: a partition whose nodes are not divided: that of the cloud.
    """

    def __init__(self, whole: str = "") -> None:
        self._whole = whole
        self._types: dict[str, tuple[str, ...]] = {}
        self._made: dict[JobId, tuple[SlurmJob, SlurmJob]] = {}
        """Job -> its record and the divided one: an unchanged record is divided once, and stays the same object."""

    def divide(self, records: Records) -> Records:
        """The records with a node for each type of such a host."""
        for node in records.nodes:
            if len(node.gpus) > 1 and all(node.gpus) and self._whole not in node.partitions:
                self._types[node.name] = tuple(sorted(node.gpus))
            else:
                self._types.pop(node.name, None)
        if not self._types:
            self._made.clear()
            return records
        before, self._made = self._made, {}
        ended = {id(job): self._job(job) for job in records.ended if not self._types.keys().isdisjoint(job.nodes)}
        return dataclasses.replace(
            records,
            nodes=tuple(part for node in records.nodes for part in self._parts(node)),
            jobs=tuple(self._kept(job, before) for job in records.jobs),
            reservations=tuple(
                dataclasses.replace(each, nodes=tuple(self._names(each.nodes))) if each.nodes else each
                for each in records.reservations
            ),
            gone={job_id: job and self._job(job) for job_id, job in records.gone.items()},
            ended=tuple(ended.get(id(job), job) for job in records.ended),
        )

    def _parts(self, node: SlurmNode) -> Iterable[SlurmNode]:
        for gpu_type in self._types.get(node.name, ()):
            yield dataclasses.replace(
                node,
                name=part_of_node(node.name, gpu_type),
                gpus={gpu_type: node.gpus[gpu_type]},
                gpus_used={gpu_type: node.gpus_used.get(gpu_type, 0)},
            )
        if node.name not in self._types:
            yield node

    def _kept(self, job: SlurmJob, before: Mapping[JobId, tuple[SlurmJob, SlurmJob]]) -> SlurmJob:
        if not job.nodes and not job.required_nodes:
            return job
        made = before.get(job.id)
        if made is None or made[0] is not job:
            made = job, self._job(job)
        if made[1] is not job:
            self._made[job.id] = made
        return made[1]

    def _job(self, job: SlurmJob) -> SlurmJob:
        """A job with the parts that have its GPUs in place of the hosts. One without a type may have some of every part."""
        if self._types.keys().isdisjoint((*map(host_of, job.nodes), *map(host_of, job.required_nodes))):
            return job
        of = job.gpu_type
        return dataclasses.replace(
            job, nodes=tuple(self._names(job.nodes, of)), required_nodes=tuple(self._names(job.required_nodes, of))
        )

    def _names(self, hosts: Collection[str], gpu_type: str | None = None) -> Iterable[str]:
        for host in hosts:
            types = self._types.get(host)
            if types is None:
                yield host
            else:
                yield from (part_of_node(host, each) for each in types if gpu_type not in types or each == gpu_type)


def mixes(job: SlurmJob) -> bool:
    """Whether a job runs with GPUs of a host with several types, and Slurm does not show which types they have."""
    untyped = job.gpu_type is None and bool(job.gpus_per_node)
    return untyped and job.state in HOLDING and on_parts(job.nodes)
