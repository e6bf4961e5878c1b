"""Running jobs that stay whatever the policy would do; every policy is wrapped in this.

A job that has not shown that it can save its state stays, because a stop would lose all its work. A node that does not respond
or has not registered yet, a partition that is down, a node that the cluster has not named: nothing new starts there, and what
runs there stays. Such a job is taken out of the policy's snapshot before it decides, and put back into its plan as kept. The
policy never sees the job, so it cannot stop, resize or move it. The plan then says why each job is stopped that it does stop;
see `stops`.

1. A running job that has not shown that it can save stays, also on a node that asks it to leave. Where jobs can share GPUs,
   the policy sees it nevertheless, because a suspended job loses nothing. If the plan stops such a job, or any job for no
   reason that `stops` knows, or one that makes no progress where it runs by a model that must be wrong, the policy decides
   again without those jobs.
2. A drain moves jobs to other GPUs. A job that would get none stays on the drained node, where nothing else may start, until a
   round finds a place for it. The policy decides again with that job where it is.
3. A job whose new run has not reported its first step yet is not moved by a drain, for its own gain, or for that of another
   running job: a second restart would follow the first. A start that takes too long is not waited for.
4. A partition that may start nothing is taken off its nodes, so that no policy places a job through it.
5. A running job stays if nothing may start on one of its nodes or in its partition, or if its partitions, its reservation or
   its node choice no longer have that node, unless one of its nodes asks it to leave.
   A group of jobs that share GPUs stays as a whole.
6. What these jobs hold counts: their GPUs, CPUs and memory as held by others, and their GPUs against the limits.
7. A job that waits and that no open partition takes gets a reason that says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType

from penstock_scheduler.api.ports import Policy
from penstock_scheduler.model import (
    Job,
    JobId,
    Node,
    Pack,
    Partition,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    ResourceRequest,
    Share,
    SharedGpus,
    SharingState,
    Snapshot,
    StopCode,
)
from penstock_scheduler.people.units import clock
from penstock_scheduler.rounds.free_gpus import Allowance, is_open
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.calm import held_back
from penstock_scheduler.rounds.policies.equals import settled
from penstock_scheduler.rounds.policies.stops import BY_REASON, stopped, with_reasons
from penstock_scheduler.rounds.policies.wrapper import Wrapper

CANNOT_SAVE = "it has not shown that it can save, so that a stop would lose all its work"

NO_REASON = "nothing is gained by stopping it"

CAN_WAIT = (StopCode.DRAIN, StopCode.PENSTOCK_DRAIN, StopCode.GAIN)
"""Reasons for stops without a deadline. Those in favour of a running job can wait, too."""

NO_SPEED = "its model gives no progress there, so that nothing tells what a stop would cost"

STARTS = "its new run has not reported its first step; this waits for that, at most until {until}"

MISSING = "the cluster does not tell about node {name} now, and what runs there stays"


class Staying(Wrapper):
    """See the module.

    Args:
        policy: decides about the other jobs.
        missing: why a job stays whose node is not in the snapshot; `{name}` is the node.
    """

    def __init__(self, policy: Policy, missing: str = MISSING) -> None:
        super().__init__(policy)
        self._missing = missing

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, with the jobs that stay."""
        closed = {each.name: each for each in snapshot.partitions if not each.may_start}
        unsaved = {job.id: CANNOT_SAVE for job in snapshot.jobs if _loses_all(snapshot, job)}
        stay = unsaved if snapshot.sharing is None else {}
        while True:
            plan = self._decide(snapshot, closed, stay)
            plan, stops = _settled(snapshot, plan)
            plan = with_reasons(snapshot, plan, stops)
            more = {
                job.id: unsaved.get(job.id, NO_REASON)
                for job in stops
                if job.id not in stay and (job.id in unsaved or job.id not in plan.stops)
            }
            more |= {job.id: NO_SPEED for job in stops if job.id not in stay | more and _is_a_guess(job, plan)}
            more |= {job: why for job, why in _nowhere_to_go(plan).items() if job not in stay}
            more |= {job: why for job, why in _starts(snapshot, plan).items() if job not in stay}
            more = more or held_back(snapshot, plan, stops)
            if more.keys() <= stay.keys():
                return plan
            stay = more | stay

    def _decide(self, snapshot: Snapshot, closed: Mapping[str, Partition], stay: Mapping[JobId, str]) -> Plan:
        """The plan if the jobs in `stay` stay, for these reasons. It does not say yet why it stops others."""
        why = staying(snapshot, closed, stay, self._missing)
        if not closed and not why and snapshot.kept is None:
            return self._policy.decide(snapshot)
        groups = _groups(snapshot.sharing, snapshot.jobs, why)
        placements = {job.id: where for job in snapshot.jobs if job.id in why and (where := _place(job)) is not None}
        plan = self._policy.decide(without(snapshot, closed, placements, groups))
        waiting = {
            job.id: _waits_for_partition(job, closed) or plan.waiting[job.id]
            for job in snapshot.jobs
            if job.id in plan.waiting
        }
        common.look_up(snapshot, ((job, where.configuration) for job, where in placements.items()))
        kept = {
            job.id: common.assign(
                job,
                placements[job.id],
                Reason(ReasonCode.KEPT, f"keeps {placements[job.id].configuration}: {why[job.id]}"),
                snapshot,
            )
            for job in snapshot.jobs
            if job.id in placements
        }
        together = plan.assignments | kept
        return dataclasses.replace(
            plan,
            assignments={job.id: together[job.id] for job in snapshot.jobs if job.id in together},
            waiting=waiting,
            shared=(*groups, *plan.shared),
        )


def _settled(snapshot: Snapshot, plan: Plan) -> tuple[Plan, tuple[Job, ...]]:
    """The plan after equal jobs have exchanged what they get, and the running jobs that it stops."""
    stops = stopped(snapshot, plan)
    calmer = settled(snapshot, plan, stops)
    return (plan, stops) if calmer is plan else (calmer, stopped(snapshot, calmer))


def _nowhere_to_go(plan: Plan) -> dict[JobId, str]:
    """The running jobs that a drain would stop and that get nothing instead -> why they stay."""
    return {
        job: f"{stop.text}, but there is no other place for the job now"
        for job, stop in plan.stops.items()
        if stop.code in (StopCode.DRAIN, StopCode.PENSTOCK_DRAIN)
        and (reason := plan.waiting.get(job)) is not None
        and reason.code not in BY_REASON
    }


def _starts(snapshot: Snapshot, plan: Plan) -> dict[JobId, str]:
    """The running jobs whose new run has not begun and that the plan moves, although that can wait -> why they stay."""
    running = {job.id for job in snapshot.jobs if job.running_on is not None}
    return {
        job: f"{stop.text}, but {STARTS.format(until=clock(until_s))}"
        for job, stop in plan.stops.items()
        if (until_s := snapshot.facts[job].starts_until_s) > snapshot.time_s
        and (stop.code in CAN_WAIT or stop.makes_room_for in running)
    }


def _is_a_guess(job: Job, plan: Plan) -> bool:
    """Whether the policy stops the job because its model is wrong: by it, the job makes no progress where it runs."""
    stop = plan.stops[job.id]
    by_model = job.spec.goodput_table is None and stop.code in (StopCode.GAIN, StopCode.PREEMPTED)
    return by_model and stop.goodput_before == 0


def _loses_all(snapshot: Snapshot, job: Job) -> bool:
    """Whether a stop would lose all work of a job that may be stopped."""
    return job.running_on is not None and job.movable and not snapshot.facts[job.id].saves


def staying(
    snapshot: Snapshot, closed: Mapping[str, Partition], stay: Mapping[JobId, str], missing: str = MISSING
) -> dict[JobId, str]:
    """Job -> why it stays.

    Args:
        snapshot: the round's.
        closed: partitions in which nothing may start.
        stay: running jobs that stay whatever the cluster shows -> why.
        missing: see `Staying`.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    away = {run.job for run in snapshot.cloud.runs} if snapshot.cloud is not None else ()
    found: dict[JobId, str] = {}
    for job in snapshot.jobs:
        if job.running_on is None or job.id in away:
            continue
        why = stay.get(job.id)
        if why is None:
            why = _as_shown(snapshot, job, job.running_on, nodes, closed, missing)
        if why is not None:
            found[job.id] = why
    for group in snapshot.sharing.groups if snapshot.sharing is not None and found else ():
        first = next((found[job] for job in group.jobs if job in found), None)
        if first is not None:
            ids = set(group.jobs)
            together = (job.id for job in snapshot.jobs if job.id in ids and _place(job) is not None)
            why = f"it shares GPUs with a job that stays: {first}" if not stay.keys().isdisjoint(ids) else first
            found |= {job: found.get(job, why) for job in together}
    return found


def _as_shown(
    snapshot: Snapshot,
    job: Job,
    held: Placement,
    nodes: Mapping[str, Node],
    closed: Mapping[str, Partition],
    missing: str,
) -> str | None:
    """Why a running job stays, by what the cluster shows of its nodes and its partition; None: it may move."""
    present = [nodes[name] for name in held.nodes if name in nodes]
    asked = any(node.leave_request(job.reservation) is not None for node in present)
    if snapshot.kept is not None and (snapshot.kept.everything or not asked):
        return snapshot.kept.why
    if asked:
        return None
    for share in reversed(held.shares):
        if (why := _closed_to(job, share, nodes.get(share.node), missing)) is not None:
            return why
    if held.partition in closed:
        return f"partition {held.partition} is {_state(closed[held.partition])}, and what runs in it stays"
    return None


def _closed_to(job: Job, share: Share, node: Node | None, missing: str) -> str | None:
    """Why nothing may start on this node of the job; None: it may."""
    name = share.node
    if node is None:
        return missing.format(name=name)
    if not is_open(node, job):
        return f"node {name} is no longer open to the job, and what runs there stays"
    if node.gpus < share.gpus:
        return f"node {name} shows only {node.gpus} GPUs now, and what runs there stays"
    if not node.may_start:
        return f"node {name} takes no new work ({node.state or 'not in service'}), and what runs there stays"
    return None


def _place(job: Job) -> Placement | None:
    """Where a job is or is going; None: it waits."""
    return job.running_on or job.bound_for


def _groups(state: SharingState | None, jobs: Iterable[Job], staying: Container[JobId]) -> tuple[SharedGpus, ...]:
    """The groups of jobs that stay, as they are now, without the jobs that have left them."""
    present = {job.id for job in jobs if job.id in staying}
    found = []
    for group in state.groups if state is not None else ():
        packs = tuple(pack for each in group.packs if (pack := _only(each, present)) is not None)
        if packs:
            found.append(dataclasses.replace(group, packs=packs))
    return tuple(found)


def _only(pack: Pack, jobs: Container[JobId]) -> Pack | None:
    """The pack with these of its jobs; None: it has none of them."""
    left = tuple(job for job in pack.jobs if job in jobs)
    if left == pack.jobs or not left:
        return pack if left else None
    limits = tuple(pack.limit(job) for job in left) if pack.limits else ()
    guaranteed = pack.guaranteed if pack.guaranteed in left else None
    return dataclasses.replace(pack, jobs=left, limits=limits, guaranteed=guaranteed)


def without(
    snapshot: Snapshot,
    closed: Mapping[str, Partition],
    placements: Mapping[JobId, Placement],
    groups: tuple[SharedGpus, ...],
    aside: Mapping[str, int] = MappingProxyType({}),
) -> Snapshot:
    """What the policy sees: without the jobs that have these placements, and without closed partitions.

    The GPUs of these jobs, and those that are kept free (`aside`, by node), count as held by others.
    """
    grouped = {job for group in groups for job in group.jobs}
    gpus = dict(aside)
    beside: dict[str, list[tuple[Share, ResourceRequest | None]]] = {}
    for group in groups:
        gpus[group.node] = gpus.get(group.node, 0) + group.gpus
    allowance = Allowance(snapshot.limits)
    for job in snapshot.jobs:
        if (where := placements.get(job.id)) is None:
            continue
        allowance.take(job, where.gpus, where.gpu_type)
        for share in where.shares:
            gpus[share.node] = gpus.get(share.node, 0) + (0 if job.id in grouped else share.gpus)
            beside.setdefault(share.node, []).append((share, job.request))

    def seen(node: Node) -> Node:
        if node.name not in gpus and closed.keys().isdisjoint(node.partitions):
            return node  # the same object, which policies recognise from round to round
        amounts = [share.amounts(request, node) for share, request in beside.get(node.name, ())]
        return dataclasses.replace(
            node,
            partitions=tuple(name for name in node.partitions if name not in closed),
            gpus_others=node.gpus_others + gpus.get(node.name, 0),
            cpus_others=node.cpus_others + sum(cpus for cpus, _ in amounts),
            memory_others_mb=node.memory_others_mb + sum(memory_mb for _, memory_mb in amounts),
        )

    sharing = snapshot.sharing
    if sharing is not None and groups:
        left = tuple(group for group in sharing.groups if grouped.isdisjoint(group.jobs))
        sharing = dataclasses.replace(sharing, groups=left)
    return dataclasses.replace(
        snapshot,
        nodes=tuple(seen(node) for node in snapshot.nodes),
        jobs=tuple(_reachable(job, closed) for job in snapshot.jobs if job.id not in placements),
        limits=allowance.left() if placements else snapshot.limits,
        sharing=sharing,
        partitions=(),
        kept=None,
        unseen=(*snapshot.unseen, *(job for job in snapshot.jobs if job.id in placements)),
    )


def _reachable(job: Job, closed: Mapping[str, Partition]) -> Job:
    """The job; one that is about to start in a closed partition is sent nowhere, so that it can start elsewhere."""
    where = job.target or job.allocation
    if job.phase in (Phase.QUEUED, Phase.STARTING) and where is not None and where.partition in closed:
        return dataclasses.replace(job, phase=Phase.QUEUED, target=None, allocation=None)
    return job


def _waits_for_partition(job: Job, closed: Mapping[str, Partition]) -> Reason | None:
    """The reason of a job that no open partition takes; None: there is one."""
    if not job.partitions or not all(name in closed for name in job.partitions):
        return None
    states = ", ".join(f"partition {name} is {_state(closed[name])}" for name in job.partitions)
    text = f"{states}: nothing starts there until an admin sets it to UP"
    return Reason(ReasonCode.WAITING_PARTITION, text, common.smallest_need(job))


def _state(partition: Partition) -> str:
    return partition.state or "closed"
