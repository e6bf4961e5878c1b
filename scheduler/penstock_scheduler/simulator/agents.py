"""The node agents of a simulated cluster: they give turns, let packs run, hold to limits, and measure.

What a real agent does with processes is here a factor on each job's speed:

- who is suspended has 0; who is resumed loses `switch_s` of its slice;
- the jobs of a pack have the shares that the true table of pairs says, or the prior by utilisation for a pair that is not in it.
  Of more than two, each has the product of its shares beside each other one;
- beside a guaranteed job the others have a duty cycle c, which `sharing.control` moves: the guaranteed job has 1 in the rest of
  the time, so 1 - c (1 - share), and they have c times their shares.

Turns and accounts are those of a real node (`sharing.node`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.colocation import Colocation
from penstock_scheduler.model import JobId, JobUse, Pack, PackSeen, SharedGpus
from penstock_scheduler.sharing.control import ControlSettings, Steps
from penstock_scheduler.sharing.node import Group, Groups


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
    """On each GPU; 0: nobody knows, and it fits beside any other that leaves anything."""
    step_s: float = 0.2
    """One mini-batch alone, s."""


@dataclass(slots=True)
class PackTrial:
    """One pack of two, from its beginning to its end."""

    jobs: tuple[JobId, ...]
    total: float
    """True sum of its shares."""
    slices: int = 0
    """In which it ran."""
    ended: bool = False
    """Whether it is over because a job of it is; otherwise it was undone, or runs."""


class SimulatedAgents:
    """All nodes' agents. The simulated cluster asks them how fast each job is, and tells them what happens to it.

    Args:
        kinds: of all jobs that may share.
        pairs: the truth: shares of pairs.
        settings: see there.
        gpu_memory_mb: memory of one GPU by type; empty: nobody knows.
        metrics: of trials: what each reaches, by the seconds that it has run. It reports that whenever it is looked at.
    """

    def __init__(
        self,
        kinds: Mapping[JobId, Kind],
        pairs: Colocation,
        settings: AgentSettings | None = None,
        gpu_memory_mb: Mapping[str, int] | None = None,
        metrics: Mapping[JobId, Callable[[float], float]] | None = None,
    ) -> None:
        self.kinds = kinds
        self.gpu_memory_mb = dict(gpu_memory_mb or {})
        self.results: dict[JobId, tuple[tuple[float, float], ...]] = {}
        """(seconds run, metric) of each trial, as it has reported them: those that were better than all before."""
        self._metrics = metrics or {}
        self._pairs = pairs
        self._settings = settings or AgentSettings()
        self._random = np.random.default_rng(self._settings.seed)
        self._groups = Groups(self, self._settings.control)
        self._types: dict[JobId, str] = {}
        """GPU type that each job was last on."""
        self.trials: list[PackTrial] = []
        self._trial_of: dict[frozenset[JobId], PackTrial] = {}

    @property
    def groups(self) -> list[Group]:
        """As they are carried out."""
        return self._groups.groups

    @property
    def group_of(self) -> dict[JobId, Group]:
        """Of each job that shares."""
        return self._groups.group_of

    @property
    def first_slice_s(self) -> dict[JobId, float]:
        """When each job had first run for a slice."""
        return self._groups.account.first_slice_s

    @property
    def ran_s(self) -> Mapping[JobId, float]:
        """Time in which each job held GPUs, had started, and was not suspended."""
        return self._groups.account.ran_s

    @property
    def resumes(self) -> Counter[JobId]:
        """Times that each job was resumed."""
        return self._groups.resumes

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
        fresh = self._groups.order(groups, now_s, running)
        packs = {
            frozenset(pack.jobs): pack for group in self.groups for pack in group.order.packs if len(pack.jobs) > 1
        }
        for key in [key for key in self._trial_of if key not in packs]:
            del self._trial_of[key]
        for key, pack in packs.items():
            if key not in self._trial_of:
                gpu_type = self._types[pack.jobs[0]]
                trial = PackTrial(pack.jobs, sum(self._shares(pack, gpu_type).values()))
                self._trial_of[key] = trial
                if len(pack.jobs) == 2 and pack.guaranteed is None:
                    self.trials.append(trial)
        return fresh

    def end_slice(self, group: Group, now_s: float) -> None:
        """A slice is over: count it, measure, and choose who is next."""
        self._groups.end_slice(group, now_s)

    # The `NodeView` of the groups.

    def seen(self, pack: Pack) -> PackSeen:
        """The true shares, with noise."""
        gpu_type = self._types[pack.jobs[0]]
        shares = self._shares(pack, gpu_type)
        noise = np.maximum(self._random.normal(1.0, self._settings.noise, len(pack.jobs)), 0.0)
        speeds = tuple(float(shares[job] * factor) for job, factor in zip(pack.jobs, noise, strict=True))
        trial = self._trial_of.get(frozenset(pack.jobs))
        if trial is not None:  # not for those whom a guaranteed job has left behind, until the next order
            trial.slices += 1
        return PackSeen(pack.jobs, gpu_type, speeds)

    def steps(self, pack: Pack, group: Group) -> Steps:
        """As many as its factor allows, with noise."""
        assert pack.guaranteed is not None, "steps are of the guaranteed job"
        mean_s = self.kind(pack.guaranteed).step_s / max(self.factor(pack.guaranteed), 1e-9)
        count = int(group.order.slice_s / mean_s)
        if count < 1:
            return Steps()
        spread = (self._settings.step_noise * mean_s) ** 2
        mean_s *= 1 + self._settings.step_noise * self._random.standard_normal() / math.sqrt(count)
        return Steps(count, mean_s, spread * max(count - 1, 0))

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        """Nobody: hosts have memory enough."""
        return ()

    def begun_s(self, job: JobId) -> float:
        """Before all else: a job comes into a group once it has started."""
        return -math.inf

    def on_s(self, job: JobId) -> float:
        """At once."""
        return -math.inf

    def off_s(self, job: JobId) -> float:
        """At once: what a switch costs is the resumed one's, `switch_s`."""
        return -math.inf

    def pinned(self, job: JobId) -> frozenset[int]:
        """None: who is resumed may get any GPU of the node."""
        return frozenset()

    def crowded(self, pack: Pack) -> bool:
        """Never: who is suspended leaves nothing on its GPUs."""
        return False

    # What happens to jobs.

    def started(self, job: JobId, gpu_type: str, now_s: float) -> None:
        """A job holds GPUs from now on."""
        self._types[job] = gpu_type
        self._groups.started(job, now_s)

    def ran_alone(self, job: JobId, seconds: float, now_s: float) -> None:
        """A job had its GPUs to itself for so long until now."""
        self._groups.ran_alone(job, seconds, now_s)

    def left(self, job: JobId, now_s: float, *, ended: bool) -> Group | None:
        """A job has left its GPUs. Returns the group that it was in, with the next in line on its place; None: none is left."""
        group = self._groups.left(job, now_s)
        for key in [key for key in self._trial_of if job in key]:
            self._trial_of.pop(key).ended = ended
        return group

    # What is told.

    def factor(self, job: JobId) -> float:
        """How fast the job is now, relative to having its GPUs to itself."""
        group = self.group_of.get(job)
        if group is None:
            return 1.0
        pack = self._groups.pack_of(job)
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
        kind, account = self.kind(job), self._groups.account
        profiled = job in account.profiled
        ran_s = account.ran_s.get(job, 0.0)
        if ran_s > 0 and job in self._metrics:
            before, metric = self.results.get(job, ()), self._metrics[job](ran_s)
            if not before or metric > before[-1][1]:
                self.results[job] = (*before, (ran_s, metric))
        return JobUse(
            kind.name,
            kind.utilisation if profiled else None,
            max(kind.memory_mb, 1) if profiled else 0,  # so what nobody knows fits beside any other
            ran_s,
            moved_s=account.moved_s.get(job),
            results=self.results.get(job, ()),
            answers=True,
        )

    def take_seen(self) -> tuple[PackSeen, ...]:
        """Packs that were measured since the last call."""
        return self._groups.take_seen()
