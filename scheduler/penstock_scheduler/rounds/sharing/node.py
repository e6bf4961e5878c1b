"""How groups of co-located jobs run on a node: time slices, the time each job has had, and AntMan's control.

This is the only copy of these rules: the agents of a simulated cluster and the agent of a real node are shells around
`Groups`. It reads no clock and touches no process; what it must know of the node it asks its `NodeProbe`. A time slice
ends for all packs of a group at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock_scheduler.model import JobId, Pack, PackSeen, SharedGpus
from penstock_scheduler.rounds.sharing.control import ControlSettings, ShareControl, Steps, advance
from penstock_scheduler.rounds.sharing.slices import entry_s, handed_on, next_packs


@dataclass(slots=True)
class Group:
    """A `SharedGpus` that runs on the node."""

    order: SharedGpus
    since_s: float
    """When the present time slice began, s."""
    running: tuple[Pack, ...] = ()
    resumed: frozenset[JobId] = frozenset()
    """Jobs that were not running before this time slice."""
    crowded: frozenset[JobId] = frozenset()
    """Jobs that run although `NodeProbe.crowded` is true of their pack, because no other pack could run."""
    control: ShareControl = field(default_factory=ShareControl)
    event: int = -1
    """Number of the event at which the time slice ends, if the shell has a queue of events."""


class NodeProbe(Protocol):
    """What `Groups` asks of a node, real or simulated."""

    def seen(self, pack: Pack) -> PackSeen | None:
        """Speeds of a pack without a guaranteed job that ran for the whole time slice; None: not measured."""
        ...

    def steps(self, pack: Pack, group: Group) -> Steps:
        """Steps of the guaranteed job in the time slice that is over."""
        ...

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        """The jobs among those to be suspended together that cannot be suspended now. They keep their time slice."""
        ...

    def begun_s(self, job: JobId) -> float:
        """When the job began to train in its present run, s; inf: it is still starting."""
        ...

    def on_s(self, job: JobId) -> float:
        """When a job of the present time slice got its GPUs, s; inf: it waits for departing jobs."""
        ...

    def off_s(self, job: JobId) -> float:
        """When a job of an earlier time slice left its GPUs, s; inf: it is still on them."""
        ...

    def pinned(self, job: JobId) -> frozenset[int]:
        """GPUs without which the job cannot run; empty: it runs on any GPUs of its group."""
        ...

    def crowded(self, pack: Pack) -> bool:
        """Whether suspended jobs hold so much of the pack's GPUs that the pack does not fit there."""
        ...


@dataclass(slots=True)
class Account:
    """What is known about jobs beyond their groups. A shell saves this and the groups."""

    served_s: dict[JobId, float] = field(default_factory=dict)
    """Time that each job counts as having had in its groups, s, including its starts (`slices.next_packs`)."""
    ran_s: dict[JobId, float] = field(default_factory=dict)
    """Time for which each job trained, s: it held GPUs, had started, and was not suspended."""
    profiled: set[JobId] = field(default_factory=set)
    """Jobs that have run alone for a time slice."""
    moved_s: dict[JobId, float] = field(default_factory=dict)
    """When each job last started, entered or left a pack, s."""
    first_slice_s: dict[JobId, float] = field(default_factory=dict)
    """When each job had first run for a time slice, s."""
    packs: set[frozenset[JobId]] = field(default_factory=set)
    """The present packs of two or more jobs."""

    def forget(self, keep: Collection[JobId]) -> None:
        """Drop what is known about all other jobs."""
        for table in (self.served_s, self.ran_s, self.moved_s, self.first_slice_s):
            for job in [job for job in table if job not in keep]:
                del table[job]
        self.profiled &= set(keep)


class Groups:
    """The groups of a node or of a cluster, and the time that their jobs have had.

    Args:
        view: the node.
        control: how guaranteed jobs keep their speed.
        groups: the groups of a shell that starts again.
        account: the account of a shell that starts again.
    """

    def __init__(
        self,
        view: NodeProbe,
        control: ControlSettings,
        groups: Sequence[Group] = (),
        account: Account | None = None,
    ) -> None:
        self._view, self._control = view, control
        self.groups = list(groups)
        self.group_of: dict[JobId, Group] = {job: group for group in self.groups for job in group.order.jobs}
        self.account = account or Account()
        self.resumes: Counter[JobId] = Counter()
        """Times that each job was resumed."""
        self._seen: dict[frozenset[JobId], PackSeen] = {}

    # Orders.

    def order(self, groups: Sequence[SharedGpus], now_s: float, running: Mapping[JobId, bool]) -> list[Group]:
        """Run these groups from now on. Returns those that begin a new time slice.

        Args:
            groups: the groups, only with jobs that are on their nodes.
            now_s: the time.
            running: each of these jobs -> whether it has had its GPUs to itself until now.
        """
        before = {_unranked(group.order): group for group in self.groups}
        was_in = dict(self.group_of)
        fresh: list[Group] = []
        for order in before.keys() - set(map(_unranked, groups)):
            self._count(before[order], now_s)
        after: list[Group] = []
        for wanted in groups:
            group = before.get(_unranked(wanted))
            if group is None:
                group = self._new(wanted, now_s, was_in, running)
                fresh.append(group)
            elif group.order != wanted:  # only ranks differ, which count from the next time slice on
                now = {pack.jobs for pack in group.running}
                group.order, group.running = wanted, tuple(pack for pack in wanted.packs if pack.jobs in now)
            after.append(group)
        self.groups = after
        self.group_of = {job: group for group in after for job in group.order.jobs}
        packs = {frozenset(pack.jobs) for group in self.groups for pack in group.order.packs if len(pack.jobs) > 1}
        account = self.account
        account.moved_s |= {job: now_s for key in account.packs ^ packs for job in key}
        account.packs = packs
        for job in self.group_of.keys() - account.moved_s.keys():
            self.started(job, now_s)  # a shell that was not told of its start, as where it starts in a group of its own
        return fresh

    def _new(
        self, wanted: SharedGpus, now_s: float, was_in: Mapping[JobId, Group], running: Mapping[JobId, bool]
    ) -> Group:
        """A group that keeps what its jobs had in earlier groups. New jobs get the next time slice."""
        old = {id(was_in[job]): was_in[job] for job in wanted.jobs if job in was_in}
        fresh = [job for job in wanted.jobs if job not in was_in]
        self._enter(wanted, fresh, running)
        group = Group(wanted, now_s)
        before = {job for each in old.values() for pack in each.running for job in pack.jobs}
        before |= {job for job in fresh if running[job]}
        group.running = tuple(pack for pack in wanted.packs if before.issuperset(pack.jobs))
        same = [
            each.control
            for each in old.values()
            if [p.guaranteed for p in each.order.packs] == [p.guaranteed for p in wanted.packs]
            and set(each.order.jobs) == set(wanted.jobs)
        ]
        group.control = same[0] if same else ShareControl()
        self._begin_slice(group, now_s, before)
        return group

    def _enter(self, wanted: SharedGpus, fresh: Sequence[JobId], running: Mapping[JobId, bool]) -> None:
        """Set the time that fresh jobs of a group count as having had."""
        served_s = self.account.served_s
        earlier = [job for job in wanted.jobs if job not in fresh]
        known = [served_s[job] for job in earlier]
        served_s |= {job: max(known, default=0.0) for job in fresh if running[job]}
        had = [job for job in wanted.jobs if running[job] or (job in earlier and self.account.ran_s.get(job))]
        newcomer_s = entry_s([served_s[job] for job in had], wanted.slice_s)
        served_s |= {job: newcomer_s for job in fresh if not running[job]}

    # Slices.

    def end_slice(self, group: Group, now_s: float) -> None:
        """End a time slice: count it, measure, and choose the next packs."""
        self._count(group, now_s)
        self._begin_slice(group, now_s, {job for pack in group.running for job in pack.jobs})

    def _begin_slice(self, group: Group, now_s: float, before: set[JobId]) -> None:
        wanted = group.order
        pinned = {pack: frozenset[int]().union(*(self._view.pinned(job) for job in pack.jobs)) for pack in wanted.packs}
        crowded = [pack for pack in wanted.packs if self._view.crowded(pack)]
        served = self._hand_on(wanted, pinned, crowded)
        stays: set[JobId] = set()
        while True:
            keep = [pack for pack in wanted.packs if not stays.isdisjoint(pack.jobs)]
            chosen = next_packs(
                wanted.packs, served, wanted.gpus, group.running, pinned=pinned, keep=keep, last=crowded
            )
            after = {job for pack in chosen for job in pack.jobs}
            leaving = before & set(wanted.jobs) - after
            refused = set(self._view.refused(leaving)) - stays if leaving else set()
            if not refused:
                break
            stays |= refused
        resumed = after - before
        group.running, group.resumed, group.since_s = chosen, frozenset(resumed), now_s
        group.crowded = frozenset(job for pack in chosen if pack in crowded for job in pack.jobs)
        self.resumes.update(
            job for job in resumed if self.account.ran_s.get(job)
        )  # not jobs that run for the first time

    def _hand_on(
        self, wanted: SharedGpus, pinned: Mapping[Pack, frozenset[int]], crowded: Sequence[Pack]
    ) -> Mapping[Pack, float]:
        """Count the turns that packs hand on to others, see `handed_on`. Returns the time that each pack has had."""
        served_s = self.account.served_s
        served = {pack: sum(served_s[job] for job in pack.jobs) / len(pack.jobs) for pack in wanted.packs}
        handed = handed_on(wanted.packs, served, pinned, crowded)
        for pack in wanted.packs:
            for job in pack.jobs:
                served_s[job] += handed[pack] - served[pack]
        return handed

    def _count(self, group: Group, now_s: float) -> None:
        """Count the time slice so far. A departing job counts as having its GPUs until it is off them, the next job
        from then on."""
        if now_s <= group.since_s:
            return
        since_s, group.since_s = group.since_s, now_s
        ran_s: dict[JobId, float] = {}
        for job in group.order.jobs:
            on_gpus = any(job in pack.jobs for pack in group.running)
            from_s = max(since_s, self._view.on_s(job)) if on_gpus else since_s
            until_s = now_s if on_gpus else min(now_s, self._view.off_s(job))
            if until_s > from_s:
                self.account.served_s[job] += until_s - from_s
                ran_s[job] = max(until_s - max(from_s, self._view.begun_s(job)), 0.0)
                self._ran(job, ran_s[job], until_s, group.order.slice_s)
        for pack in group.running:
            if min(ran_s.get(job, 0.0) for job in pack.jobs) < group.order.slice_s - 1e-6:
                continue
            if len(pack.jobs) == 1:
                self.account.profiled.add(pack.jobs[0])
            elif pack.guaranteed is None:
                seen = self._view.seen(pack)
                if seen is not None:
                    self._seen[frozenset(pack.jobs)] = seen
            else:
                if group.control.share == 0:
                    self.account.profiled.add(pack.guaranteed)
                # Each job gets the share, so it is smaller for many jobs.
                others = max(len(pack.jobs) - 1, 1)
                shares = {name: getattr(self._control, name) / others for name in ("first_share", "least_share")}
                settings = self._control.model_copy(update=shares)
                group.control = advance(group.control, self._view.steps(pack, group), settings)

    # Events of jobs.

    def started(self, job: JobId, now_s: float) -> None:
        """Note that a job holds GPUs from now on."""
        self.account.moved_s[job] = now_s

    def ran_alone(self, job: JobId, seconds: float, now_s: float, slice_s: float = 60.0) -> None:
        """Note that a job has had its GPUs to itself for these seconds until now."""
        self._ran(job, seconds, now_s, slice_s)
        if seconds >= slice_s - 1e-6:
            self.account.profiled.add(job)

    def left(self, job: JobId, now_s: float) -> Group | None:
        """Remove a job that has left its GPUs. Returns its group, in which the next packs run; None: no job is left in
        it."""
        group = self.group_of.pop(job, None)
        if group is None:
            return None
        self._count(group, now_s)
        gone = {key for key in self.account.packs if job in key}
        self.account.packs -= gone
        self.account.moved_s |= {each: now_s for key in gone for each in key}
        before = {each for pack in group.running for each in pack.jobs}
        group.order = without(group.order, job)
        group.running = tuple(pack for pack in (_cut(pack, job) for pack in group.running) if pack.jobs)
        if not group.order.packs:
            self.groups.remove(group)
            return None
        group.control = ShareControl()
        self._begin_slice(group, now_s, before - {job})
        return group

    def _ran(self, job: JobId, seconds: float, now_s: float, slice_s: float) -> None:
        account = self.account
        before = account.ran_s.get(job, 0.0)
        account.ran_s[job] = before + seconds
        if before + seconds >= slice_s - 1e-6:  # time slices differ: `before` may be longer than this one
            account.first_slice_s.setdefault(job, now_s - min(seconds, max(before + seconds - slice_s, 0.0)))

    # Queries.

    def pack_of(self, job: JobId) -> Pack | None:
        """The pack in which the job runs now; None: it is not its time slice, or it is in no group."""
        group = self.group_of.get(job)
        return next((pack for pack in group.running if job in pack.jobs), None) if group is not None else None

    def compute(self, job: JobId) -> float:
        """Share of the time in which the job may train now, in [0, 1]."""
        group, pack = self.group_of.get(job), self.pack_of(job)
        if group is None:
            return 1.0
        if pack is None:
            return 0.0
        most = pack.limit(job).compute
        return most if pack.guaranteed in (None, job) else min(group.control.share, most)

    def take_seen(self) -> tuple[PackSeen, ...]:
        """Measurements of packs since the last call."""
        seen, self._seen = tuple(self._seen.values()), {}
        return seen


def without(group: SharedGpus, job: JobId) -> SharedGpus:
    """The group without a job."""
    return replace(group, packs=tuple(pack for pack in (_cut(pack, job) for pack in group.packs) if pack.jobs))


def _unranked(group: SharedGpus) -> SharedGpus:
    """The group without the ranks of its trials."""
    return replace(group, packs=tuple(replace(pack, rank=0) for pack in group.packs))


def _cut(pack: Pack, job: JobId) -> Pack:
    if job not in pack.jobs:
        return pack
    kept = [index for index, each in enumerate(pack.jobs) if each != job]
    return replace(
        pack,
        jobs=tuple(pack.jobs[index] for index in kept),
        guaranteed=None if pack.guaranteed == job else pack.guaranteed,
        limits=tuple(pack.limits[index] for index in kept) if pack.limits else (),
    )
