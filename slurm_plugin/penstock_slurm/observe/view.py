"""Slurm's records -> what the scheduler sees. Pure: it asks neither Slurm nor the spool, and keeps nothing.

`job_view` decides what a managed job is to the scheduler, `unseen_job` what a refused one is that runs, and `node_views` what the
nodes are.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from penstock_profiles.wire import ControlMessage, Started
from penstock_scheduler.model import (
    EndedRun,
    Job,
    JobId,
    JobSpec,
    LeaveCause,
    LeaveRequest,
    Node,
    NodeChoice,
    Partition,
    Phase,
    Placement,
    ResourceRequest,
    Share,
    host_of,
)
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.gateway import SlurmJob, SlurmNode, SlurmPartition, SlurmRun
from penstock_slurm.gateway.base import ENDED, WAITING
from penstock_slurm.gateway.node_states import UNLISTED, node_facts, partition_facts
from penstock_slurm.jobs import time_limits
from penstock_slurm.jobs.notes import kept_by_begin, least_tmp_mb, node_choice, request
from penstock_slurm.jobs.states import HOLDING, LEAVING, Facts, State, state
from penstock_slurm.observe import boots
from penstock_slurm.observe.amounts import resource_request
from penstock_slurm.observe.preemption import Preemption
from penstock_slurm.observe.site import SlurmRules
from penstock_slurm.observe.sorting import job_spec

UNTYPED = "gpu"
"""The GPU type of nodes whose GRES names none."""

CLOCKS_DIFFER_S = 60.0
"""Largest expected difference between the clocks of Slurm and of the daemon."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """What the spool has of a job."""

    control: ControlMessage | None = None
    """The newest control message."""
    present: Started | None = None
    """What the present run reported when it began; None: it has not reported yet."""
    epoch: int = 0
    """Epoch of the newest run that has reported its beginning; 0: none has."""
    saved: bool = False
    """Whether the run has answered the request of the control message."""
    failure: str = ""
    """Why it could not save on that request, if it has said that."""
    failures: int = 0
    """Requests in a row on which it could not."""

    @property
    def answers(self) -> bool:
        """Whether the run can be asked to save: it reads requests, or does so on a signal."""
        return self.present is not None and (self.present.answers_requests or self.present.usr2 is not None)


@dataclass(frozen=True, slots=True)
class Scene:
    """What an observation knows beside the record of a single job."""

    now_s: float
    managed: tuple[str, ...]
    """Managed partitions, in the order of the settings."""
    up: tuple[str, ...]
    """Those of them that are up."""
    types: Mapping[str, str]
    """GPU type of each node."""
    tmp_mb: Mapping[str, int] = field(default_factory=dict)
    """Temporary disk of each node (TmpDisk), MB."""
    silent: frozenset[str] = frozenset()
    """Nodes that do not respond."""
    max_time_s: Mapping[str, float | None] = field(default_factory=dict)
    """MaxTime of each partition; None: it has none."""
    whole_nodes: frozenset[str] = frozenset()
    """Partitions whose jobs have whole nodes. Only jobs that count so are sent there, or that were submitted there."""
    most: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    """Most CPUs and MB of a job on a node of each partition that has such limits."""
    node_sizes_mb: frozenset[int] = frozenset()
    """Memory of the nodes, MB; empty: Slurm does not allocate memory."""
    rules: SlurmRules = field(default_factory=SlurmRules)
    stopped_s: Mapping[tuple[JobId, int], float] = field(default_factory=dict)
    """(job, restarts of the run) -> when Penstock stopped it."""
    without_gpus: Collection[JobId] = ()
    """Jobs that Slurm has started without their GPUs."""
    misplaced: Collection[JobId] = ()
    """Jobs that share GPUs and have to restart."""

    preemption: Preemption = field(default_factory=Preemption)
    boot_s: Mapping[str, float] = field(default_factory=dict)
    """Nodes that are powered down or boot -> how long they take until a job can run there, s."""
    booting: Collection[JobId] = ()
    """Jobs that Slurm has given nodes which boot. They begin once these are ready."""

    @property
    def site(self) -> object:
        """The facts that every job depends on: others than before if something that concerns the whole site has changed."""
        return (
            *(self.max_time_s, self.whole_nodes, self.rules, self.types, self.most, self.node_sizes_mb),
            self.preemption,
        )

    def concerns(self, job: SlurmJob) -> bool:
        """Whether something is the matter with a running job that its own record does not show."""
        return job.id in self.without_gpus or job.id in self.misplaced or not self.silent.isdisjoint(job.nodes)


def left_behind(job: SlurmJob, present: Started | None) -> tuple[str, ...]:
    """Nodes that a job's run has left in favour of others, and that the job still holds. Its first node is never one."""
    if present is None or present.restarts != job.restarts or job.state != "RUNNING":
        return ()
    return tuple(node for node in job.nodes[1:] if node in present.left_nodes)


def job_facts(job: SlurmJob, spooled: Spooled, scene: Scene) -> Facts:
    """What is known of a job beside Slurm's record of it."""
    return Facts(
        asked=spooled.control is not None and spooled.control.request is not None,
        answers=spooled.answers,
        saved=spooled.saved,
        kept_back=kept_by_begin(job, scene.now_s),
        silent=bool(scene.silent & set(job.nodes)),
        boots=job.id in scene.booting,
    )


def job_view(job: SlurmJob, spec: JobSpec, spooled: Spooled, scene: Scene) -> tuple[State, Job | None]:
    """A job's state, and the job as the scheduler sees it; None: it is ending for good."""
    control, facts = spooled.control, job_facts(job, spooled, scene)
    now = state(job, facts)
    if now is State.DONE or (job.state in LEAVING and not facts.asked):
        return now, None
    phase, allocation = _phase(job, now, facts, control, scene)
    mine = _submitted_to(job, control, scene)
    needs = resource_request(job, request(job), scene.node_sizes_mb)
    if job.licenses:
        spec = spec.model_copy(update={"preemptible": False})
    return now, Job(
        id=job.id,
        name=job.name,
        user=job.user,
        spec=spec,
        partitions=(partitions := _partitions(job, mine, scene, needs, spec.min_gpus)),
        phase=phase,
        submit_s=_submitted_s(job, control),
        restarts=job.restarts,
        allocation=_granted(allocation, control),
        leaving=job.state in LEAVING,
        started_s=job.start_s if job.state in HOLDING and phase is not Phase.STARTING else None,
        suspended_s=job.suspended_s if job.state in HOLDING else 0.0,
        stopped_s=_stopped_s(job, scene),
        requeued_s=job.submit_s if job.restarts else None,
        pauses_s=control.pauses_s if control is not None else (),
        time_limit_s=job.time_limit_s,
        account=job.account,
        qos=job.qos,
        reservation=job.reservation,
        nodes=_node_choice(job, control, scene),
        request=needs,
        outranks=scene.preemption.outranked(job, [name for name in partitions if name in mine]),
        weight=scene.rules.weight(job),
    )


class Views:
    """Makes the views of jobs, and remembers them: a view whose facts are all as in the last observation is not made again."""

    def __init__(self) -> None:
        self._site: tuple[object, ...] = ()
        self._made: dict[JobId, tuple[tuple[object, ...], tuple[object, ...], tuple[State, Job | None]]] = {}

    def begin(self, scene: Scene) -> None:
        """A new observation. If something has changed that every view depends on, all are made again."""
        site = (
            scene.managed,
            scene.max_time_s,
            scene.whole_nodes,
            scene.types,
            scene.tmp_mb,
            scene.most,
            scene.node_sizes_mb,
            scene.rules,
            scene.preemption,
        )
        if site != self._site:
            self._site, self._made = site, {}

    def of(self, job: SlurmJob, spec: JobSpec, spooled: Spooled, scene: Scene) -> tuple[State, Job | None]:
        """See `job_view`."""
        records = job, spec, spooled.control, spooled.present
        facts = (
            spooled.epoch,
            spooled.saved,
            job.begins_later(scene.now_s),
            not scene.silent.isdisjoint(job.nodes),
            scene.stopped_s.get((job.id, job.restarts - 1)),
            job.id in scene.without_gpus,
            job.id in scene.misplaced,
            job.id in scene.booting,
        )
        made = self._made.get(job.id)
        if made is not None and made[1] == facts and all(map(operator.is_, made[0], records)):
            return made[2]
        found = job_view(job, spec, spooled, scene)
        self._made[job.id] = records, facts, found
        return found

    def forget(self, keep: Collection[JobId]) -> None:
        """Forget all jobs but these."""
        if len(self._made) > len(keep):
            self._made = {job: made for job, made in self._made.items() if job in keep}


def _partitions(
    job: SlurmJob, mine: tuple[str, ...], scene: Scene, needs: ResourceRequest, gpus: int
) -> tuple[str, ...]:
    """Managed partitions in which a job may run, first those to which it was submitted (`mine`).

    Slurm does not start a job in a partition whose MaxTime is shorter than the job's time limit, or whose MaxCPUsPerNode or
    MaxMemPerNode is less than the job `needs` with its fewest `gpus`. If no partition to which it was submitted admits it, Slurm
    says so when the job is sent to one of them.
    """
    shut = scene.whole_nodes if scene.whole_nodes and not request(job).whole_nodes else frozenset[str]()
    others = [name for name in scene.managed if name not in mine and name not in shut]

    def admits(name: str) -> bool:
        cpus, memory_mb = scene.most.get(name, (None, None))
        return (
            time_limits.admits(scene.max_time_s.get(name), job.time_limit_s)
            and (cpus is None or needs.cpus_on(gpus, 1) <= cpus)
            and (memory_mb is None or needs.memory_mb_on(gpus, 1) <= memory_mb)
        )

    return (*(list(filter(admits, mine)) or mine), *filter(admits, others))


def _submitted_to(job: SlurmJob, control: ControlMessage | None, scene: Scene) -> tuple[str, ...]:
    """Managed partitions to which a job was submitted."""
    told = control.submitted_to if control is not None else None
    return tuple(name for name in ((told,) if told in scene.managed else job.partition) if name in scene.managed)


def unseen_job(job: SlurmJob, control: ControlMessage, scene: Scene) -> Job | None:
    """A refused job that runs where Penstock sent it, with what it holds, if that is a GPU."""
    held = placement(job, job.nodes, scene.types, control)
    if not held.gpus or job.start_s is None:
        return None
    return Job(
        id=job.id,
        name=job.name,
        user=job.user,
        spec=JobSpec(min_gpus=held.gpus, max_gpus=held.gpus, preemptible=False),
        partitions=_submitted_to(job, control, scene),
        phase=Phase.RUNNING,
        submit_s=_submitted_s(job, control),
        restarts=job.restarts,
        allocation=held,
        started_s=job.start_s,
        suspended_s=job.suspended_s,
        account=job.account,
        qos=job.qos,
    )


def _phase(
    job: SlurmJob, now: State, facts: Facts, control: ControlMessage | None, scene: Scene
) -> tuple[Phase, Placement | None]:
    """Where the job is between the queue and its GPUs, and what it holds."""
    if now is State.HELD:
        return Phase.QUEUED, None
    if now is State.PLACING and facts.boots:
        return Phase.STARTING, placement(job, job.nodes, scene.types, control)
    if now is State.PLACING:
        # A job that Slurm or its user has requeued waits for a begin time, two minutes by default: send it again.
        later = job.reason == "BeginTime" and job.begins_later(scene.now_s)
        sent = job.required_nodes and not later
        return Phase.STARTING, placement(job, job.required_nodes, scene.types, control) if sent else None
    lacks = job.id in scene.without_gpus
    leaves = facts.asked or lacks or job.id in scene.misplaced
    held = None if lacks else placement(job, job.nodes, scene.types, control)
    return Phase.STOPPING if leaves else Phase.RUNNING, held


def placement(
    job: SlurmJob, nodes: tuple[str, ...], types: Mapping[str, str], control: ControlMessage | None = None
) -> Placement:
    """A job's GPUs on these nodes. Those of a job that shares are in its control message only."""
    gpus = job.gpus_per_node or 0
    if job.gpus_per_node is None and control is not None and control.shares:
        gpus = (control.gpus or 0) // (control.nodes or 1)
    shares = tuple(Share(name, gpus) for name in sorted(nodes))
    return Placement(types.get(nodes[0], "") if nodes else "", job.partition[0] if job.partition else "", shares)


def _granted(held: Placement | None, control: ControlMessage | None) -> Placement | None:
    """What a job holds, with the CPUs and memory that Penstock allocated, if it did."""
    if held is None or control is None or control.cpus is None or control.nodes != len(held.shares):
        return held
    cpus, memory_mb = control.cpus, control.memory_mb or 0
    shares = tuple(dataclasses.replace(share, cpus=cpus, memory_mb=memory_mb) for share in held.shares)
    return dataclasses.replace(held, shares=shares)


def _node_choice(job: SlurmJob, control: ControlMessage | None, scene: Scene) -> NodeChoice | None:
    """The nodes that the job's user allows, that have its temporary disk, and to which Slurm can still send it."""
    chosen, tmp_mb = node_choice(job), least_tmp_mb(job)
    asked = control.asked_types if control is not None else ()
    if not asked and not tmp_mb:
        return chosen
    having = [{host_of(name) for name, of in scene.types.items() if of == gpu_type} for gpu_type in asked]
    large = {host_of(name) for name in scene.types if scene.tmp_mb.get(name, 0) >= tmp_mb}
    able = frozenset(large.intersection(*having))
    needs = [f"{tmp_mb} MB of temporary disk"] if tmp_mb else []
    needs += [f"GPUs of the types that it has asked Slurm for: {' and '.join(asked)}"] if asked else []
    return dataclasses.replace(chosen or NodeChoice(), able=able, able_for=", ".join(needs))


def _submitted_s(job: SlurmJob, control: ControlMessage | None) -> float:
    """When the job was first submitted. Slurm changes its SubmitTime at each requeue, so the spool keeps the first one."""
    kept = control.submitted_s if control is not None else None
    return job.submit_s if kept is None else min(kept, job.submit_s)


def _stopped_s(job: SlurmJob, scene: Scene) -> float | None:
    """When the job's last run ended. Slurm tells that of a job that is over, but not of a requeued job."""
    if job.state in LEAVING | ENDED and (end_s := _past_end_s(job, scene)) is not None:
        return end_s
    return scene.stopped_s.get((job.id, job.restarts - 1))


def _past_end_s(job: SlurmJob, scene: Scene) -> float | None:
    """When Slurm says that the job ended, if that has happened.

    While a job is requeued, after a node failure for example, Slurm may show its time limit, or a year if it has none.
    """
    return None if job.end_s is None or job.end_s > scene.now_s + CLOCKS_DIFFER_S else job.end_s


def ended_run(job: SlurmJob, control: Callable[[JobId], ControlMessage | None], scene: Scene) -> EndedRun | None:
    """The last run of a job with a job spec; None: it has not ended, or never ran."""
    end_s = _past_end_s(job, scene)
    if job.state not in LEAVING | ENDED or job.start_s is None or end_s is None or not job.nodes:
        return None
    try:
        if job_spec(job) is None or not set(job.partition) & set(scene.managed):
            return None
    except BadJobSpec:
        return None
    held = placement(job, job.nodes, scene.types, control(job.id) if job.gpus_per_node is None else None)
    return EndedRun(job.id, held, job.start_s, end_s)


def accounted_run(run: SlurmRun, control: ControlMessage | None, types: Mapping[str, str]) -> EndedRun:
    """A run in Slurm's accounting, as the scheduler sees it."""
    gpus = run.gpus
    if not gpus and control is not None and control.shares:
        gpus = control.gpus or 0  # Slurm counts its GPUs for the placeholder jobs of the GPU reservation
    each = gpus // max(len(run.nodes), 1)
    shares = tuple(Share(name, each) for name in sorted(run.nodes))
    gpu_type = types.get(run.nodes[0], "") if run.nodes else ""
    return EndedRun(run.job_id, Placement(gpu_type, "", shares), run.start_s, run.end_s)


# --- nodes


def gpu_type(node: SlurmNode) -> str:
    """A node's GPU type from its GRES; `UNTYPED` if GRES has none. Several types are joined by `+`."""
    return "+".join(sorted(name or UNTYPED for name in node.gpus))


def silent_nodes(nodes: Iterable[SlurmNode]) -> frozenset[str]:
    """Nodes that cannot be asked anything now: they do not respond, have not registered, or are not listed."""
    return frozenset(node.name for node in nodes if node_facts(node.state).silent)


def leave_request(node: SlurmNode) -> LeaveRequest | None:
    """An admin's drain, with the reason that was given; None: nobody asks the jobs there to leave."""
    return LeaveRequest(LeaveCause.DRAIN, node.reason) if node_facts(node.state, node.reason).leave else None


def partition_views(partitions: Mapping[str, SlurmPartition], managed: Iterable[str]) -> tuple[Partition, ...]:
    """The managed partitions."""
    return tuple(
        Partition(name, may_start=partition_facts(partitions[name].state)[0], state=partitions[name].state)
        for name in managed
    )


def can_wake(node: SlurmNode, scene: Scene) -> bool:
    """Whether the node is awake, or Slurm wakes it for a job."""
    return scene.rules.features.resume_timeout_s is not None or not node_facts(node.state).asleep


def booting_jobs(jobs: Iterable[SlurmJob], boot_s: Mapping[str, float], before: Collection[JobId]) -> frozenset[JobId]:
    """Jobs for which Slurm boots nodes. Slurm begins a job up to half a minute after its nodes are ready.

    Args:
        jobs: those that may be such.
        boot_s: the nodes that are powered down or boot.
        before: such jobs of the last observation.
    """
    return frozenset(
        job.id
        for job in jobs
        if job.state == "CONFIGURING" and (job.id in before or not boot_s.keys().isdisjoint(job.nodes))
    )


def unlisted_nodes(
    jobs: Iterable[SlurmJob], listed: Iterable[SlurmNode], seen: Mapping[str, SlurmNode]
) -> tuple[SlurmNode, ...]:
    """Nodes of managed jobs that Slurm's answer lacks, as they were last seen, or else as far as the job's record tells."""
    names, found = {node.name for node in listed}, dict[str, SlurmNode]()
    for job in jobs:
        for name in job.nodes if job.state in HOLDING | LEAVING else ():
            if name in names or name in found:
                continue
            gpus = {job.gpu_type or "": job.gpus_per_node or 0}
            cpus = job.cpus // max(len(job.nodes), 1)
            unknown = SlurmNode(name, gpus, gpus, frozenset(), job.partition, cpus, cpus, 0, 0)
            found[name] = dataclasses.replace(seen.get(name, unknown), state=frozenset({UNLISTED}))
    return tuple(found.values())


def closed_nodes(jobs: Iterable[SlurmJob]) -> frozenset[str]:
    """Nodes with a job beside which Slurm starts no job, or only some. Their free GPUs are of no use to the others."""
    return frozenset(
        node for job in jobs if (job.apart or job.exclusive) and job.state in HOLDING | LEAVING for node in job.nodes
    )


def node_views(
    nodes: Iterable[SlurmNode],
    jobs: Mapping[JobId, tuple[SlurmJob, Job]],
    scene: Scene,
    *,
    kept_for: Mapping[str, tuple[str, float]],
    placeholders: Mapping[str, int],
    closed: Collection[str] = (),
) -> tuple[Node, ...]:
    """The managed nodes with GPUs.

    Args:
        nodes: nodes that no cloud fills.
        jobs: the managed jobs.
        scene: the observation.
        kept_for: node -> the reservation that it is kept for, and its start, s since 1970.
        placeholders: node -> GPUs that Penstock's placeholder jobs hold.
        closed: nodes with a job that Slurm keeps others away from. Their free GPUs count as taken.
    """
    gpus, cpus, memory_mb = Counter(placeholders), Counter[str](), Counter[str]()
    for slurm_job, job in jobs.values():
        if job.allocation is None or slurm_job.state in WAITING:
            continue
        for share in job.allocation.shares:
            gpus[share.node] += 0 if slurm_job.gpus_per_node is None else share.gpus
            cpus[share.node] += slurm_job.cpus // max(len(slurm_job.nodes), 1)
            memory_mb[share.node] += slurm_job.memory_mb // max(len(slurm_job.nodes), 1)
    managed, counts_memory = set(scene.managed), scene.rules.features.memory
    return tuple(
        Node(
            name=node.name,
            gpu_type=scene.types[node.name],
            gpus=sum(node.gpus.values()),
            partitions=tuple(name for name in node.partitions if name in managed),
            may_start=node_facts(node.state).may_start and not node.unknown and can_wake(node, scene),
            leave=leave_request(node),
            # Right after a restart, slurmctld may count the GPUs of a completing job twice: 8 of 4 used.
            gpus_others=max(
                min(sum((node.gpus if node.name in closed else node.gpus_used).values()), sum(node.gpus.values()))
                - gpus[node.name],
                0,
            ),
            reservation=kept_for.get(node.name, ("", None))[0],
            reserved_s=kept_for.get(node.name, ("", None))[1],
            switch=scene.rules.switches.get(host_of(node.name), ""),
            cpus=node.cpus,
            cpus_together={"core": node.core_cpus, "socket": node.socket_cpus}.get(scene.rules.features.cpus_by, 1),
            cpus_others=max(node.cpus_used - cpus[node.name], 0),
            features=node.features,
            state="+".join(sorted(node.state)),
            boot_s=scene.boot_s.get(node.name, 0.0),
            note=boots.note(node, scene.boot_s.get(node.name, 0.0), scene.rules.features.resume_timeout_s),
            memory_mb=node.memory_mb if counts_memory else 0,
            memory_others_mb=max(node.memory_used_mb - memory_mb[node.name], 0) if counts_memory else 0,
        )
        for node in nodes
        if managed & set(node.partitions) and sum(node.gpus.values()) > 0
    )


def free_gpus(
    nodes: Iterable[Node], in_cloud: Iterable[SlurmNode], jobs: Iterable[Job], cleared: Collection[JobId]
) -> dict[str, int]:
    """Node -> GPUs that no job holds in Slurm. Cleared jobs hold none there."""
    free = {node.name: node.gpus_for_us for node in nodes}
    free |= {node.name: sum(node.gpus.values()) for node in in_cloud}
    for job in jobs:
        for share in job.allocation.shares if job.allocation is not None and job.id not in cleared else ():
            free[share.node] = free.get(share.node, 0) - share.gpus
    return free
