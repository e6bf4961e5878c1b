"""The agents of the nodes behind the scheduler's `Agents` port: orders to them and statuses from them through the spool, and
the GPU reservation around the GPUs that jobs share (`penstock_slurm.gpu_reservation`).

A job that starts on one node with an agent holds no GPUs in Slurm (it is *cleared*). The GPU reservation holds the GPUs, and the
agent binds the job to some of them, so that other jobs can join it. The job stays cleared as long as it runs. A job that holds
GPUs in Slurm keeps them when other jobs join it.

Slurm 22.05.8 does not start a cleared job on a node whose GPUs are all allocated. So the job gets the highest priority, and a
placeholder job is exchanged for a new one: when the old one ends, Slurm starts the job, then the new placeholder job, and only
then other jobs.

This object remembers what it ordered and which of the agents' numbered events were taken. Both are also in the spool, where the
next daemon finds them, so it learns what happened while no daemon ran, and reports nothing twice.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from penstock_profiles.files import open_regular, write_whole
from penstock_scheduler.errors import ClusterAway, StoreError
from penstock_scheduler.model import Job, JobId, JobUse, Pack, Phase, SharedGpus, SharingState
from penstock_scheduler.pairs import kind_of
from penstock_scheduler.ports import Clock
from penstock_scheduler.sharing.messages import (
    AWAY_S,
    MAX_BYTES,
    CarriedGroup,
    CarriedJob,
    Contained,
    NodeOrder,
    NodeStatus,
    NumberedPack,
    OrderedGroup,
    OrderedJob,
    Taken,
    XidSeen,
    agent_folder,
    order_file,
    status_file,
    taken_file,
)
from penstock_scheduler.sharing.node import without
from penstock_slurm.departing import among_its_own, next_in_line, with_guarantees
from penstock_slurm.gateway import STAND_IN, ControllerAway, SlurmJob, SlurmNode, TimedOut
from penstock_slurm.gpu_reservation import GpuReservations, Ground, Sharer, held, lacking, stands, used
from penstock_slurm.states import HOLDING, WAITING
from penstock_slurm.topology import choose

log = logging.getLogger(__name__)

EXCHANGE_S = 3.0
"""Shortest time between two exchanges of a placeholder job on one node."""

CLEARS_ON = (22, 5)
"""The newest release of Slurm that can remove all GRES of a pending job. For later ones, `STAND_IN` takes their place."""

STAND_IN_REMEDY = (
    f"in slurm.conf, add {STAND_IN} to GresTypes, and ,{STAND_IN}:no_consume:1 to the Gres of the nodes; "
    "restart slurmctld and slurmd (docs/admin/sharing.md)"
)

Numbered = TypeVar("Numbered", NumberedPack, Contained, XidSeen)

ORDERS_KEPT = 64
"""Newest orders to a node whose devices are remembered, because its agent may still carry them out."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A managed job that runs, or is about to run, on one node only."""

    job: Job
    slurm: SlurmJob
    cleared: bool
    """Whether it holds no GPUs in Slurm."""
    devices: frozenset[int] | None
    """Indexes of the GPUs that it holds or is bound to; None: not known. Empty: it waits for its first time slice."""
    leaves: bool
    """Whether it is departing."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that it uses."""
        return self.job.allocation.gpus if self.job.allocation is not None else 1


def without_stand_in(nodes: Iterable[SlurmNode], partitions: Collection[str]) -> list[str]:
    """Nodes with GPUs in these partitions that lack the GRES `STAND_IN`."""
    return [
        node.name for node in nodes if node.gpus and not node.stand_in and not {*partitions}.isdisjoint(node.partitions)
    ]


def group_of_one(node: str, job: JobId, gpus: int) -> SharedGpus:
    """A group of one job, which shares its GPUs with no other."""
    return SharedGpus(node, gpus, (Pack((job,), gpus),))


class SlurmAgents:
    """`ports.Agents` on Slurm.

    Args:
        reservations: the placeholder jobs.
        spool: the folder that all nodes share.
        clock: tells which agents are away.
        stand_in: whether jobs that share request the GRES `STAND_IN`, as releases after `CLEARS_ON` need it. Such jobs also
            start on full nodes, and no jobs share on nodes without that GRES.
    """

    def __init__(self, reservations: GpuReservations, spool: Path, clock: Clock, *, stand_in: bool = False) -> None:
        self.reservations = reservations
        self.stand_in = stand_in
        self._expected: dict[JobId, tuple[str, int]] = {}
        """Job that is being started -> node, GPUs; since the last `share`."""
        self._singles: dict[JobId, SharedGpus] = {}
        """Expected and running cleared jobs that are in no group of the plan, as groups of one."""
        self._exchanged_s: dict[str, float] = {}
        self._spool = spool
        self._clock = clock
        self._nodes: dict[str, SlurmNode] = {}
        self._partitions: dict[str, str] = {}
        self._types: Mapping[str, str] = {}
        self._residents: dict[JobId, Resident] = {}
        self._going: dict[str, tuple[Sharer, ...]] = {}
        """Node -> cleared jobs whose run has ended and whose processes may still live on the GPUs that they were bound to."""
        self._coming: dict[JobId, tuple[Job, SlurmJob]] = {}
        self._awaited: dict[str, dict[JobId, int]] = {}
        """Node -> job that Slurm is about to start there -> GPUs that Slurm will allocate to it."""
        self._statuses: dict[str, NodeStatus] = {}
        self._orders: dict[str, NodeOrder] = {}
        self._promised: dict[str, dict[int, frozenset[int]]] = {}
        """Node -> number of an order -> devices that the order lets the agent bind jobs to."""
        self._recalled: set[str] = set()
        """Nodes whose order of the previous daemon was searched for."""
        self._groups: tuple[SharedGpus, ...] = ()
        self._strays: frozenset[str] = frozenset()
        """Placeholder jobs on nodes that are not managed, as logged."""
        self._stands: dict[str, bool] = {}
        self._reserved: dict[str, int] = {}
        self._taken: dict[str, Taken] = {}
        """Node -> the events that were taken."""
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
    ) -> None:
        """Take over an observation of the cluster.

        Args:
            nodes: the managed nodes.
            jobs: the managed jobs.
            slurm_jobs: Slurm's records of these jobs.
            cleared: the jobs among them that hold no GPUs in Slurm.
            partitions: managed partitions that are up.
            types: GPU type of each node.
        """
        self._nodes = {node.name: node for node in nodes}
        self._partitions = {
            node.name: next((name for name in node.partitions if name in partitions), "")
            for node in self._nodes.values()
        }
        self._types = types
        # If a status cannot be read, the last one stands until it is old; otherwise the node's GPUs would be allotted anew.
        statuses = {name: self._status(name) or self._statuses.get(name) for name in self._nodes}
        self._statuses = {name: status for name, status in statuses.items() if status is not None}
        self._read_old_orders()
        self._read_taken()
        self._keep_ending()
        self._residents, self._coming, self._awaited = {}, {}, {}
        for job_id, slurm_job in slurm_jobs.items():
            if slurm_job.state in WAITING:
                self._coming[job_id] = jobs[job_id], slurm_job
                self._sent(jobs[job_id], slurm_job)
            elif slurm_job.state in HOLDING and len(slurm_job.nodes) == 1 and slurm_job.nodes[0] in self._nodes:
                is_cleared = job_id in cleared
                node = slurm_job.nodes[0]
                if is_cleared:
                    bound = self._bound(node, job_id)
                else:
                    bound = self.reservations.devices(slurm_job) if self._concerns(node) else None
                leaves = jobs[job_id].phase is Phase.STOPPING and job_id not in self.misplaced
                self._residents[job_id] = Resident(jobs[job_id], slurm_job, is_cleared, bound, leaves)
        self.reservations.forget(slurm_jobs.keys())
        strays = frozenset(
            placeholder.id for placeholder in self.reservations.placeholders if placeholder.node not in self._nodes
        )
        if strays - self._strays:
            text = "they are on nodes that Penstock does not manage; end them with scancel"
            log.warning("placeholder jobs left behind", extra={"jobs": ",".join(sorted(strays)), "text": text})
        self._strays = strays
        # Ended jobs are kept while a measured pack of theirs was not taken: their kinds are needed.
        packed = {job for _, each in self._news("packs", lambda status: status.packs) for job in each.seen.jobs}
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
        if job.phase is not Phase.STARTING or len(slurm_job.required_nodes) != 1:
            return
        node = slurm_job.required_nodes[0]
        if slurm_job.gpus_per_node:
            self._awaited.setdefault(node, {})[job.id] = slurm_job.gpus_per_node
        elif slurm_job.gpus_per_node is None and job.allocation is not None:
            self._expected[job.id] = node, job.allocation.gpus

    def _read_old_orders(self) -> None:
        """Read the orders of the previous daemon, once: agents may still carry them out, and their jobs may run."""
        for node in self._nodes.keys() - self._recalled:
            self._recalled.add(node)
            if (found := _read(order_file(self._spool, node))) is None:
                continue
            try:
                self._orders[node] = NodeOrder.model_validate_json(found)
            except ValidationError:
                log.warning("cannot read the old order to an agent", extra={"node": node})
            else:
                self._promise(node, self._orders[node])

    def _concerns(self, node: str) -> bool:
        """Whether an agent has, or had, anything to do there. If not, Slurm and the spool are left alone."""
        return node in self._statuses or node in self._orders or bool(self.reservations.on(node))

    def _status(self, node: str) -> NodeStatus | None:
        found = _read(status_file(self._spool, node))
        try:
            return None if found is None else NodeStatus.model_validate_json(found)
        except ValidationError as error:
            log.warning("agent status ignored", extra={"node": node, "text": str(error)[:200]})
            return None

    def _carried(self, node: str, job: JobId) -> CarriedJob | None:
        status = self._statuses.get(node)
        return next((each for each in status.jobs if each.job == job), None) if status is not None else None

    def _groups_on(self, node: str) -> tuple[CarriedGroup, ...]:
        """The groups that the agent carries out."""
        return self._statuses[node].groups if node in self._statuses else ()

    def _runs_in(self, node: str, job: JobId) -> SharedGpus | None:
        """The group of a job that has the time slice now, with the job's pack only; None: it has no group or no time slice."""
        return next(
            (
                dataclasses.replace(each.shared, packs=(pack,))
                for each in self._groups_on(node)
                for pack in each.running
                if job in pack.jobs
            ),
            None,
        )

    def _guaranteed(self, node: str) -> set[JobId]:
        """Guaranteed jobs in the order that the agent carries out."""
        groups = self._groups_on(node)
        return {pack.guaranteed for each in groups for pack in each.shared.packs if pack.guaranteed is not None}

    def _bound(self, node: str, job: JobId) -> frozenset[int] | None:
        carried = self._carried(node, job)
        return None if carried is None else frozenset(carried.devices)

    def _read_taken(self) -> None:
        """Find out which events of each agent were taken. If no daemon recorded that, all present events count as taken."""
        for node, status in self._statuses.items():
            taken = self._taken.get(node) or self._left(node)
            if taken is None:
                newest = {
                    kind: max((each.number for each in some), default=0)
                    for kind, some in (("packs", status.packs), ("contained", status.contained), ("xids", status.xids))
                }
                self._keep(node, Taken(history=status.history, **newest))
            else:
                self._taken[node] = taken if taken.history == status.history else Taken(history=status.history)
            for carried in status.jobs:
                self._uses.setdefault(carried.job, {})[node] = carried.use

    def _left(self, node: str) -> Taken | None:
        """What the previous daemon has recorded as taken."""
        found = _read(taken_file(self._spool, node))
        try:
            return None if found is None else Taken.model_validate_json(found)
        except ValidationError:
            log.warning("cannot read which events of an agent were taken", extra={"node": node})
            return None

    def _keep(self, node: str, taken: Taken) -> None:
        self._taken[node] = taken
        path = taken_file(self._spool, node)
        try:
            write_whole(path, taken.model_dump_json())
        except OSError as error:
            text = f"{path}: {error.strerror}; after a restart the daemon would report the same events again"
            log.warning("cannot record which events of an agent were taken", extra={"node": node, "text": text})

    def _news(self, kind: str, of: Callable[[NodeStatus], Sequence[Numbered]]) -> list[tuple[str, Numbered]]:
        """Node and event, for each event that was not taken yet."""
        return [
            (node, each)
            for node, status in self._statuses.items()
            for each in of(status)
            if each.number > getattr(self._taken[node], kind)
        ]

    def _take(self, kind: str, of: Callable[[NodeStatus], Sequence[Numbered]]) -> list[tuple[str, Numbered]]:
        """Take these events: no daemon will see them again."""
        news = self._news(kind, of)
        for node, number in {node: each.number for node, each in news}.items():
            self._keep(node, self._taken[node].model_copy(update={kind: number}))
        return news

    def take_contained(self) -> tuple[Contained, ...]:
        """See `ports.NodeEvents`."""
        return tuple(each for _, each in self._take("contained", lambda status: status.contained))

    def take_xids(self) -> tuple[tuple[str, XidSeen], ...]:
        """See `ports.NodeEvents`."""
        return tuple(self._take("xids", lambda status: status.xids))

    # --- questions of the cluster

    def takes(self, job: JobId, node: str, gpus: int) -> bool:
        """Whether a job that starts on this node only is started cleared. If so, GPUs are reserved for it."""
        group = self._group_of(job)
        if not self._alive(node) and (group is None or not self._crowded(group)):
            return False
        self._expected[job] = node, gpus
        return True

    def reserved(self, node: str) -> int:
        """GPUs of a node that are reserved for cleared jobs, or will be."""
        return max(self._reserved.get(node, 0), self.reservations.gpus(node))

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
        seen = tuple(each.seen for _, each in self._take("packs", lambda status: status.packs))
        memory: dict[str, int] = {}
        for node in self._statuses:
            if self._alive(node):
                memory |= self._statuses[node].gpu_memory_mb
        groups = tuple(group for group in self._groups if self._alive(group.node))
        return SharingState(groups, {job: _summed(uses) for job, uses in self._uses.items()}, seen, (), memory)

    def share(self, groups: Sequence[SharedGpus]) -> None:
        """See `ports.Agents`."""
        self._groups = tuple(groups)
        here = {
            job: (each.slurm.nodes[0], each.gpus)
            for job, each in self._residents.items()
            if each.cleared and not each.leaves
        }
        alone = {job: where for job, where in (here | self._expected).items() if job in here or job in self._coming}
        for group in groups:
            for job in group.jobs:
                alone.pop(job, None)
        if self.reservations.away is not None:  # GPUs that the observation does not know would be treated as lost
            raise ClusterAway(str(self.reservations.away)) from self.reservations.away
        self._singles = {job: group_of_one(node, job, gpus) for job, (node, gpus) in alone.items()}
        misplaced: set[JobId] = set()
        self._reserved, self._stands = {}, {}
        try:
            for name in sorted(self._nodes):
                wanted = [group for group in (*groups, *self._singles.values()) if group.node == name]
                try:
                    misplaced |= self._on_node(self._nodes[name], wanted)
                except StoreError as error:  # one folder that cannot be written must not stop the site
                    log.warning("cannot write an order", extra={"node": name, "text": str(error)})
        except (ControllerAway, TimedOut) as error:
            raise ClusterAway(str(error)) from error
        self._expected = {}
        self.misplaced = frozenset(misplaced)

    def _on_node(self, node: SlurmNode, groups: Sequence[SharedGpus]) -> set[JobId]:
        name = node.name
        here = {job: each for job, each in self._residents.items() if each.slurm.nodes == (name,)}
        placeholders = self.reservations.on(name)
        going = self._going.get(name, ())
        if not (groups or going or any(each.cleared for each in here.values()) or self._concerns(name)):
            return set()
        crowded = [group for group in groups if self._is_reserved(group)]
        together = {job for group in crowded for job in group.jobs}
        ground = Ground(
            gpus=sum(node.gpus.values()),
            free=sum(node.gpus.values()) - sum(node.gpus_used.values()),
            wanted=sum(self._size(group) for group in crowded),
            placeholders=placeholders,
            sharers=tuple(
                Sharer(each.slurm.number, each.gpus, not each.cleared, each.devices, not each.leaves, job in together)
                for job, each in here.items()
            )
            + tuple(
                Sharer(self._coming[job][1].number, gpus, own=True, devices=frozenset(), shares=job in together)
                for job, gpus in self._awaited.get(name, {}).items()
            )
            + going,
            promised=self._still_promised(name) if any(each.cleared for each in here.values()) else frozenset(),
        )
        cleared = [job for job, each in here.items() if each.cleared and job not in together]
        self._reserved[name] = lacking(ground)
        self._stands[name] = stands(ground)
        # Until a node has registered, a new slurmctld (22.05.8) counts GPUs wrong for jobs that start and end there.
        if "UNKNOWN" not in node.state or "DOWN" in node.state:
            self.reservations.carry_out(name, self._partitions[name], ground, [*together, *cleared])
            self._make_way(node, ground, [*together, *cleared])
        allotted, misplaced = self._allot(name, ground, groups, here)
        misplaced |= {
            job
            for group in groups
            if self._wanted(group) > group.gpus
            for job in group.jobs
            if job in here and not here[job].leaves and (told := self._carried(name, job)) is not None and told.mps
        }
        self._order(name, groups, here, allotted, misplaced)
        return misplaced

    def _make_way(self, node: SlurmNode, ground: Ground, jobs: Sequence[str]) -> None:
        """Exchange a placeholder job, so that Slurm starts cleared jobs on a node without a free GPU; see the module."""
        sent = any(
            job.phase is Phase.STARTING and slurm_job.gpus_per_node is None and node.name in slurm_job.required_nodes
            for job, slurm_job in self._coming.values()
        )
        now_s = self._clock.now_s()
        if (
            sent
            and not self.stand_in
            and ground.free <= 0
            and now_s - self._exchanged_s.get(node.name, 0.0) >= EXCHANGE_S
        ):
            self._exchanged_s[node.name] = now_s
            self.reservations.exchange(node.name, self._partitions[node.name], used(ground) | ground.promised, jobs)

    def _is_reserved(self, group: SharedGpus) -> bool:
        """Whether a group needs reserved GPUs, because several jobs are there or one of them is cleared."""
        cleared = (
            job in self._expected or (job in self._residents and self._residents[job].cleared) for job in group.jobs
        )
        return self._crowded(group) or any(cleared)

    def _size(self, group: SharedGpus) -> int:
        """GPUs that a group needs."""
        return min(group.gpus, self._wanted(group))

    def _wanted(self, group: SharedGpus) -> int:
        """GPUs of the group's packs, without packs whose jobs have all ended."""
        return sum(pack.gpus for pack in group.packs if any(map(self._known, pack.jobs)))

    def _crowded(self, group: SharedGpus) -> bool:
        """Whether two or more of its jobs are there."""
        return sum(map(self._known, group.jobs)) > 1

    def _known(self, job: JobId) -> bool:
        return job in self._residents or job in self._coming

    def _group_of(self, job: JobId) -> SharedGpus | None:
        """The job's group in the plan."""
        return next((group for group in self._groups if job in group.jobs), None)

    def _alive(self, node: str) -> bool:
        """Whether the agent answers and cleared jobs can start there."""
        status = self._statuses.get(node)
        if self.stand_in and not (node in self._nodes and self._nodes[node].stand_in):
            return False
        return status is not None and self._clock.now_s() - status.time_s < AWAY_S

    def _still_promised(self, node: str) -> frozenset[int]:
        """Devices of the order that the agent carries out, and of orders that it has not read yet."""
        kept = self._promised.get(node, {})
        status = self._statuses.get(node)
        done = status.order if status is not None else 0
        return frozenset[int]().union(*(devices for number, devices in kept.items() if number >= done))

    def _allot(
        self, node: str, ground: Ground, groups: Sequence[SharedGpus], here: Mapping[JobId, Resident]
    ) -> tuple[dict[SharedGpus, frozenset[int]], set[JobId]]:
        """The reserved GPUs of each group, and the cleared jobs on GPUs that belong to another group."""
        group_of = {job: group for group in groups for job in group.jobs}
        given: dict[SharedGpus, set[int]] = {group: set() for group in groups}
        owner: dict[int, object] = {}
        misplaced: set[JobId] = set()
        # Of two jobs that the plan does not know, one will be asked to leave: not the guaranteed one.
        guaranteed = self._guaranteed(node)

        def first(job: JobId) -> tuple[bool, bool, bool, JobId]:
            return here[job].cleared, job in self._singles, job not in guaranteed, job

        for job in sorted(here, key=first):
            each = here[job]
            mine = group_of.get(job)
            for device in () if each.leaves else each.devices or ():
                if owner.setdefault(device, mine or job) != (mine or job):
                    misplaced.add(job)
                elif mine is not None:
                    given[mine].add(device)
        left = held(ground) - owner.keys() - used(ground)
        status = self._statuses.get(node)
        links = status.links if status is not None else ()
        for group in groups:
            if self._is_reserved(group):
                more = choose(left, group.gpus - len(given[group]), links, given[group])
                given[group].update(more)
                left -= {*more}
        return {group: frozenset(devices) for group, devices in given.items()}, misplaced

    def _order(
        self,
        node: str,
        groups: Sequence[SharedGpus],
        here: Mapping[JobId, Resident],
        allotted: Mapping[SharedGpus, frozenset[int]],
        misplaced: set[JobId],
    ) -> None:
        """Write an order to the agent if it differs from the last one."""
        ordered = {}
        for group in groups:
            cut = group
            for job in misplaced & set(group.jobs):
                cut = without(cut, job)
            if cut.packs:
                ordered[group] = cut, allotted[group]
        grouped = {job for group in groups for job in group.jobs} - misplaced
        alone: dict[JobId, tuple[SharedGpus, frozenset[int]]] = {}
        for job, each in here.items():
            if job not in grouped and each.devices is not None and not each.leaves and job not in misplaced:
                alone[job] = group_of_one(node, job, each.gpus), each.devices
        tables: Sequence[dict[object, tuple[SharedGpus, frozenset[int]]]] = (ordered, alone)  # type: ignore[assignment]
        bound = {job for job, each in here.items() if each.devices}
        guaranteed = self._guaranteed(node)
        joined: set[JobId] = set()
        for job, each in here.items():
            if not (each.leaves or job in misplaced) or job in grouped or not each.devices:
                continue
            neighbours = [(table, key) for table in tables for key, (_, its) in table.items() if its & each.devices]
            if not neighbours:
                alone[job] = group_of_one(node, job, each.gpus), each.devices
                continue
            runs = self._runs_in(node, job)
            for table, key in neighbours:
                group, devices = table[key]
                if runs is not None and (stays := among_its_own(group, job, runs, bound)) is not None:
                    table[key] = stays, devices | each.devices
                    break
            else:
                table, key = neighbours[0]
                group, devices = with_guarantees(table[key][0], guaranteed), table[key][1]
                before = [
                    pack
                    for pack in group.packs
                    if self._stays_before(pack, each.job) and not (runs is not None and bound.isdisjoint(pack.jobs))
                ]
                table[key] = next_in_line(group, job, each.gpus, before), devices
            joined |= {job, *group.jobs}
        told = [*ordered.values()]
        told += [pair for job, pair in alone.items() if job in joined or here[job].cleared or here[job].leaves]
        self._write(node, told, self._ordered_jobs(node, groups, here))

    def _stays_before(self, pack: Pack, departing: Job) -> bool:
        """Whether a pack must not be suspended so that a departing job can save."""
        jobs = [
            self._residents[job].job if job in self._residents else self._coming[job][0]
            for job in pack.jobs
            if self._known(job)
        ]
        return pack.guaranteed is not None or any(
            not job.movable or job.sharing_priority > departing.sharing_priority for job in jobs
        )

    def _ordered_jobs(
        self, node: str, groups: Sequence[SharedGpus], here: Mapping[JobId, Resident]
    ) -> tuple[OrderedJob, ...]:
        jobs: list[OrderedJob] = []
        before = self._orders.get(node)
        known = {each.slurm_job: each for each in before.jobs if each.own_devices} if before is not None else {}
        for job, each in here.items():
            own = () if each.cleared else tuple(sorted(each.devices or ()))
            if not each.cleared and each.devices is None:  # not known: the agent must not take the job for gone
                jobs += [known[each.slurm.number]] if each.slurm.number in known else []
            elif each.cleared or own:
                jobs.append(
                    OrderedJob(
                        job=job,
                        slurm_job=each.slurm.number,
                        uid=each.slurm.uid,
                        gpus=each.gpus,
                        kind=kind_of(each.job),
                        running=True,
                        own_devices=own,
                    )
                )
        for group in groups:
            for pack in group.packs if self._is_reserved(group) else ():
                for job in pack.jobs:
                    if job in self._coming:
                        coming, slurm_job = self._coming[job]
                        wanted = coming.allocation.gpus if coming.allocation is not None else pack.gpus
                        jobs.append(
                            OrderedJob(
                                job=job,
                                slurm_job=slurm_job.number,
                                uid=slurm_job.uid,
                                gpus=min(wanted, pack.gpus),
                                kind=kind_of(coming),
                            )
                        )
        return tuple(sorted(jobs, key=lambda each: each.job))

    def _write(
        self, node: str, groups: Iterable[tuple[SharedGpus, frozenset[int]]], jobs: tuple[OrderedJob, ...]
    ) -> None:
        before, status = self._orders.get(node), self._statuses.get(node)
        number = max(before.number if before is not None else 0, status.order if status is not None else 0)
        gpu_type = self._types.get(node, "")
        order = NodeOrder(
            node=node,
            number=number,
            written_s=self._clock.now_s(),
            groups=tuple(
                OrderedGroup(shared=group, devices=tuple(sorted(devices)), gpu_type=gpu_type)
                for group, devices in groups
            ),
            jobs=jobs,
        )
        if before is not None and before.model_copy(update={"written_s": order.written_s}) == order:
            return
        if before is None and not order.groups and not order.jobs and status is None:
            return
        order = order.model_copy(update={"number": number + 1})
        path = order_file(self._spool, node)
        try:
            agent_folder(self._spool, node).mkdir(parents=True, exist_ok=True)
            write_whole(path, order.model_dump_json())
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror}; the agent of {node} gets no orders until this is fixed"
            ) from None
        self._orders[node] = order
        self._promise(node, order)

    def _promise(self, node: str, order: NodeOrder) -> None:
        kept = self._promised.setdefault(node, {})
        kept[order.number] = frozenset(device for group in order.groups for device in group.devices)
        for number in sorted(kept)[:-ORDERS_KEPT]:
            del kept[number]


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


def _read(path: Path) -> bytes | None:
    """The content of a file in the spool; None: it is missing, too large, or no regular file."""
    try:
        with open_regular(path) as file:
            found = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    return found if len(found) <= MAX_BYTES else None
