"""How groups of jobs that share GPUs are carried out on a node: turns, what each job has had, and AntMan's control.

The one copy of it: the agents of a simulated cluster and the agent of a real node are shells around `Groups`. It reads no clock
and touches no process; what it must know of the world it asks its `NodeView`. A slice ends for all packs of a group at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock_scheduler.model import JobId, Pack, PackSeen, SharedGpus
from penstock_scheduler.sharing.control import ControlSettings, ShareControl, Steps, advance
from penstock_scheduler.sharing.slices import entry_s, handed_on, turn


@dataclass(slots=True)
class Group:
    """One `SharedGpus` as it is carried out."""

    order: SharedGpus
    since_s: float
    """When the present slice began."""
    running: tuple[Pack, ...] = ()
    resumed: frozenset[JobId] = frozenset()
    """Who was not running before this slice."""
    crowded: frozenset[JobId] = frozenset()
    """Who has its turn though `NodeView.crowded` said no: nobody else could have it."""
    control: ShareControl = field(default_factory=ShareControl)
    event: int = -1
    """Number of the event at which the slice ends, where the shell has a queue of events."""


class NodeView(Protocol):
    """What `Groups` asks of the node, real or simulated."""

    def seen(self, pack: Pack) -> PackSeen | None:
        """What the slice that is over showed of a pack without a promise, which ran in all of it; None: not measured."""
        ...

    def steps(self, pack: Pack, group: Group) -> Steps:
        """The guaranteed job's steps in the slice that is over."""
        ...

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        """Of those who would be suspended together, who cannot be now; they keep their turn."""
        ...

    def begun_s(self, job: JobId) -> float:
        """When the job began to train, in the present run of it; inf: it starts still, and does not run yet."""
        ...

    def on_s(self, job: JobId) -> float:
        """Since when a job whose turn it is has its GPUs; inf: it waits for those who leave them."""
        ...

    def off_s(self, job: JobId) -> float:
        """When a job whose turn is over was off its GPUs; inf: it is on them still."""
        ...

    def pinned(self, job: JobId) -> frozenset[int]:
        """The GPUs without which the job cannot run; empty: any of its group's will do."""
        ...

    def crowded(self, pack: Pack) -> bool:
        """Whether others, who stand still, have left so much on its GPUs that the pack does not fit there."""
        ...


@dataclass(slots=True)
class Account:
    """What is remembered of jobs beyond their groups: all that a shell has to save besides the groups themselves."""

    served_s: dict[JobId, float] = field(default_factory=dict)
    """Slices that each has had in the groups that it has been in, as `slices.turn` counts them: its starts are part of them."""
    ran_s: dict[JobId, float] = field(default_factory=dict)
    """Time in which each held GPUs, had started, and was not suspended."""
    profiled: set[JobId] = field(default_factory=set)
    """Who has run alone for a slice."""
    moved_s: dict[JobId, float] = field(default_factory=dict)
    """When each was last started, packed or taken out of a pack."""
    first_slice_s: dict[JobId, float] = field(default_factory=dict)
    """When each had first run for a slice."""
    packs: set[frozenset[JobId]] = field(default_factory=set)
    """Of two jobs or more, that there are."""

    def forget(self, keep: Collection[JobId]) -> None:
        """Drop what is remembered of all other jobs."""
        for table in (self.served_s, self.ran_s, self.moved_s, self.first_slice_s):
            for job in [job for job in table if job not in keep]:
                del table[job]
        self.profiled &= set(keep)


class Groups:
    """All that share GPUs, and what they have had.

    Args:
        view: the node.
        control: how a guaranteed job's speed is kept.
        groups: that were being carried out, for a shell that begins again.
        account: likewise.
    """

    def __init__(
        self,
        view: NodeView,
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

    # What is ordered.

    def order(self, groups: Sequence[SharedGpus], now_s: float, running: Mapping[JobId, bool]) -> list[Group]:
        """Carry out these groups from now on; returns those that begin a new slice.

        Args:
            groups: only with jobs that are on their nodes.
            now_s: the time.
            running: all of these jobs -> whether they have had their GPUs to themselves until now.
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
            elif group.order != wanted:  # only by ranks, which count from the next slice on
                now = {pack.jobs for pack in group.running}
                group.order, group.running = wanted, tuple(pack for pack in wanted.packs if pack.jobs in now)
            after.append(group)
        self.groups = after
        self.group_of = {job: group for group in after for job in group.order.jobs}
        packs = {frozenset(pack.jobs) for group in self.groups for pack in group.order.packs if len(pack.jobs) > 1}
        account = self.account
        account.moved_s |= {job: now_s for key in account.packs ^ packs for job in key}
        account.packs = packs
        return fresh

    def _new(
        self, wanted: SharedGpus, now_s: float, was_in: Mapping[JobId, Group], running: Mapping[JobId, bool]
    ) -> Group:
        """A group with what its jobs had in the ones before: newcomers get the next slice."""
        served_s = self.account.served_s
        old = {id(was_in[job]): was_in[job] for job in wanted.jobs if job in was_in}
        known = [served_s[job] for job in wanted.jobs if job in was_in]
        fresh = [job for job in wanted.jobs if job not in was_in]
        served_s |= {job: max(known, default=0.0) for job in fresh if running[job]}
        had = [job for job in wanted.jobs if running[job] or (job in was_in and self.account.ran_s.get(job))]
        newcomer_s = entry_s([served_s[job] for job in had], wanted.slice_s)
        served_s |= {job: newcomer_s for job in fresh if not running[job]}
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
        self._turn(group, now_s, before)
        return group

    # Slices.

    def end_slice(self, group: Group, now_s: float) -> None:
        """A slice is over: count it, measure, and choose who is next."""
        self._count(group, now_s)
        self._turn(group, now_s, {job for pack in group.running for job in pack.jobs})

    def _turn(self, group: Group, now_s: float, before: set[JobId]) -> None:
        wanted = group.order
        served = {pack: sum(self.account.served_s[job] for job in pack.jobs) / len(pack.jobs) for pack in wanted.packs}
        pinned = {pack: frozenset[int]().union(*(self._view.pinned(job) for job in pack.jobs)) for pack in wanted.packs}
        crowded = [pack for pack in wanted.packs if self._view.crowded(pack)]
        handed = handed_on(wanted.packs, served, pinned, crowded)
        for pack in wanted.packs:
            for job in pack.jobs:
                self.account.served_s[job] += handed[pack] - served[pack]
        served = handed
        stays: set[JobId] = set()
        while True:
            keep = [pack for pack in wanted.packs if not stays.isdisjoint(pack.jobs)]
            chosen = turn(wanted.packs, served, wanted.gpus, group.running, pinned=pinned, keep=keep, last=crowded)
            after = {job for pack in chosen for job in pack.jobs}
            leaving = before & set(wanted.jobs) - after
            refused = set(self._view.refused(leaving)) - stays if leaving else set()
            if not refused:
                break
            stays |= refused
        resumed = after - before
        group.running, group.resumed, group.since_s = chosen, frozenset(resumed), now_s
        group.crowded = frozenset(job for pack in chosen if pack in crowded for job in pack.jobs)
        self.resumes.update(job for job in resumed if self.account.ran_s.get(job))  # not those whose first turn it is

    def _count(self, group: Group, now_s: float) -> None:
        """Count what has passed of the slice. Who has to leave has its GPUs until it is off them, the next one from then on."""
        if now_s <= group.since_s:
            return
        since_s, group.since_s = group.since_s, now_s
        ran_s: dict[JobId, float] = {}
        for job in group.order.jobs:
            its_turn = any(job in pack.jobs for pack in group.running)
            from_s = max(since_s, self._view.on_s(job)) if its_turn else since_s
            until_s = now_s if its_turn else min(now_s, self._view.off_s(job))
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
                group.control = advance(group.control, self._view.steps(pack, group), self._control)

    # What happens to jobs.

    def started(self, job: JobId, now_s: float) -> None:
        """A job holds GPUs from now on."""
        self.account.moved_s[job] = now_s

    def ran_alone(self, job: JobId, seconds: float, now_s: float, slice_s: float = 60.0) -> None:
        """A job had its GPUs to itself for so long until now."""
        self._ran(job, seconds, now_s, slice_s)
        if seconds >= slice_s - 1e-6:
            self.account.profiled.add(job)

    def left(self, job: JobId, now_s: float) -> Group | None:
        """A job has left its GPUs. Returns the group that it was in, with the next in line on its place; None: none is left."""
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
        self._turn(group, now_s, before - {job})
        return group

    def _ran(self, job: JobId, seconds: float, now_s: float, slice_s: float) -> None:
        account = self.account
        before = account.ran_s.get(job, 0.0)
        account.ran_s[job] = before + seconds
        if before + seconds >= slice_s - 1e-6:  # slices differ: `before` may be more than this one
            account.first_slice_s.setdefault(job, now_s - min(seconds, max(before + seconds - slice_s, 0.0)))

    # What is told.

    def pack_of(self, job: JobId) -> Pack | None:
        """The pack in which the job runs now; None: it is not its turn, or it is in no group."""
        group = self.group_of.get(job)
        return next((pack for pack in group.running if job in pack.jobs), None) if group is not None else None

    def compute(self, job: JobId) -> float:
        """Part of the time in which the job may train now, in [0, 1]."""
        group, pack = self.group_of.get(job), self.pack_of(job)
        if group is None:
            return 1.0
        if pack is None:
            return 0.0
        most = pack.limit(job).compute
        return most if pack.guaranteed in (None, job) else min(group.control.share, most)

    def take_seen(self) -> tuple[PackSeen, ...]:
        """Packs that were measured since the last call."""
        seen, self._seen = tuple(self._seen.values()), {}
        return seen


def without(group: SharedGpus, job: JobId) -> SharedGpus:
    """The group when a job has left it."""
    return replace(group, packs=tuple(pack for pack in (_cut(pack, job) for pack in group.packs) if pack.jobs))


def _unranked(group: SharedGpus) -> SharedGpus:
    """The group without what early results say of its trials."""
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
