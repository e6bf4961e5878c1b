"""Policies that are made of others: a policy for each partition, and a policy with stages.

Partitions with a policy of their own, such as `[policy.partitions.debug]` with `name = "fifo"`.

1. **Divide the cluster into parts.** Each partition with a policy of its own is a part; all other partitions are one more
   part. A job belongs to the part to which it was submitted. A node belongs to one part: if it is in several partitions with
   a policy, the one that the settings name first. Jobs of a part get the nodes of that part and no others.
2. **Decide the parts one after the other**: the named partitions in their order, then the rest. GPUs that a part allocates
   count against the limits of the later parts.
3. **Account for jobs outside their part**, placed there before the settings changed. Their GPUs count there as used by
   others. The job stays there until it ends: see `staying`.

Jobs of a partition with a policy of its own do not leave for the cloud. Jobs that are already there come back as usual.

`Staged` refines the plan of a policy. For example, with `[policy] name = "sia"` and `stages = ["synergy-tune"]`, `sia` allocates
the GPUs, and `synergy-tune` the CPUs and the memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from penstock_scheduler.api.ports import Policy, Stage
from penstock_scheduler.model import CloudState, Job, Node, Phase, Plan, Share, Snapshot
from penstock_scheduler.rounds.free_gpus import Allowance
from penstock_scheduler.rounds.policies.colocation import residents_only
from penstock_scheduler.rounds.policies.staying import Staying
from penstock_scheduler.rounds.policies.wrapper import remarks


class Staged:
    """A policy and its stages; see the module.

    Args:
        policy: the policy that decides.
        stages: the stages that refine its plan, in this order.
        name: the name that logs and stored rounds show.
        own: partitions with a policy of their own. A stage moves no job to nodes of another part.
    """

    def __init__(self, policy: Policy, stages: Sequence[Stage], name: str, own: Sequence[str] = ()) -> None:
        self._policy = policy
        self._stages = tuple(stages)
        self._own = tuple(own)
        self._shares = any(getattr(stage, "shares", False) for stage in stages)
        self._allocates = any(getattr(stage, "allocates", False) for stage in stages)
        self.name = name

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, refined by each stage."""
        if self._allocates:
            snapshot = without_requests(snapshot)
        plan = self._policy.decide(residents_only(snapshot) if self._shares else snapshot)
        seen = dataclasses.replace(snapshot, nodes=tuple(apart(node, self._own) for node in snapshot.nodes))
        for stage in self._stages:
            plan = stage.refine(seen, plan)
        return plan

    def remarks(self, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
        """The policy's remarks."""
        return remarks(self._policy, snapshot, plan, job)


def without_requests(snapshot: Snapshot) -> Snapshot:
    """The same snapshot as if all CPUs and memory came with the GPUs: a stage will allocate them, whatever jobs request."""
    if not any(node.scarce for node in snapshot.nodes):
        return snapshot
    nodes = tuple(_with_enough(node) for node in snapshot.nodes)
    jobs = (
        job
        if job.request is None
        else dataclasses.replace(job, request=None, nodes=job.nodes and job.nodes.without_request)
        for job in snapshot.jobs
    )
    return dataclasses.replace(snapshot, nodes=nodes, jobs=tuple(jobs))


def _with_enough(node: Node) -> Node:
    """The node as if its CPUs and memory sufficed, but for GPUs beside which there is not even one CPU."""
    beyond = max(node.gpus - node.gpus_others - node.cpus_for_us, 0)
    return dataclasses.replace(node, scarce=False, gpus_out_of_reach=min(node.gpus_out_of_reach, beyond))


OUTSIDE = "node {name} is in another part of the cluster, and what runs there stays"


class Partitioned:
    """Decides each part of the cluster by its own policy; see the module.

    Args:
        rest: the policy of all partitions that are not in `own`.
        own: partition -> its policy, in the order in which the partitions are decided.
        name: the name that logs and stored rounds show.
    """

    def __init__(self, rest: Policy, own: Mapping[str, Policy], name: str) -> None:
        self._rest: Policy = Staying(rest, OUTSIDE)
        self._own: dict[str, Policy] = {partition: Staying(policy, OUTSIDE) for partition, policy in own.items()}
        self.name = name

    def decide(self, snapshot: Snapshot) -> Plan:
        """The plans of all parts together."""
        part_of = {node.name: self._part(node.partitions) for node in snapshot.nodes}
        whole = Plan(snapshot.round)
        allowance = Allowance(snapshot.limits)
        for name, policy in (*self._own.items(), ("", self._rest)):
            part = self._snapshot(snapshot, name, part_of, allowance)
            plan = policy.decide(part)
            for job in part.jobs:
                if job.id in plan.assignments:
                    given = plan.assignments[job.id].placement
                    allowance.take(job, given.gpus, given.gpu_type)
            whole = _together(whole, plan)
        return whole

    def remarks(self, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
        """The remarks of the job's policy."""
        return remarks(self._own.get(self._part(job.partitions[:1]), self._rest), snapshot, plan, job)

    def _part(self, partitions: tuple[str, ...]) -> str:
        return next((name for name in self._own if name in partitions), "")

    def _snapshot(self, snapshot: Snapshot, name: str, part_of: Mapping[str, str], allowance: Allowance) -> Snapshot:
        """What the policy of one part sees."""
        jobs, held_by_others, asked = [], Counter[str](), set[str]()
        nodes_by_name = {node.name: node for node in snapshot.nodes}
        for job in snapshot.jobs:
            ours = self._part(job.partitions[:1]) == name
            for share in _shares_of(job):
                node = nodes_by_name.get(share.node)
                if not ours:
                    held_by_others[share.node] += share.gpus
                elif node is not None and part_of[share.node] != name and node.leave_request(job.reservation):
                    asked.add(share.node)
            if ours:
                inside = (name,) if name else tuple(each for each in job.partitions if each not in self._own)
                jobs.append(dataclasses.replace(job, partitions=inside))
        seen = tuple(
            dataclasses.replace(
                node,
                gpus_others=node.gpus_others + held_by_others[node.name],
                may_start=node.may_start and part_of[node.name] == name,
            )
            for node in snapshot.nodes
            if part_of[node.name] == name or node.name in asked
        )
        return dataclasses.replace(
            snapshot,
            nodes=seen,
            jobs=tuple(jobs),
            limits=allowance.left(),
            moves=None,  # the budget is the site's
            cloud=_closed(snapshot.cloud) if name else snapshot.cloud,
            unseen=tuple(job for job in snapshot.unseen if self._part(job.partitions[:1]) == name),
        )


def apart(node: Node, own: Collection[str]) -> Node:
    """The node as its part sees it: of its partitions with a policy of their own, it is only in the first one."""
    first = next((name for name in own if name in node.partitions), None)
    return node if first is None else dataclasses.replace(node, partitions=(first,))


def _closed(cloud: CloudState | None) -> CloudState | None:
    """The cloud without offers, so that no job leaves for it."""
    return cloud and dataclasses.replace(cloud, offers=(), by_default=False, words={}, closed=())


def _shares_of(job: Job) -> tuple[Share, ...]:
    """Shares that a job holds or is about to."""
    if job.phase is Phase.QUEUED or job.allocation is None:
        return ()
    return job.allocation.shares


def _together(one: Plan, other: Plan) -> Plan:
    return dataclasses.replace(
        other,
        assignments=one.assignments | other.assignments,
        waiting=one.waiting | other.waiting,
        bursts=one.bursts | other.bursts,
        recalls=one.recalls | other.recalls,
        stops=one.stops | other.stops,
        shared=(*one.shared, *other.shared),
        incumbent=one.incumbent | other.incumbent,
        solve=other.solve or one.solve,
        prices=one.prices | other.prices,
    )
