"""Jobs that share GPUs on the simulated cluster: the port `Agents`, in time slices and packs.

The truth about co-located jobs of a workload, for simulations in which jobs share GPUs.

A table of pairs knows a job by its *kind*. That is the workload's column `kind`, or else the first of its family,
model, `USER/NAME` and name that the table has, also in Gavel's notation `('ResNet-18 (batch size 16)', 1)` for the kind
and its number of GPUs. A job of a kind that is not in the table is a kind of its own: beside it, only each job's
utilisation counts. If that is unknown, it is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock_profiles.colocation import Colocation
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.model import JobId, Share, SharedGpus, SharingState
from penstock_scheduler.rounds.sharing.node import Group, without
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind, SimulatedAgents
from penstock_scheduler.simulator.disturbances import draw
from penstock_scheduler.simulator.jobs import Event, Events, SimulatedJob
from penstock_scheduler.simulator.node_book import NodeBook
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob


class ClusterSharing:
    """The groups of jobs that share GPUs, and the GPUs that these groups hold.

    Args:
        agents: the agents of all nodes.
        jobs: all jobs.
        held: the jobs that hold GPUs.
        book: the nodes.
        events: future events, among them the ends of time slices.
        change_speed: lets a job continue at its present speed.
    """

    def __init__(
        self,
        agents: SimulatedAgents,
        jobs: Mapping[JobId, SimulatedJob],
        held: Mapping[JobId, SimulatedJob],
        book: NodeBook,
        events: Events,
        change_speed: Callable[[SimulatedJob, float], None],
    ) -> None:
        self.agents = agents
        self._jobs, self._held, self._book, self._events = jobs, held, book, events
        self._change_speed = change_speed
        self._members: set[JobId] = set()
        """Jobs that use the GPUs of a group."""
        self._slices: dict[int, Group] = {}
        """Number of the event at which a slice ends -> its group."""
        self._reserved: dict[int, Group] = {}
        """Groups that hold their GPUs, by identity."""
        self._wanted: tuple[SharedGpus, ...] = ()
        self._joins: dict[JobId, SharedGpus] = {}
        """The group that each job is to be in."""
        self._alone_since_s: dict[JobId, float] = {}

    def __contains__(self, job: JobId) -> bool:
        return job in self._members

    def state(self, active: Iterable[JobId], now_s: float) -> SharingState:
        """What the agents report: see `ports.Agents.sharing`."""
        for job_id, since_s in self._alone_since_s.items():
            since_s = max(since_s, self._jobs[job_id].runs[-1].ready_s)
            if now_s > since_s:
                self.agents.ran_alone(job_id, now_s - since_s, now_s)
                self._alone_since_s[job_id] = now_s
        return SharingState(
            tuple(group.order for group in self.agents.groups),
            {job_id: self.agents.use(job_id) for job_id in active},
            self.agents.take_seen(),
            (),
            self.agents.gpu_memory_mb,
        )

    def share(self, groups: Sequence[SharedGpus], now_s: float) -> None:
        """Carry out these groups from now on. A job joins as soon as it has started on the node."""
        self._wanted = tuple(groups)
        self._joins = {job_id: group for group in groups for job_id in group.jobs}
        self._regroup(now_s)

    def acted(self, now_s: float) -> None:
        """Note that actions were carried out: jobs may have started on the nodes of their groups."""
        if self._wanted:
            self._regroup(now_s)

    def started(self, job: SimulatedJob, now_s: float) -> None:
        """Note that a job holds GPUs of its own from now on."""
        self.agents.started(job.id, job.held.gpu_type, now_s)
        self._alone_since_s[job.id] = now_s
        if job.id in self._joins:
            self._regroup(now_s)  # so that the next job finds these GPUs reserved

    def left(self, job: SimulatedJob, now_s: float) -> None:
        """Note that a job of a group has left its GPUs."""
        self._members.discard(job.id)
        group = self.agents.left(job.id, now_s, ended=job.finish_s is not None)
        self._reserve_gpus(now_s)
        if group is not None:
            self._next_slice(group, now_s)
            self._change_speeds(group, now_s)

    def count_alone(self, job_id: JobId, now_s: float) -> None:
        """Count the time for which a job has had its GPUs to itself."""
        since_s = self._alone_since_s.pop(job_id, now_s)
        since_s = max(since_s, self._jobs[job_id].runs[-1].ready_s)
        if now_s > since_s:
            self.agents.ran_alone(job_id, now_s - since_s, now_s)

    def needs(self, job_id: JobId, share: Share) -> int:
        """GPUs that must be free for a job to start: none where it joins others on GPUs that are reserved already."""
        group = self._joins.get(job_id)
        if group is None or group.node != share.node:
            return share.gpus
        reserved = not self._members.isdisjoint(group.jobs)
        return 0 if reserved else group.gpus

    def is_stale(self, event: Event) -> bool:
        """Whether the time slice has ended before this event."""
        return self._slices[event.number].event != event.number

    def drop(self, event: Event) -> None:
        """Forget the event of a time slice."""
        self._slices.pop(event.number, None)

    def end_slice(self, event: Event) -> None:
        """End the time slice of a group."""
        group = self._slices.pop(event.number)
        self.agents.end_slice(group, event.at_s)
        self._next_slice(group, event.at_s)
        self._change_speeds(group, event.at_s)

    def _regroup(self, now_s: float) -> None:
        here = []
        for group in self._wanted:
            for job_id in group.jobs:
                if not self._is_on(job_id, group.node):
                    group = without(group, job_id)
            if group.packs:
                here.append(group)
        members = {job_id for group in here for job_id in group.jobs}
        if here == [group.order for group in self.agents.groups] and members == self._members:
            return
        running = {
            job_id: job_id not in self._members and self._jobs[job_id].runs[-1].start_s < now_s for job_id in members
        }
        for job_id in members - self._members:
            self._book.take_all(self._jobs[job_id].held, -1, now_s)
            self.count_alone(job_id, now_s)
        for job_id in self._members - members:
            if job_id in self._held:
                self._book.take_all(self._jobs[job_id].held, 1, now_s)
                self._alone_since_s[job_id] = now_s
        self._members = members
        fresh = self.agents.order(here, now_s, running)
        self._reserve_gpus(now_s)
        for group_now in fresh:
            self._next_slice(group_now, now_s)
        for job_id in list(self._held):
            self._change_speed(self._jobs[job_id], now_s)

    def _is_on(self, job_id: JobId, node: str) -> bool:
        job = self._jobs[job_id]
        return job.allocation is not None and job.allocation.nodes == (node,)

    def _reserve_gpus(self, now_s: float) -> None:
        """Take the GPUs of the present groups, and give back those of former groups."""
        now = {id(group): group for group in self.agents.groups}
        for key, group in self._reserved.items():
            if key not in now:
                self._book.take(group.order.node, -group.order.gpus, now_s)
                group.event = -1
        for key, group in now.items():
            if key not in self._reserved:
                self._book.take(group.order.node, group.order.gpus, now_s)
        self._reserved = now

    def _next_slice(self, group: Group, now_s: float) -> None:
        group.event = self._events.push(now_s + group.order.slice_s, "slice", group.order.node)
        self._slices[group.event] = group

    def _change_speeds(self, group: Group, now_s: float) -> None:
        for job_id in group.order.jobs:
            self._change_speed(self._jobs[job_id], now_s)


OF_GPUS = re.compile(r"^\(.*, (\d+)\)$")
"""A kind of Gavel's table."""

MIB_OF_GB = 1e9 / 2**20


def gpus_of(kind: str) -> int | None:
    """Number of GPUs of a kind of Gavel's table; None: its name does not say."""
    found = OF_GPUS.match(kind)
    return int(found[1]) if found is not None else None


@dataclass(frozen=True, slots=True)
class Sharers:
    """The truth about co-located jobs.

    Args:
        pairs: shares of pairs, by the cluster's names of GPU types.
        kinds: kinds of all jobs.
        unknown: number of jobs of kinds that are not in the table.
        assumed: jobs for which the utilisation of a job that runs alone is assumed.
        settings: costs of sharing.
        gpu_memory_mb: memory of one GPU by GPU type, MB, as far as it is known.
    """

    pairs: Colocation
    kinds: Mapping[JobId, SharingKind]
    unknown: int
    assumed: tuple[JobId, ...]
    settings: AgentSettings
    gpu_memory_mb: Mapping[str, int]

    def agents(self) -> SimulatedAgents:
        """New agents for one simulation."""
        return SimulatedAgents(self.kinds, self.pairs, self.settings, self.gpu_memory_mb)


def sharers(
    workload: Workload,
    gpu_types: Sequence[str],
    pairs: Colocation,
    settings: AgentSettings,
    *,
    drawn: bool = False,
    assumed: float = 1.0,
    gpu_memory_mb: Mapping[str, int] | None = None,
) -> Sharers:
    """The truth about the jobs of a workload.

    Args:
        workload: the jobs.
        gpu_types: GPU types of the cluster.
        pairs: shares of pairs. For other pairs, only the utilisation of each job counts.
        settings: costs of sharing. Their seed also draws the kinds.
        drawn: whether a job of a kind that is not in the table gets a random kind with as many GPUs.
        assumed: utilisation of a job that runs alone, in [0, 1], for jobs of unknown utilisation.
        gpu_memory_mb: memory of one GPU by GPU type, MB, as the site knows it. For other types the catalogue's counts.
    """
    known = dict.fromkeys(kind for gpu_type in gpu_types for kind in pairs.kinds(gpu_type))
    by_gpus: dict[int | None, list[str]] = {}
    for kind in known:
        by_gpus.setdefault(gpus_of(kind), []).append(kind)
    kinds, unknown, guessed = {}, 0, []
    for job in workload.jobs:
        name = next((name for name in names_of(job) if name in known), None)
        unknown += name is None
        if name is None and drawn and known:
            fitting = by_gpus[_size(job.gpus, by_gpus)]
            name = fitting[draw(settings.seed, "kind", job.id).integers(len(fitting))]
        used = job.gpu_utilisation if job.gpu_utilisation is not None else utilisation(pairs, gpu_types, name)
        guessed += [job.id] if used is None else []
        kinds[job.id] = SharingKind(
            name or next(names_of(job)), assumed if used is None else used, int(job.gpu_mem_mb or 0)
        )
    gpus = load_gpus()
    known_types = {name: gpus.canonical(name) for name in gpu_types}
    memory_mb = {name: int(gpus[of].memory_gb * MIB_OF_GB) for name, of in known_types.items() if of in gpus}
    return Sharers(pairs, kinds, unknown, tuple(guessed), settings, memory_mb | dict(gpu_memory_mb or {}))


def utilisation(pairs: Colocation, gpu_types: Sequence[str], kind: str | None) -> float | None:
    """Utilisation of a kind alone, in [0, 1]: the mean over the GPU types on which it is known; None: it is unknown."""
    if kind is None:
        return None
    told = []
    for gpu_type in gpu_types:
        used = pairs.utilisation(gpu_type, kind)
        used = pairs.utilisation_by_itself(gpu_type, kind) if used is None else used
        told += [used] if used is not None else []
    return sum(told) / len(told) if told else None


def names_of(job: WorkloadJob) -> Iterator[str]:
    """Names by which a table may know the job, the surest first."""
    own = f"{job.user}/{job.name}" if job.name else ""  # as `pairs.kind_of` has it
    for name in (job.kind, job.spec.model_family, job.model, own, job.name, job.id):
        if name:
            yield name
            yield f"('{name}', {job.gpus})"


def _size(gpus: int, known: Mapping[int | None, object]) -> int | None:
    """The largest number of GPUs of a kind that is no more than the job's; without one, the smallest."""
    sizes = sorted(size for size in known if size is not None)
    if not sizes:
        return None
    return max((size for size in sizes if size <= gpus), default=sizes[0])
