"""The node agents of a simulated cluster: they give turns, let packs run, hold to limits, and measure.

What a real agent does with processes is here a factor on each job's speed:

- who is suspended has 0; who is resumed loses `switch_s` of its slice;
- the jobs of a pack have the shares that the true table of pairs says, or the prior by utilisation for a pair that is not in it.
  Of more than two, each has the product of its shares beside each other one;
- beside a guaranteed job the others have a duty cycle c, which `sharing.control` moves: the guaranteed job has 1 in the rest of
  the time, so 1 - c (1 - share), and they have c times their shares.

A slice ends for all packs of one `SharedGpus` at once. Whoever ends within one leaves its place to the next in line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.colocation import Colocation
from penstock_scheduler.model import JobId, JobUse, Pack, PackSeen, SharedGpus
from penstock_scheduler.sharing.control import Control, ControlSettings, Steps, advance
from penstock_scheduler.sharing.slices import entry_s, turn


class AgentSettings(BaseModel):
    """What sharing costs, and how well it is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    switch_s: float = Field(default=1.0, ge=0, description="Part of its slice that a resumed job loses, seconds.")
    noise: float = Field(default=0.0, ge=0, description="Standard deviation of a measured share, as a part of it.")
    step_noise: float = Field(default=0.01, ge=0, description="The same of one step of a guaranteed job.")
    control: ControlSettings = ControlSettings()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """What a job is like beside others."""

    name: str
    """As the table of pairs has it."""
    utilisation: float = 1.0
    """Part of the GPU that it uses alone."""
    memory_mb: int = 0
    """On each GPU; 0: nobody knows."""
    step_s: float = 0.2
    """One mini-batch alone, s."""


@dataclass(slots=True)
class Trial:
    """One pack of two, from its beginning to its end."""

    jobs: tuple[JobId, ...]
    total: float
    """True sum of its shares."""
    slices: int = 0
    """In which it ran."""
    ended: bool = False
    """Whether it is over because a job of it is; otherwise it was undone, or runs."""


@dataclass(slots=True)
class Group:
    """One `SharedGpus` as it is carried out."""

    order: SharedGpus
    since_s: float
    """When the present slice began."""
    running: tuple[Pack, ...] = ()
    resumed: frozenset[JobId] = frozenset()
    control: Control = field(default_factory=Control)
    event: int = -1
    """Number of the event at which the slice ends."""


class SimulatedAgents:
    """All nodes' agents. The simulated cluster asks them how fast each job is, and tells them what happens to it.

    Args:
        kinds: of all jobs that may share.
        pairs: the truth: shares of pairs.
        settings: see there.
        gpu_memory_mb: memory of one GPU by type; empty: nobody knows.
    """

    def __init__(
        self,
        kinds: Mapping[JobId, Kind],
        pairs: Colocation,
        settings: AgentSettings | None = None,
        gpu_memory_mb: Mapping[str, int] | None = None,
    ) -> None:
        self.kinds = kinds
        self.gpu_memory_mb = dict(gpu_memory_mb or {})
        self._pairs = pairs
        self._settings = settings or AgentSettings()
        self._random = np.random.default_rng(self._settings.seed)
        self.groups: list[Group] = []
        self.group_of: dict[JobId, Group] = {}
        self._served_s: dict[JobId, float] = {}
        """Slices that each has had in the groups that it has been in, as `slices.turn` counts them."""
        self._ran_s: dict[JobId, float] = {}
        self._profiled: set[JobId] = set()
        self._moved_s: dict[JobId, float] = {}
        self._types: dict[JobId, str] = {}
        """GPU type that each job was last on."""
        self._seen: dict[frozenset[JobId], PackSeen] = {}
        self.first_slice_s: dict[JobId, float] = {}
        """When each job had first run for a slice."""
        self.trials: list[Trial] = []
        self._trial_of: dict[frozenset[JobId], Trial] = {}
        self.switches = 0
        """Times that a job was resumed."""

    def kind(self, job: JobId) -> Kind:
        """What the job is like; one that is not told is like no other, and uses its GPUs whole."""
        return self.kinds.get(job, Kind(job))

    # What is ordered.

    def order(self, groups: Sequence[SharedGpus], now_s: float, running: Mapping[JobId, bool]) -> list[Group]:
        """Carry out these groups from now on; returns those that begin a new slice.

        Args:
            groups: only with jobs that are on their nodes.
            now_s: the time.
            running: all of these jobs -> whether they have had their GPUs to themselves until now.
        """
        before = {group.order: group for group in self.groups}
        was_in = dict(self.group_of)
        fresh: list[Group] = []
        self.groups, self.group_of = [], {}
        for order in before.keys() - set(groups):
            self._account(before[order], now_s)
        for wanted in groups:
            group = before.get(wanted)
            if group is None:
                group = self._new(wanted, now_s, was_in, running)
                fresh.append(group)
            self.groups.append(group)
            self.group_of |= dict.fromkeys(wanted.jobs, group)
        packs = {
            frozenset(pack.jobs): pack for group in self.groups for pack in group.order.packs if len(pack.jobs) > 1
        }
        for key in [key for key in self._trial_of if key not in packs]:
            del self._trial_of[key]
            self._moved_s |= dict.fromkeys(key, now_s)
        for key, pack in packs.items():
            if key not in self._trial_of:
                gpu_type = self._types[pack.jobs[0]]
                trial = Trial(pack.jobs, sum(self._shares(pack, gpu_type).values()))
                self._trial_of[key] = trial
                self._moved_s |= dict.fromkeys(key, now_s)
                if len(pack.jobs) == 2 and pack.guaranteed is None:
                    self.trials.append(trial)
        return fresh

    def _new(
        self, wanted: SharedGpus, now_s: float, was_in: Mapping[JobId, Group], running: Mapping[JobId, bool]
    ) -> Group:
        """A group with what its jobs had in the ones before: newcomers get the next slice."""
        old = {id(was_in[job]): was_in[job] for job in wanted.jobs if job in was_in}
        known = [self._served_s[job] for job in wanted.jobs if job in was_in]
        fresh = [job for job in wanted.jobs if job not in was_in]
        self._served_s |= {job: max(known, default=0.0) for job in fresh if running[job]}
        had = [job for job in wanted.jobs if running[job] or (job in was_in and self._ran_s.get(job))]
        newcomer_s = entry_s([self._served_s[job] for job in had], wanted.slice_s)
        self._served_s |= {job: newcomer_s for job in fresh if not running[job]}
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
        group.control = same[0] if same else Control()
        self._turn(group, now_s, before)
        return group

    # Slices.

    def end_slice(self, group: Group, now_s: float) -> None:
        """A slice is over: count it, measure, and choose who is next."""
        self._account(group, now_s)
        self._turn(group, now_s, {job for pack in group.running for job in pack.jobs})

    def _turn(self, group: Group, now_s: float, before: set[JobId]) -> None:
        wanted = group.order
        served = {pack: sum(self._served_s[job] for job in pack.jobs) / len(pack.jobs) for pack in wanted.packs}
        group.running = turn(wanted.packs, served, wanted.gpus, group.running)
        resumed = {job for pack in group.running for job in pack.jobs if job not in before}
        group.resumed, group.since_s = frozenset(resumed), now_s
        self.switches += len(resumed)

    def _account(self, group: Group, now_s: float) -> None:
        """Count what has passed of the present slice."""
        seconds = now_s - group.since_s
        if seconds <= 0:
            return
        group.since_s = now_s
        whole = seconds >= group.order.slice_s - 1e-6
        for pack in group.running:
            for job in pack.jobs:
                self._served_s[job] += seconds
                self._ran(job, seconds, now_s, group.order.slice_s)
            if not whole:
                continue
            if len(pack.jobs) == 1:
                self._profiled.add(pack.jobs[0])
            elif pack.guaranteed is None:
                self._measure(pack)
            else:
                if group.control.share == 0:
                    self._profiled.add(pack.guaranteed)
                group.control = advance(group.control, self._steps(pack, group), self._settings.control)

    def _measure(self, pack: Pack) -> None:
        gpu_type = self._types[pack.jobs[0]]
        shares = self._shares(pack, gpu_type)
        noise = np.maximum(self._random.normal(1.0, self._settings.noise, len(pack.jobs)), 0.0)
        speeds = tuple(float(shares[job] * factor) for job, factor in zip(pack.jobs, noise, strict=True))
        self._seen[frozenset(pack.jobs)] = PackSeen(pack.jobs, gpu_type, speeds)
        trial = self._trial_of.get(frozenset(pack.jobs))
        if trial is not None:  # not for those whom a guaranteed job has left behind, until the next order
            trial.slices += 1

    def _steps(self, pack: Pack, group: Group) -> Steps:
        assert pack.guaranteed is not None, "steps are of the guaranteed job"
        mean_s = self.kind(pack.guaranteed).step_s / max(self.factor(pack.guaranteed), 1e-9)
        count = int(group.order.slice_s / mean_s)
        if count < 1:
            return Steps()
        spread = (self._settings.step_noise * mean_s) ** 2
        mean_s *= 1 + self._settings.step_noise * self._random.standard_normal() / math.sqrt(count)
        return Steps(count, mean_s, spread * max(count - 1, 0))

    # What happens to jobs.

    def started(self, job: JobId, gpu_type: str, now_s: float) -> None:
        """A job holds GPUs from now on."""
        self._types[job] = gpu_type
        self._moved_s[job] = now_s

    def ran_alone(self, job: JobId, seconds: float, now_s: float, slice_s: float = 60.0) -> None:
        """A job had its GPUs to itself for so long until now."""
        self._ran(job, seconds, now_s, slice_s)
        if seconds >= slice_s - 1e-6:
            self._profiled.add(job)

    def left(self, job: JobId, now_s: float, *, ended: bool) -> Group | None:
        """A job has left its GPUs. Returns the group that it was in, with the next in line on its place; None: none is left."""
        group = self.group_of.pop(job, None)
        if group is None:
            return None
        self._account(group, now_s)
        for key in [key for key in self._trial_of if job in key]:
            self._trial_of.pop(key).ended = ended
            self._moved_s |= dict.fromkeys(key, now_s)
        before = {each for pack in group.running for each in pack.jobs}
        group.order = without(group.order, job)
        group.running = tuple(pack for pack in (_cut(pack, job) for pack in group.running) if pack.jobs)
        if not group.order.packs:
            self.groups.remove(group)
            return None
        group.control = Control()
        self._turn(group, now_s, before)
        return group

    def _ran(self, job: JobId, seconds: float, now_s: float, slice_s: float) -> None:
        before = self._ran_s.get(job, 0.0)
        self._ran_s[job] = before + seconds
        if before < slice_s - 1e-6 <= before + seconds:
            self.first_slice_s.setdefault(job, now_s - (before + seconds - slice_s))

    # What is told.

    def factor(self, job: JobId) -> float:
        """How fast the job is now, relative to having its GPUs to itself."""
        group = self.group_of.get(job)
        if group is None:
            return 1.0
        pack = next((pack for pack in group.running if job in pack.jobs), None)
        if pack is None:
            return 0.0
        share = self._speed(pack, job, group.control.share)
        if job in group.resumed:
            share *= max(1 - self._settings.switch_s / group.order.slice_s, 0.0)
        return share

    def _speed(self, pack: Pack, job: JobId, duty: float) -> float:
        shares = self._shares(pack, self._types[job])
        if pack.guaranteed is None:
            return shares[job]
        if job == pack.guaranteed:
            return 1 - duty * (1 - shares[job])
        return duty * min(shares[job], pack.limit(job).compute)

    def _shares(self, pack: Pack, gpu_type: str) -> dict[JobId, float]:
        """True shares of the jobs of a pack; beside a guaranteed job the others are on GPUs of their own, as far as there are."""
        shares = {}
        for job in pack.jobs:
            others = [other for other in pack.jobs if other != job]
            if pack.guaranteed not in (None, job):
                others = [other for other in others if other == pack.guaranteed]
            each = [self._share(gpu_type, self.kind(job), self.kind(other)) for other in others]
            shares[job] = min(each, default=1.0) if job == pack.guaranteed else math.prod(each)
        return dict.fromkeys(shares, 0.0) if 0.0 in shares.values() else shares

    def _share(self, gpu_type: str, mine: Kind, theirs: Kind) -> float:
        known = self._pairs.share(gpu_type, mine.name, theirs.name)
        return 1 / max(mine.utilisation + theirs.utilisation, 1.0) if known is None else known

    def use(self, job: JobId) -> JobUse:
        """What has been seen of a job."""
        kind, profiled = self.kind(job), job in self._profiled
        return JobUse(
            kind.name,
            kind.utilisation if profiled else None,
            kind.memory_mb if profiled else 0,
            self._ran_s.get(job, 0.0),
            moved_s=self._moved_s.get(job),
        )

    def take_seen(self) -> tuple[PackSeen, ...]:
        """Packs that were measured since the last call."""
        seen, self._seen = tuple(self._seen.values()), {}
        return seen


def without(group: SharedGpus, job: JobId) -> SharedGpus:
    """The group when a job has left it."""
    return replace(group, packs=tuple(pack for pack in (_cut(pack, job) for pack in group.packs) if pack.jobs))


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
