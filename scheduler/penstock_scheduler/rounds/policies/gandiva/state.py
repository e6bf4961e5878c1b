"""The state of one round: nodes as Gandiva sees them, and the jobs that use them. The steps of the round change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import (
    Configuration,
    Job,
    JobId,
    Node,
    Pack,
    Phase,
    Placement,
    Reason,
    ReasonCode,
    SharedGpus,
    SharingState,
    Snapshot,
    Stop,
)
from penstock_scheduler.rounds.free_gpus import Amounts, FreeGpus, is_open
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva.trials import GandivaSettings, Trials
from penstock_scheduler.rounds.sharing.packing import Memory, Tenant


@dataclass(slots=True)
class SharedNode:
    """A node and the packs that use its GPUs."""

    node: Node
    gpus: int
    """GPUs for movable jobs. The GPUs of jobs that must stay do not count."""
    packs: list[Pack] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """GPUs that the packs want together."""
        return sum(pack.gpus for pack in self.packs)

    @property
    def free(self) -> int:
        """GPUs that no pack wants."""
        return max(self.gpus - self.wanted, 0)

    @property
    def sliced(self) -> bool:
        """Whether the packs want more GPUs than there are, so that they get time slices."""
        return self.wanted > self.gpus

    @property
    def height(self) -> float:
        """Number of GPUs that the packs want, divided by the number of GPUs."""
        return self.wanted / self.gpus if self.gpus > 0 else math.inf

    def view(self) -> SharedGpus:
        """The node as `sharing.gandiva` sees it."""
        return SharedGpus(self.node.name, self.gpus, tuple(self.packs))


def colocation(state: SharingState, gpu_types: Iterable[str]) -> Colocation:
    """What the snapshot knows about pairs of jobs, with utilisations for pairs that have not been measured."""
    pairs = {(pair.gpu_type, pair.mine, pair.theirs): Pair(share=pair.share) for pair in state.pairs}
    used = {use.kind: use.utilisation for use in state.uses.values() if use.utilisation is not None}
    return Colocation(pairs, {(gpu_type, kind): share for gpu_type in gpu_types for kind, share in used.items()})


def tenant(job: Job, gpus: int, state: SharingState) -> Tenant:
    """A job as `sharing.packing` sees it."""
    use = state.use(job.id)
    moved_s = -math.inf if use.moved_s is None else use.moved_s
    return Tenant(job.id, use.kind, gpus, use.memory_mb, job.sharing_priority, moved_s)


Held = tuple[Job, Placement]


class RoundState:
    """Starts from the snapshot: jobs with GPUs stay where they are, and all others are in the queue.

    Args:
        settings: settings of the policy.
        snapshot: the round's snapshot.
        requests: what each job asks for.
    """

    def __init__(self, settings: GandivaSettings, snapshot: Snapshot, requests: Mapping[JobId, common.Request]) -> None:
        self.settings = settings
        self.snapshot = snapshot
        self.requests = requests
        self.sharing = snapshot.sharing
        """None on a cluster without agents."""
        self.max_height = settings.max_height if self.sharing is not None else 1.0
        self.jobs = {job.id: job for job in snapshot.jobs}
        self.free = FreeGpus.of(snapshot)
        self.amounts = Amounts(snapshot.nodes)
        """CPUs and memory beside the jobs of packs. Jobs that share GPUs share no CPUs."""
        self.memory = Memory(self.sharing if self.sharing is not None else SharingState())
        self.fixed: dict[JobId, Placement] = {}
        """Jobs with GPUs of their own, which the round does not change from here on."""
        self.busy: set[JobId] = set()
        """Jobs that are in flight, or that this round has moved: no further step moves them."""
        self.gpus: dict[JobId, int] = {}
        """GPUs of each job that has a place in a pack."""
        self.nodes: dict[str, SharedNode] = {}
        self.node_of: dict[JobId, SharedNode] = {}
        self.notes: dict[JobId, str] = {}
        """What the round did with a job, for its reason."""
        self.stops: dict[JobId, Stop] = {}
        """Jobs that give back GPUs, and why. The other reasons to stop a job follow from the plan; see `policies.stops`."""
        self.queue: list[Job] = []
        self.migrations = 0
        self.trials = Trials.of(snapshot, settings)
        self.waiting: dict[JobId, Reason] = dict(self.trials.resting)
        self._settle()
        types = {node.gpu_type for node in snapshot.nodes}
        self.known = colocation(self.sharing, types) if self.sharing is not None else Colocation()
        """What is known about pairs of jobs on one GPU."""

    def _settle(self) -> None:
        """Find out which jobs stay where they are, and what each node has left for the others."""
        nodes = {node.name: node for node in self.snapshot.nodes}
        movable, firm = self._sort_jobs(nodes)
        for job_id, where in self.fixed.items():
            self._take(self.jobs[job_id], where)
        for job, where in firm:
            if self.free.has(where):
                self.fixed[job.id] = where
                self._take(job, where)
            else:
                self.queue.append(job)
        for node in self.snapshot.nodes:
            if node.may_start:
                self.nodes[node.name] = SharedNode(node, self.free.on(node.name))
        by_node: dict[str, list[JobId]] = {}
        for job, where in sorted(movable, key=lambda each: each[0].in_order):
            self.gpus[job.id] = where.gpus
            self.free.charge(job, where.gpus, where.gpu_type)
            self.amounts.take(job.request, where)
            by_node.setdefault(where.nodes[0], []).append(job.id)
        for name, there in by_node.items():
            self._restore_packs(self.nodes[name], there)

    def _take(self, job: Job, where: Placement) -> None:
        self.free.take(job, where)
        self.amounts.take(job.request, where)

    def _sort_jobs(self, nodes: Mapping[str, Node]) -> tuple[list[Held], list[Held]]:
        """Sort each job into the queue, the fixed jobs, or one of the two lists that this returns.

        Returns:
            Movable jobs that have a place on one node, and jobs on their way to a node on which they may not be stopped.
        """
        pins = common.pinned(self.snapshot)
        movable: list[Held] = []
        firm: list[Held] = []
        for job in self.snapshot.jobs:
            flying = common.in_flight(job)
            where = job.target if flying else job.allocation
            node = nodes.get(where.nodes[0]) if where is not None and len(where.shares) == 1 else None
            if job.id in self.waiting:
                continue
            if job.phase is Phase.QUEUED or where is None:
                self.queue.append(job)
            elif job.phase is Phase.RUNNING and not job.movable:
                self.fixed[job.id] = where
            elif node is None or not node.may_start:
                if job.id in pins or job.phase is Phase.RUNNING:
                    self.fixed[job.id] = where
                else:
                    self.queue.append(job)
            elif flying and self.sharing is None and job.id not in pins:
                self.queue.append(job)
            elif flying and not job.movable:
                firm.append((job, where))
            else:
                movable.append((job, where))
                if flying:
                    self.busy.add(job.id)
        return movable, firm

    def _restore_packs(self, shared: SharedNode, there: list[JobId]) -> None:
        """Put the jobs of a node into the packs in which they run. Jobs for which it has no room are queued again."""
        for jobs in self._packs_of(shared, there):
            gpus = max(self.gpus[job] for job in jobs)
            if gpus > shared.gpus or (self.sharing is None and gpus > shared.free):
                for job in jobs:
                    self._to_queue(job)
            elif self.memory.limits(tuple(jobs), shared.node.gpu_type) is None:
                for job in jobs:
                    self.add(shared, (job,))
                    self.notes[job] = "leaves its pack, because the pack needs more than the GPU's memory"
                self.busy |= set(jobs)
            else:
                self.add(shared, tuple(jobs))

    def _packs_of(self, shared: SharedNode, there: list[JobId]) -> list[list[JobId]]:
        """The packs in which these jobs of a node run. A job of no pack is one of its own."""
        groups = self.sharing.groups if self.sharing is not None else ()
        packs = [pack.jobs for group in groups if group.node == shared.node.name for pack in group.packs]
        together = [[job for job in jobs if job in there] for jobs in packs]
        known = {job for jobs in together for job in jobs}
        return [*filter(None, together), *([job] for job in there if job not in known)]

    def _to_queue(self, job_id: JobId) -> None:
        job = self.jobs[job_id]
        where = job.allocation or job.target
        assert where is not None, "it has a place"
        self.free.charge(job, -self.gpus.pop(job_id), where.gpu_type)
        self.amounts.take(job.request, where, -1)
        self.queue.append(job)

    def add(self, shared: SharedNode, jobs: tuple[JobId, ...]) -> None:
        """Put these jobs on a node, in one pack."""
        gpus = max(self.gpus[job] for job in jobs)
        limits = self.memory.limits(jobs, shared.node.gpu_type) or ()
        shared.packs.append(Pack(jobs, gpus, max(self.jobs[job].sharing_priority for job in jobs), limits=limits))
        for job in jobs:
            self.node_of[job] = shared

    def split(self, shared: SharedNode, jobs: set[JobId]) -> None:
        """Take a pack apart; its jobs stay on the node."""
        pack = next(pack for pack in shared.packs if set(pack.jobs) == jobs)
        shared.packs.remove(pack)
        for job in pack.jobs:
            self.add(shared, (job,))
        self.busy |= jobs

    def place(self, job: Job, option: Configuration, shared: SharedNode) -> None:
        """Give a job of the queue GPUs of a node."""
        if job.movable:
            self.free.charge(job, option.gpus, option.gpu_type)
            self.gpus[job.id] = option.gpus
            self.amounts.take(job.request, common.on_one_node(job, shared.node, option.gpus))
            self.add(shared, (job.id,))
            self.busy.add(job.id)
        else:  # GPUs of its own, so that no later job makes it run in time slices
            where = common.on_one_node(job, shared.node, option.gpus)
            self.take_whole(job, where)

    def take_whole(self, job: Job, where: Placement) -> None:
        """Give a job GPUs of its own, on which no other job may land."""
        self.fixed[job.id] = where
        self._take(job, where)
        for share in where.shares:
            self.nodes[share.node].gpus -= share.gpus

    def move(self, pack: Pack, source: SharedNode, target: SharedNode, note: str) -> None:
        """Migrate a pack."""
        source.packs.remove(pack)
        target.packs.append(pack)
        for job in pack.jobs:
            for there, sign in ((source, -1), (target, 1)):
                where = common.on_one_node(self.jobs[job], there.node, self.gpus[job])
                self.amounts.take(self.jobs[job].request, where, sign)
            self.node_of[job] = target
            self.notes[job] = note
            self.busy.add(job)
        self.migrations += 1

    def may_move(self, pack: Pack, shared: SharedNode) -> bool:
        """Whether a pack may migrate to a node: no job of it moved recently, and each may use the
        node and have its size there.

        A running job may have a size that its spec does not allow, for example after its user changed the spec.
        """
        return all(
            self.rested(job, self.settings.interval_s)
            and self.may_be_on(job, shared)
            and self.jobs[job].spec.allows(shared.node.gpu_type, self.gpus[job])
            and (
                self.node_of[job] is shared
                or self.amounts.has(shared.node.name, self.jobs[job].request, self.gpus[job])
            )
            for job in pack.jobs
        )

    def rested(self, job_id: JobId, interval_s: float) -> bool:
        """Whether a job's last move was at least `interval_s` seconds ago."""
        return job_id not in self.busy and common.rested(self.snapshot, job_id, interval_s)

    def may_be_on(self, job_id: JobId, shared: SharedNode) -> bool:
        """Whether a job may be on a node, which must have the GPU type that the job has now."""
        job, node = self.jobs[job_id], shared.node
        if self.node_of[job_id].node.gpu_type != node.gpu_type or not job.spec.allows_type(node.gpu_type):
            return False
        return is_open(node, job)

    def job_waits(self) -> bool:
        """Whether a job waits for GPUs."""
        return any(reason.code is ReasonCode.WAITING_CAPACITY for reason in self.waiting.values())
