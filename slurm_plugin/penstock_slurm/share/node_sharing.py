"""What jobs share on one node: the GPUs to reserve, who gets which of them, and the order to the node's agent.

Pure: `NodeScene` has all that is known of the node, and the functions answer from it.

Departing jobs: how they go on until they have left GPUs on which other jobs stay.

A departing job that runs stays in its pack as it was. No job is suspended for it, and a guaranteed job of that pack keeps its
guarantee. A job that comes in its place waits. A departing job that is suspended gets the next time slice so that it can save.
For that, no pack is suspended that has a guaranteed job, that may not be stopped, or that has a higher priority.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from penstock_scheduler.api.agent_messages import CarriedGroup, CarriedJob, NodeOrder, NodeStatus, OrderedJob
from penstock_scheduler.jobs.pairs import kind_of
from penstock_scheduler.model import Job, JobId, Pack, SharedGpus
from penstock_scheduler.rounds.sharing.node import without
from penstock_slurm.gateway import SlurmJob, SlurmNode
from penstock_slurm.share.gpu_reservation import Ground, Placeholder, Sharer, held, used
from penstock_slurm.share.topology import choose

Devices = frozenset[int]
"""Indexes of GPUs of a node."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A managed job that runs, or is about to run, on one node only."""

    job: Job
    slurm: SlurmJob
    cleared: bool
    """Whether it holds no GPUs in Slurm."""
    devices: Devices | None
    """Indexes of the GPUs that it holds or is bound to; None: not known. Empty: it waits for its first time slice."""
    leaves: bool
    """Whether it is departing."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that it uses."""
        return self.job.allocation.gpus if self.job.allocation is not None else 1


@dataclass(frozen=True, slots=True)
class NodeScene:
    """What is known of one node."""

    node: SlurmNode
    groups: tuple[SharedGpus, ...]
    """Groups that are to share there: of the plan, and those of one job."""
    here: Mapping[JobId, Resident]
    """The jobs that run there."""
    residents: Mapping[JobId, Resident]
    """The jobs that run, on all nodes."""
    coming: Mapping[JobId, tuple[Job, SlurmJob]] = field(default_factory=dict)
    """The managed jobs that are pending."""
    singles: Collection[JobId] = ()
    """Jobs in groups of one that are not of the plan."""
    expected: Collection[JobId] = ()
    """Jobs that are being started without GPUs of Slurm's."""
    awaited: Mapping[JobId, int] = field(default_factory=dict)
    """Job that Slurm is about to start there -> GPUs that Slurm will allocate to it."""
    going: tuple[Sharer, ...] = ()
    """Cleared jobs whose run has ended and whose processes may still live."""
    placeholders: tuple[Placeholder, ...] = ()
    status: NodeStatus | None = None
    """What the agent reported last."""
    order: NodeOrder | None = None
    """What the agent was told last."""
    promised: Devices = frozenset()
    """Devices in orders that the agent may still carry out."""

    def knows(self, job: JobId) -> bool:
        """Whether a job runs or waits."""
        return job in self.residents or job in self.coming

    def crowded(self, group: SharedGpus) -> bool:
        """Whether two or more jobs of the group are there."""
        return sum(map(self.knows, group.jobs)) > 1

    def is_reserved(self, group: SharedGpus) -> bool:
        """Whether a group needs reserved GPUs, because several jobs are there or one of them is cleared."""
        return self.crowded(group) or any(
            job in self.expected or (job in self.residents and self.residents[job].cleared) for job in group.jobs
        )

    def wanted(self, group: SharedGpus) -> int:
        """GPUs of the group's packs, without packs whose jobs have all ended."""
        return sum(pack.gpus for pack in group.packs if any(map(self.knows, pack.jobs)))

    def carried(self, job: JobId) -> CarriedJob | None:
        """What the agent reports about a job; None: nothing."""
        jobs = self.status.jobs if self.status is not None else ()
        return next((each for each in jobs if each.job == job), None)

    @property
    def _carried_groups(self) -> tuple[CarriedGroup, ...]:
        return self.status.groups if self.status is not None else ()

    def runs_in(self, job: JobId) -> SharedGpus | None:
        """The group of a job that has the time slice now, with the job's pack only; None: it has no group or no time slice."""
        running = ((each, pack) for each in self._carried_groups for pack in each.running if job in pack.jobs)
        return next((dataclasses.replace(each.shared, packs=(pack,)) for each, pack in running), None)

    @property
    def guaranteed(self) -> set[JobId]:
        """Guaranteed jobs in the order that the agent carries out."""
        packs = (pack for each in self._carried_groups for pack in each.shared.packs)
        return {pack.guaranteed for pack in packs if pack.guaranteed is not None}


def together(scene: NodeScene) -> set[JobId]:
    """The jobs of the groups that need reserved GPUs."""
    return {job for group in scene.groups if scene.is_reserved(group) for job in group.jobs}


def ground(scene: NodeScene) -> Ground:
    """The state of the node, for its GPU reservation."""
    gpus, here, shared = sum(scene.node.gpus.values()), scene.here, together(scene)
    reserved = [group for group in scene.groups if scene.is_reserved(group)]
    running = (
        Sharer(each.slurm.number, each.gpus, not each.cleared, each.devices, not each.leaves, job in shared)
        for job, each in here.items()
    )
    awaited = (
        Sharer(scene.coming[job][1].number, count, own=True, devices=frozenset(), shares=job in shared)
        for job, count in scene.awaited.items()
    )
    return Ground(
        gpus=gpus,
        free=gpus - sum(scene.node.gpus_used.values()),
        wanted=sum(min(group.gpus, scene.wanted(group)) for group in reserved),
        placeholders=scene.placeholders,
        sharers=(*running, *awaited, *scene.going),
        promised=scene.promised if any(each.cleared for each in here.values()) else frozenset(),
    )


def allot(scene: NodeScene, state: Ground) -> tuple[dict[SharedGpus, Devices], set[JobId]]:
    """The reserved GPUs of each group, and the cleared jobs on GPUs that belong to another group."""
    here, group_of = scene.here, {job: group for group in scene.groups for job in group.jobs}
    given: dict[SharedGpus, set[int]] = {group: set() for group in scene.groups}
    owner: dict[int, object] = {}
    misplaced: set[JobId] = set()
    # Of two jobs that the plan does not know, one will be asked to leave: not the guaranteed one.
    guaranteed = scene.guaranteed

    def first(job: JobId) -> tuple[bool, bool, bool, JobId]:
        return here[job].cleared, job in scene.singles, job not in guaranteed, job

    for job in sorted(here, key=first):
        each, mine = here[job], group_of.get(job)
        for device in () if each.leaves else each.devices or ():
            if owner.setdefault(device, mine or job) != (mine or job):
                misplaced.add(job)
            elif mine is not None:
                given[mine].add(device)
    left = held(state) - owner.keys() - used(state)
    links = scene.status.links if scene.status is not None else ()
    for group in scene.groups:
        if scene.is_reserved(group):
            more = choose(left, group.gpus - len(given[group]), links, given[group])
            given[group].update(more)
            left -= {*more}
    return {group: frozenset(devices) for group, devices in given.items()}, misplaced


def cannot_wait(scene: NodeScene) -> set[JobId]:
    """Clients of NVIDIA's MPS whose group has time slices now: they cannot be suspended."""
    here, found = scene.here, set()
    for group in scene.groups:
        if scene.wanted(group) <= group.gpus:
            continue
        for job in group.jobs:
            carried = scene.carried(job)
            if job in here and not here[job].leaves and carried is not None and carried.mps:
                found.add(job)
    return found


# --- the order

Told = tuple[SharedGpus, Devices]
"""A group as the agent is told of it, and its GPUs."""


def ordered_groups(
    scene: NodeScene, allotted: Mapping[SharedGpus, Devices], misplaced: Collection[JobId]
) -> list[Told]:
    """The groups for the agent's order.

    A departing job, or a misplaced one, goes on among the jobs that stay on its GPUs until it has left them; see `departing.py`.
    """
    here = scene.here
    ordered = _without_misplaced(scene, allotted, misplaced)
    grouped = {job for group in scene.groups for job in group.jobs} - {*misplaced}
    alone: dict[object, Told] = {
        job: (group_of_one(scene.node.name, job, each.gpus), each.devices)
        for job, each in here.items()
        if job not in grouped and each.devices is not None and not each.leaves and job not in misplaced
    }
    joined: set[JobId] = set()
    for job, each in here.items():
        if not (each.leaves or job in misplaced) or job in grouped or not each.devices:
            continue
        found = next((table for table in (ordered, alone) if _beside(table, each.devices)), None)
        if found is None:
            alone[job] = group_of_one(scene.node.name, job, each.gpus), each.devices
        else:
            joined |= {job, *_join(scene, job, (ordered, alone))}
    shown = (pair for job, pair in alone.items() if job in joined or here[str(job)].cleared or here[str(job)].leaves)
    return [*ordered.values(), *shown]


def _without_misplaced(
    scene: NodeScene, allotted: Mapping[SharedGpus, Devices], misplaced: Collection[JobId]
) -> dict[object, Told]:
    """The groups of the plan that have jobs which are in their place."""
    found: dict[object, Told] = {}
    for group in scene.groups:
        cut = group
        for job in {*misplaced} & set(group.jobs):
            cut = without(cut, job)
        if cut.packs:
            found[group] = cut, allotted[group]
    return found


def _beside(table: Mapping[object, Told], devices: Devices) -> list[object]:
    """The groups of a table that have some of these GPUs."""
    return [key for key, (_, its) in table.items() if its & devices]


def _join(scene: NodeScene, job: JobId, tables: Sequence[dict[object, Told]]) -> tuple[JobId, ...]:
    """Put a departing job into a group that has some of its GPUs. Returns the jobs of that group before."""
    each, runs = scene.here[job], scene.runs_in(job)
    mine = each.devices or frozenset()
    bound = {other for other, its in scene.here.items() if its.devices}
    neighbours = [(table, key) for table in tables for key in _beside(table, mine)]
    for table, key in neighbours:
        group, devices = table[key]
        if runs is not None and (stays := among_its_own(group, job, runs, bound)) is not None:
            table[key] = stays, devices | mine
            return group.jobs
    table, key = neighbours[0]
    group, devices = with_guarantees(table[key][0], scene.guaranteed), table[key][1]
    before = [
        pack
        for pack in group.packs
        if _stays_before(scene, pack, each.job) and not (runs is not None and bound.isdisjoint(pack.jobs))
    ]
    table[key] = next_in_line(group, job, each.gpus, before), devices
    return group.jobs


def _stays_before(scene: NodeScene, pack: Pack, departing: Job) -> bool:
    """Whether a pack must not be suspended so that a departing job can save."""
    jobs = [
        scene.residents[job].job if job in scene.residents else scene.coming[job][0]
        for job in pack.jobs
        if scene.knows(job)
    ]
    return pack.guaranteed is not None or any(
        not job.movable or job.sharing_priority > departing.sharing_priority for job in jobs
    )


def ordered_jobs(scene: NodeScene) -> tuple[OrderedJob, ...]:
    """The jobs for the agent's order."""
    jobs: list[OrderedJob] = []
    known = {each.slurm_job: each for each in scene.order.jobs if each.own_devices} if scene.order is not None else {}
    for job, each in scene.here.items():
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
    for group in scene.groups:
        for pack in group.packs if scene.is_reserved(group) else ():
            jobs += [_coming(*scene.coming[job], pack) for job in pack.jobs if job in scene.coming]
    return tuple(sorted(jobs, key=lambda each: each.job))


def _coming(job: Job, slurm_job: SlurmJob, pack: Pack) -> OrderedJob:
    wanted = job.allocation.gpus if job.allocation is not None else pack.gpus
    return OrderedJob(
        job=job.id,
        slurm_job=slurm_job.number,
        uid=slurm_job.uid,
        gpus=min(wanted, pack.gpus),
        kind=kind_of(job),
    )


def group_of_one(node: str, job: JobId, gpus: int) -> SharedGpus:
    """A group of one job, which shares its GPUs with no other."""
    return SharedGpus(node, gpus, (Pack((job,), gpus),))


def only(group: SharedGpus, jobs: Collection[JobId]) -> SharedGpus:
    """The group with these jobs only."""
    return reduce(without, [job for job in group.jobs if job not in jobs], group)


def among_its_own(group: SharedGpus, job: JobId, runs: SharedGpus, bound: Collection[JobId]) -> SharedGpus | None:
    """The group with a departing job in the pack in which it runs; None: no other job of that pack is in the group.

    Args:
        group: the group as planned after the job has left.
        job: the departing job, which is not in the group.
        runs: the group in which the job runs, with its pack only.
        bound: jobs that are bound to GPUs. Those that are to join the pack get a pack of their own; others wait.
    """
    mates = next((pack for pack in group.packs if not {*pack.jobs}.isdisjoint(runs.jobs)), None)
    if mates is None:
        return None
    stays = dataclasses.replace(only(runs, {*mates.jobs, job}).packs[0], priority=mates.priority)
    come = only(dataclasses.replace(group, packs=(mates,)), {*bound} - {*runs.jobs}).packs
    packs = [each for pack in group.packs for each in ((stays, *come) if pack is mates else (pack,))]
    return dataclasses.replace(group, gpus=max(group.gpus, stays.gpus), packs=tuple(packs), slice_s=runs.slice_s)


def next_in_line(group: SharedGpus, job: JobId, gpus: int, before: Collection[Pack]) -> SharedGpus:
    """The group with a departing job in a pack of its own, which comes before all packs but these."""
    top = max((pack.priority for pack in group.packs), default=0)
    packs = [
        dataclasses.replace(each, priority=each.priority + top + 2) if each in before else each for each in group.packs
    ]
    return dataclasses.replace(group, packs=(*packs, Pack((job,), gpus, top + 1)))


def with_guarantees(group: SharedGpus, guaranteed: Collection[JobId]) -> SharedGpus:
    """The group with these jobs guaranteed in packs without a guaranteed job: a departing job must not end a guarantee."""
    packs = (
        dataclasses.replace(
            pack, guaranteed=pack.guaranteed or next((job for job in pack.jobs if job in guaranteed), None)
        )
        for pack in group.packs
    )
    return dataclasses.replace(group, packs=tuple(packs))
