"""The agents of the nodes behind the scheduler's `Agents` port: a thin shell around `node_sharing.py` and the GPU reservation.

A job that starts on one node with an agent holds no GPUs in Slurm (it is *cleared*). The GPU reservation holds the GPUs, and the
agent binds the job to some of them, so that other jobs can join it. The job stays cleared as long as it runs. A job that holds
GPUs in Slurm keeps them when other jobs join it.

Slurm 22.05.8 does not start a cleared job on a node whose GPUs are all allocated. So the job gets the highest priority, and a
placeholder job is exchanged for a new one: when the old one ends, Slurm starts the job, then the new placeholder job, and only
then other jobs.

Orders to the agents, their statuses and their events travel through files; see `agent_files.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock_scheduler.api.agent_messages import AWAY_S, CarriedJob, Contained, NodeStatus, XidSeen
from penstock_scheduler.api.ports import Clock, Leadership, SilentAgent
from penstock_scheduler.model import Action, Hold, Job, JobId, JobUse, Phase, SharedGpus, SharingState
from penstock_scheduler.people.errors import ClusterAway, StoreError
from penstock_scheduler.store.leadership.lease import ALONE
from penstock_slurm.gateway import STAND_IN, ControllerAway, SlurmJob, SlurmNode, TimedOut
from penstock_slurm.gateway.base import WAITING
from penstock_slurm.gateway.node_states import OFF
from penstock_slurm.jobs.states import HOLDING
from penstock_slurm.share.agent_files import Events, Orders, nodes_with_agents, read_status
from penstock_slurm.share.gpu_reservation import GpuReservations, Ground, Sharer, lacking, stands, used
from penstock_slurm.share.node_sharing import (
    NodeScene,
    Resident,
    allot,
    cannot_wait,
    ground,
    group_of_one,
    ordered_groups,
    ordered_jobs,
    together,
)
from penstock_slurm.share.silent_agents import SilentAgents

log = logging.getLogger(__name__)

EXCHANGE_S = 3.0
"""Shortest time between two exchanges of a placeholder job on one node."""

STAND_IN_REMEDY = (
    f"in slurm.conf, add {STAND_IN} to GresTypes, and ,{STAND_IN}:no_consume:1 to the Gres of the nodes; "
    "restart slurmctld and slurmd (docs/admin/sharing.md)"
)


class Coming(Mapping[JobId, tuple[Job, SlurmJob]]):
    """The managed jobs that are pending, and Slurm's records of them. No pass over all jobs is needed to ask for one."""

    def __init__(self, jobs: Mapping[JobId, Job], records: Mapping[JobId, SlurmJob]) -> None:
        self._jobs, self._records = jobs, records

    def __getitem__(self, job: JobId) -> tuple[Job, SlurmJob]:
        record = self._records[job]
        if record.state not in WAITING:
            raise KeyError(job)
        return self._jobs[job], record

    def __iter__(self) -> Iterator[JobId]:
        return (job for job, record in self._records.items() if record.state in WAITING)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def without_stand_in(nodes: Iterable[SlurmNode], partitions: Collection[str]) -> list[str]:
    """Nodes with GPUs in these partitions that lack the GRES `STAND_IN`."""
    return [
        node.name for node in nodes if node.gpus and not node.stand_in and not {*partitions}.isdisjoint(node.partitions)
    ]


class SlurmAgents:
    """`ports.Agents` on Slurm.

    Args:
        reservations: the placeholder jobs.
        spool: the folder that all nodes share.
        clock: tells which agents are away.
        stand_in: whether jobs that share request the GRES `STAND_IN`, as releases of Slurm without
            `empty_tres_clears_gpus` need it. Such jobs also start on full nodes, and no jobs share on nodes without that GRES.
        patience_s: see `SilentAgents`.
    """

    def __init__(
        self,
        reservations: GpuReservations,
        spool: Path,
        clock: Clock,
        *,
        stand_in: bool = False,
        patience_s: float = 300.0,
        leadership: Leadership = ALONE,
    ) -> None:
        self.reservations = reservations
        self.stand_in = stand_in
        self._spool, self._clock = spool, clock
        self._orders, self._events = Orders(spool, leadership), Events(spool, leadership)
        self.watch = SilentAgents(clock, patience_s)
        """Watches the agents, and acts for those that are silent."""
        self._expected: dict[JobId, tuple[str, int]] = {}
        """Job that is being started -> node, GPUs."""
        self._singles: dict[JobId, SharedGpus] = {}
        """Expected and running cleared jobs that are in no group of the plan, as groups of one."""
        self._exchanged_s: dict[str, float] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._partitions: dict[str, str] = {}
        self._types: Mapping[str, str] = {}
        self._residents: dict[JobId, Resident] = {}
        self._going: dict[str, tuple[Sharer, ...]] = {}
        """Node -> cleared jobs whose run has ended and whose processes may still live on the GPUs that they were bound to."""
        self._coming: Mapping[JobId, tuple[Job, SlurmJob]] = {}
        """The managed jobs that are pending."""
        self._nobody_shares = False
        """Whether no node has an agent, and no job or placeholder job is left from a time when one had."""
        self._sending: list[SlurmJob] = []
        """Those of them that Slurm is about to start without GPUs of its own."""
        self._awaited: dict[str, dict[JobId, int]] = {}
        """Node -> job that Slurm is about to start there -> GPUs that Slurm will allocate to it."""
        self._statuses: dict[str, NodeStatus] = {}
        self._groups: tuple[SharedGpus, ...] = ()
        self._strays: frozenset[str] = frozenset()
        """Placeholder jobs on nodes that are not managed, as logged."""
        self._stands: dict[str, bool] = {}
        self._reserved: dict[str, int] = {}
        self._taken_for: set[JobId] = set()
        """Pending jobs for which placeholder jobs have been submitted, if any are needed."""
        self._uses: dict[JobId, dict[str, JobUse]] = {}
        """Job -> node -> how the job uses its GPUs there."""
        self.misplaced: frozenset[JobId] = frozenset()
        """Jobs that have to restart: cleared jobs on GPUs that belong to other jobs now, because they cannot be bound again; and
        clients of NVIDIA's MPS whose group has time slices now, because they cannot be suspended."""

    # --- observations

    def saw(
        self,
        nodes: Iterable[SlurmNode],
        jobs: Mapping[JobId, Job],
        slurm_jobs: Mapping[JobId, SlurmJob],
        cleared: Collection[JobId],
        partitions: Collection[str],
        types: Mapping[str, str],
        unreachable: Collection[str] = (),
        *,
        busy: Mapping[JobId, SlurmJob] | None = None,
    ) -> None:
        """Take over an observation of the cluster.

        Args:
            nodes: the managed nodes.
            jobs: the managed jobs.
            slurm_jobs: Slurm's records of these jobs.
            cleared: the jobs among them that hold no GPUs in Slurm.
            partitions: managed partitions that are up.
            types: GPU type of each node.
            unreachable: nodes that do not respond to Slurm.
            busy: Slurm's records of the jobs that run, are sent or have changed; None: of all.
        """
        self._nodes = {node.name: node for node in nodes}
        self._partitions = {
            node.name: next((name for name in node.partitions if name in partitions), "")
            for node in self._nodes.values()
        }
        self._types = types
        present = nodes_with_agents(self._spool, self._nodes)
        self._read(present)
        self._orders.recall(present)
        self._events.saw(self._statuses)
        busy = slurm_jobs if busy is None else busy
        off = {node.name for node in self._nodes.values() if not OFF.isdisjoint(node.state)}
        self.watch.saw(self._statuses, jobs, busy, unreachable, off)
        self._keep_ending()
        self._residents, self._coming, self._sending, self._awaited = {}, Coming(jobs, slurm_jobs), [], {}
        nobody = not (present or self._statuses or self._orders.given or cleared or self._going)
        self._nobody_shares = nobody and not self.reservations.placeholders
        for job_id, slurm_job in () if self._nobody_shares else busy.items():
            if slurm_job.state in WAITING:
                self._sent(jobs[job_id], slurm_job)
            elif slurm_job.state in HOLDING and len(slurm_job.nodes) == 1 and slurm_job.nodes[0] in self._nodes:
                self._residents[job_id] = self._resident(jobs[job_id], slurm_job, cleared=job_id in cleared)
        self.reservations.forget(slurm_jobs.keys())
        self._warn_of_strays()
        self._note_uses(jobs)

    def _read(self, nodes: Iterable[str]) -> None:
        """Read the agents' statuses.

        If a status cannot be read, the last one stands until it is old; otherwise the node's GPUs would be allotted anew.
        """
        statuses = {name: self._statuses.get(name) for name in self._nodes}
        statuses |= {name: status for name in nodes if (status := read_status(self._spool, name)) is not None}
        self._statuses = {name: status for name, status in statuses.items() if status is not None}

    def _resident(self, job: Job, slurm_job: SlurmJob, *, cleared: bool) -> Resident:
        """A job that runs on one managed node."""
        node = slurm_job.nodes[0]
        bound = None
        if cleared:
            bound = self._bound(node, job.id)
        elif self._concerns(node):
            bound = self.reservations.devices(slurm_job)
        leaves = job.phase is Phase.STOPPING and job.id not in self.misplaced
        return Resident(job, slurm_job, cleared, bound, leaves)

    def _warn_of_strays(self) -> None:
        """Log new placeholder jobs on nodes that are not managed."""
        strays = frozenset(
            placeholder.id for placeholder in self.reservations.placeholders if placeholder.node not in self._nodes
        )
        if strays - self._strays:
            text = "they are on nodes that Penstock does not manage; end them with scancel"
            log.warning("placeholder jobs left behind", extra={"jobs": ",".join(sorted(strays)), "text": text})
        self._strays = strays

    def _note_uses(self, jobs: Container[JobId]) -> None:
        """Note how jobs use their GPUs. An ended job is kept while a measured pack of it was not taken: its kind is needed."""
        for name, status in self._statuses.items():
            for carried in status.jobs:
                self._uses.setdefault(carried.job, {})[name] = carried.use
        packed = {job for _, each in self._events.news("packs", lambda status: status.packs) for job in each.seen.jobs}
        self._uses = {job: uses for job, uses in self._uses.items() if job in jobs or job in packed}

    def _keep_ending(self) -> None:
        """Keep GPUs reserved for jobs that are ending, because Slurm lets their processes live on for KillWait."""
        before = {each.slurm.number: each.devices for each in self._residents.values() if each.cleared}
        before |= {each.number: each.devices for going in self._going.values() for each in going}
        self._going = {}
        for job in self.reservations.leaving:
            node = job.nodes[0] if len(job.nodes) == 1 else ""
            bound = self._bound(node, job.id)
            if job.gpus_per_node is not None or (job.number not in before and bound is None):
                continue
            devices = bound or before.get(job.number)
            gone = Sharer(job.number, len(devices or ()), own=False, devices=devices, stays=False)
            self._going[node] = (*self._going.get(node, ()), gone)

    def _sent(self, job: Job, slurm_job: SlurmJob) -> None:
        """Note a job that Slurm is about to start.

        GPUs that Slurm will allocate to it count as its own already, so that no placeholder job takes them first. A cleared job
        needs a GPU reservation and an order, also if another daemon has sent it.
        """
        if job.phase is Phase.STARTING and slurm_job.gpus_per_node is None:
            self._sending.append(slurm_job)
        if job.phase is not Phase.STARTING or len(slurm_job.required_nodes) != 1:
            return
        node = slurm_job.required_nodes[0]
        if slurm_job.gpus_per_node:
            self._awaited.setdefault(node, {})[job.id] = slurm_job.gpus_per_node
        elif slurm_job.gpus_per_node is None and job.allocation is not None:
            self._expected[job.id] = node, job.allocation.gpus

    def _concerns(self, node: str) -> bool:
        """Whether an agent has, or had, anything to do there. If not, Slurm and the spool are left alone."""
        return node in self._statuses or self._orders.to(node) is not None or bool(self.reservations.on(node))

    def _carried(self, node: str, job: JobId) -> CarriedJob | None:
        status = self._statuses.get(node)
        return next((each for each in status.jobs if each.job == job), None) if status is not None else None

    def _bound(self, node: str, job: JobId) -> frozenset[int] | None:
        carried = self._carried(node, job)
        return None if carried is None else frozenset(carried.devices)

    def silent(self) -> tuple[SilentAgent, ...]:
        """See `ports.NodeEvents`."""
        return self.watch.silent()

    def take_contained(self) -> tuple[Contained, ...]:
        """See `ports.NodeEvents`."""
        return tuple(each for _, each in self._events.take("contained", lambda status: status.contained))

    def take_xids(self) -> tuple[tuple[str, XidSeen], ...]:
        """See `ports.NodeEvents`."""
        return tuple(self._events.take("xids", lambda status: status.xids))

    # --- questions of the cluster

    def takes(self, action: Action) -> bool:
        """Whether an action starts a pending job cleared: on one node only, where the job can share."""
        found = self._coming.get(action.job)
        if found is None or isinstance(action, Hold) or len(action.placement.nodes) != 1:
            return False
        job, record = found
        if job.phase is Phase.STARTING and record.gpus_per_node is not None:  # it was sent with GPUs of its own
            return False
        group = self._group_of(job.id)
        return self._alive(action.placement.nodes[0]) or (group is not None and self._crowded(group))

    def reserved(self, node: str) -> int:
        """GPUs of a node that are reserved for cleared jobs, or will be."""
        return max(self._reserved.get(node, 0), self.reservations.gpus(node))

    def shares_on(self, node: str) -> bool:
        """Whether jobs that start on a node get GPUs of the GPU reservation."""
        return self._alive(node) or bool(self.reservations.on(node))

    def takes_gpus_for(self, job: JobId) -> bool:
        """Whether the placeholder jobs that a pending job needs have been submitted."""
        return job in self._taken_for

    def keeps_back(self, job: JobId, node: str) -> str:
        """Why a job that shares cannot start there yet; empty: it can."""
        if not self._alive(node):
            if self.stand_in and node in self._nodes and not self._nodes[node].stand_in:
                return f"waits for {node} to have GRES {STAND_IN}"
            return f"waits for the agent of {node}, which does not answer"
        if not self._stands.get(node, False):
            return "waits for its GPUs to be reserved"
        carried = self._carried(node, job)
        if carried is None or carried.state != "waiting" or carried.devices:  # none, or of its previous run
            return f"waits for the agent of {node} to prepare"
        return ""

    def leaves_a_gap(self, job: JobId) -> bool:
        """Whether cleared jobs use GPUs that this job holds in Slurm, so that they would lose them at its end."""
        mine = self._residents.get(job)
        if mine is None or mine.cleared or mine.leaves:
            return False
        return any(
            other.cleared
            and not other.leaves
            and other.slurm.nodes == mine.slurm.nodes
            and other.devices
            and not other.devices.isdisjoint(mine.devices or ())
            for other in self._residents.values()
        )

    def note(self, job: JobId) -> dict[str, object] | None:
        """A note for Slurm's accounts: where a running job shares GPUs, and with which jobs; None: it does not share."""
        mine = self._residents.get(job)
        if mine is None:
            return None
        group = self._group_of(job)
        if group is None or not self._crowded(group):
            return {"node": mine.slurm.nodes[0], "gpus": mine.gpus, "with": []} if mine.cleared else None
        others = sorted(each for each in group.jobs if each != job and each in self._residents)
        return {"node": group.node, "gpus": mine.gpus, "with": others}

    # --- the port

    def sharing(self) -> SharingState:
        """See `ports.Agents`."""
        seen = tuple(each.seen for _, each in self._events.take("packs", lambda status: status.packs))
        memory: dict[str, int] = {}
        for node in self._statuses:
            if self._alive(node):
                memory |= self._statuses[node].gpu_memory_mb
        groups = tuple(group for group in self._groups if self._alive(group.node))
        return SharingState(groups, {job: _summed(uses) for job, uses in self._uses.items()}, seen, (), memory)

    def share(self, groups: Sequence[SharedGpus], actions: Sequence[Action] = ()) -> None:
        """See `ports.Agents`."""
        self._groups, self._taken_for = tuple(groups), set()
        self._expect(actions)
        if self._nobody_shares and not groups and not self._expected:
            self._singles, self._reserved, self._stands, self.misplaced = {}, {}, {}, frozenset()
            return
        here = {
            job: (each.slurm.nodes[0], each.gpus)
            for job, each in self._residents.items()
            if each.cleared and not each.leaves
        }
        alone = {job: where for job, where in (self._expected | here).items() if job in here or job in self._coming}
        for group in groups:
            for job in group.jobs:
                alone.pop(job, None)
        if self.reservations.away is not None:  # GPUs that the observation does not know would be treated as lost
            raise ClusterAway(str(self.reservations.away)) from self.reservations.away
        self._singles = {job: group_of_one(node, job, gpus) for job, (node, gpus) in alone.items()}
        misplaced: set[JobId] = set()
        self._reserved, self._stands = {}, {}
        try:
            residents: dict[str, dict[JobId, Resident]] = {}
            for job, resident in self._residents.items():
                residents.setdefault(resident.slurm.nodes[0], {})[job] = resident
            for name in sorted(self._nodes):
                wanted = [group for group in (*groups, *self._singles.values()) if group.node == name]
                try:
                    misplaced |= self._on_node(self._nodes[name], wanted, residents.get(name, {}))
                except StoreError as error:  # one folder that cannot be written must not stop the site
                    log.warning("cannot write an order", extra={"node": name, "text": str(error)})
        except (ControllerAway, TimedOut) as error:
            raise ClusterAway(str(error)) from error
        self._expected = {}
        self.misplaced = frozenset(misplaced)

    def _expect(self, actions: Sequence[Action]) -> None:
        """Note the jobs that these actions start cleared."""
        for action in actions:
            if not isinstance(action, Hold) and self.takes(action):
                self._expected[action.job] = action.placement.nodes[0], action.placement.gpus

    def _on_node(self, node: SlurmNode, groups: Sequence[SharedGpus], here: Mapping[JobId, Resident]) -> set[JobId]:
        """Take the GPU reservation and the order of one node one step further. Returns its misplaced jobs."""
        name = node.name
        going = self._going.get(name, ())
        if not (groups or going or any(each.cleared for each in here.values()) or self._concerns(name)):
            return set()
        scene = NodeScene(
            node=node,
            groups=tuple(groups),
            here=here,
            residents=self._residents,
            coming=self._coming,
            singles=self._singles,
            expected=self._expected,
            awaited=self._awaited.get(name, {}),
            going=going,
            placeholders=self.reservations.on(name),
            status=self._statuses.get(name),
            order=self._orders.to(name),
            promised=self._orders.promised(name, self._statuses.get(name)),
        )
        state, shared = ground(scene), together(scene)
        self._reserved[name], self._stands[name] = lacking(state), stands(state)
        # Until a node has registered, a new slurmctld (22.05.8) counts GPUs wrong for jobs that start and end there.
        if "UNKNOWN" not in node.state or "DOWN" in node.state:
            jobs = [*shared, *(job for job, each in here.items() if each.cleared and job not in shared)]
            self.reservations.carry_out(name, self._partitions[name], state, jobs)
            self._taken_for |= shared & self._coming.keys()
            self._make_way(node, state, jobs)
        allotted, misplaced = allot(scene, state)
        misplaced |= cannot_wait(scene)
        self._orders.write(
            name,
            ordered_groups(scene, allotted, misplaced),
            ordered_jobs(scene),
            status=scene.status,
            gpu_type=self._types.get(name, ""),
            now_s=self._clock.now_s(),
        )
        return misplaced

    def _make_way(self, node: SlurmNode, state: Ground, jobs: Sequence[str]) -> None:
        """Exchange a placeholder job, so that Slurm starts cleared jobs on a node without a free GPU; see the module."""
        sent = any(node.name in slurm_job.required_nodes for slurm_job in self._sending)
        now_s = self._clock.now_s()
        waited_s = now_s - self._exchanged_s.get(node.name, 0.0)
        if sent and not self.stand_in and state.free <= 0 and waited_s >= EXCHANGE_S:
            self._exchanged_s[node.name] = now_s
            self.reservations.exchange(node.name, self._partitions[node.name], used(state) | state.promised, jobs)

    def _crowded(self, group: SharedGpus) -> bool:
        """Whether two or more of its jobs are there."""
        return sum(job in self._residents or job in self._coming for job in group.jobs) > 1

    def _group_of(self, job: JobId) -> SharedGpus | None:
        """The job's group in the plan."""
        return next((group for group in self._groups if job in group.jobs), None)

    def _alive(self, node: str) -> bool:
        """Whether the agent answers and cleared jobs can start there."""
        status = self._statuses.get(node)
        if self.stand_in and not (node in self._nodes and self._nodes[node].stand_in):
            return False
        return status is not None and self._clock.now_s() - status.time_s < AWAY_S


def _summed(uses: Mapping[str, JobUse]) -> JobUse:
    """How a job uses its GPUs, over all nodes: the newest values, and the total time."""
    newest = max(uses.values(), key=lambda use: use.moved_s or 0.0)
    told = [use for use in uses.values() if use.utilisation is not None]
    utilisation = newest.utilisation if newest.utilisation is not None else told[0].utilisation if told else None
    return dataclasses.replace(
        newest,
        utilisation=utilisation,
        memory_mb=max(use.memory_mb for use in uses.values()),
        ran_s=sum(use.ran_s for use in uses.values()),
    )
