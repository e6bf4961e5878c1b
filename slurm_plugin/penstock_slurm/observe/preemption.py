"""Which plain jobs Slurm preempts for a managed job, so that a round may place it on their GPUs.

Slurm itself stops them when it schedules the job, by `PreemptType=preempt/partition_prio` or `preempt/qos`. Only plain jobs
count: which managed job makes room for another one is the policy's decision. Pure, as `view.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from penstock_scheduler.model import Job, Node, Outranks, Phase, Preemptible, Share
from penstock_slurm.gateway import SlurmFeatures, SlurmJob, SlurmPartition, SlurmQos
from penstock_slurm.jobs.states import HOLDING, LEAVING

KILL_S = 60.0
"""How long a preempted job may take to end after its grace time (Slurm's default KillWait, an epilog), s."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preemption:
    """Slurm's rules of preemption, as last read."""

    features: SlurmFeatures = dataclasses.field(default_factory=SlurmFeatures)
    partitions: Mapping[str, SlurmPartition] = dataclasses.field(default_factory=dict)
    """Empty unless partitions decide."""
    qos: Mapping[str, SlurmQos] = dataclasses.field(default_factory=dict)
    """Empty unless QOS decide."""

    @classmethod
    def of(
        cls, features: SlurmFeatures, partitions: Mapping[str, SlurmPartition], qos: Mapping[str, SlurmQos]
    ) -> Preemption:
        """Those that this Slurm has enabled."""
        by = features.preempts_by
        return cls(features, partitions if by == "partition" else {}, qos if by == "qos" else {})

    def rank(self, job: SlurmJob) -> str:
        """The partition or QOS of a running plain job that decides for which others Slurm preempts it."""
        return job.qos if self.qos else job.partition[0] if job.partition else ""

    def outranked(self, job: SlurmJob, partitions: Iterable[str]) -> Outranks | None:
        """The jobs that Slurm preempts for this one.

        Args:
            job: a managed job.
            partitions: those to which it was submitted and that admit it. Others that it may use give it no rights.
        """
        for partition in partitions:
            if ranks := self._below(job.qos, partition):
                grace_s = max(self.qos[each].grace_s if self.qos else self.partitions[each].grace_s for each in ranks)
                return Outranks(ranks, partition, grace_s + KILL_S)
        return None

    def _below(self, qos: str, partition: str) -> frozenset[str]:
        if partition in self.partitions:
            tier = self.partitions[partition].tier
            return frozenset(name for name, each in self.partitions.items() if each.tier < tier and each.frees)
        if qos not in self.qos:
            return frozenset()
        default = self.features.preempted_frees
        return frozenset(
            name
            for name in self.qos[qos].preempts & self.qos.keys()
            if (default if (frees := self.qos[name].frees) is None else frees)
        )

    def exempt(self, job: SlurmJob, now_s: float) -> bool:
        """Whether Slurm does not preempt a plain job yet."""
        qos = self.qos.get(job.qos)
        exempt_s = self.features.preempt_exempt_s
        if qos is not None and qos.exempt_s is not None:
            exempt_s = qos.exempt_s
        return job.start_s is None or now_s - job.start_s < exempt_s


def with_preemptible(
    nodes: tuple[Node, ...],
    plain: Iterable[SlurmJob],
    managed: Iterable[Job],
    rules: Preemption,
    now_s: float,
) -> tuple[Node, ...]:
    """The nodes, with what jobs may have there that outrank the plain jobs.

    While Slurm stops plain jobs for a job that was sent to a node, that job's GPUs, CPUs and memory do not count as theirs, and
    no other job is offered any there.

    Args:
        nodes: the managed nodes.
        plain: jobs that Penstock does not manage.
        managed: the managed jobs.
        rules: Slurm's.
        now_s: s since 1970.
    """
    if not (rules.partitions or rules.qos):
        return nodes
    held: dict[str, dict[str, Counter[str]]] = {}
    for job in plain:
        if job.state in HOLDING | LEAVING and not rules.exempt(job, now_s):
            count = max(len(job.nodes), 1)
            amounts = {"gpus": job.gpus_per_node or 0, "cpus": job.cpus // count, "memory_mb": job.memory_mb // count}
            for name in job.nodes:
                held.setdefault(name, {}).setdefault(rules.rank(job), Counter()).update(amounts)
    if not held:
        return nodes
    ours, starting = Counter[str](), dict[str, list[tuple[Job, Share]]]()
    for each in managed:
        for share in each.allocation.shares if each.allocation is not None else ():
            ours[share.node] += share.gpus
            if each.phase is Phase.STARTING and each.outranks is not None:
                starting.setdefault(share.node, []).append((each, share))

    def seen(node: Node) -> Node:
        if node.name not in held:
            return node
        if ours[node.name] + node.gpus_others > node.gpus and node.name in starting:
            return _making_room(node, held[node.name], ours[node.name], starting[node.name])
        ranks = tuple(
            Preemptible(rank, amounts["gpus"], amounts["cpus"], amounts["memory_mb"])
            for rank, amounts in sorted(held[node.name].items())
        )
        return dataclasses.replace(node, preemptible=ranks)

    return tuple(map(seen, nodes))


def _making_room(
    node: Node, held: Mapping[str, Counter[str]], ours: int, starting: Iterable[tuple[Job, Share]]
) -> Node:
    """A node on which Slurm stops plain jobs for others. `held`: by rank; `ours`: GPUs that managed jobs hold or will have."""
    gpus, cpus, memory_mb = node.gpus_others, node.cpus_others, node.memory_others_mb
    for job, share in starting:
        ranks = job.outranks.ranks if job.outranks is not None else ()
        theirs = sum((held[rank] for rank in ranks if rank in held), Counter[str]())
        needs_cpus, needs_mb = share.amounts(job.request, node)
        gpus -= max(min(theirs["gpus"], share.gpus, ours + gpus - node.gpus), 0)
        cpus -= min(theirs["cpus"], needs_cpus)
        memory_mb -= min(theirs["memory_mb"], needs_mb)
    return dataclasses.replace(
        node, gpus_others=max(gpus, 0), cpus_others=max(cpus, 0), memory_others_mb=max(memory_mb, 0)
    )
