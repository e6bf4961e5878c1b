"""The agents of a simulated cluster's nodes: they give time slices, run packs, hold jobs to limits, and measure.

What a real agent does with processes is a factor on each job's speed here:

- A suspended job has speed 0. A resumed job loses `switch_s` of its time slice.
- The jobs of a pack have the shares of the true table of pairs. For a pair that is not in the table, the prior by
  utilisation holds. In a pack of more than two, a job has the product of its shares beside each other job.
- Beside a guaranteed job the other jobs have a duty cycle c, which `sharing.control` adjusts. The guaranteed job runs
  at full speed for the rest of the time, so its speed is 1 - c (1 - share). The other jobs have c times their shares.

Time slices and accounts are those of a real node (`sharing.node`).
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
from penstock_scheduler.rounds.sharing.control import ControlSettings, Steps
from penstock_scheduler.rounds.sharing.node import Group, Groups


class AgentSettings(BaseModel):
    """Costs of sharing, and the noise of its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    switch_s: float = Field(default=1.0, ge=0, description="Part of its time slice that a resumed job loses, seconds.")
    noise: float = Field(default=0.0, ge=0, description="Standard deviation of a measured share, relative to it.")
    step_noise: float = Field(
        default=0.01, ge=0, description="Standard deviation of a guaranteed job's step, relative."
    )
    control: ControlSettings = ControlSettings()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SharingKind:
    """How a job behaves beside other jobs."""

    name: str
    """Name of the kind in the table of pairs."""
    utilisation: float = 1.0
    """Utilisation of its GPU when it runs alone, in [0, 1]."""
    memory_mb: int = 0
    """Memory on each GPU, MB; 0: unknown, and the job fits beside any job that leaves some memory."""
    step_s: float = 0.2
    """Duration of a step when it runs alone, s."""


@dataclass(slots=True)
class PackTrial:
    """One pack of two jobs, from its beginning to its end."""

    jobs: tuple[JobId, ...]
    total: float
    """True sum of its shares."""
    slices: int = 0
    """Number of time slices in which it ran."""
    ended: bool = False
    """Whether it is over because one of its jobs ended. Otherwise it was undone, or still runs."""


class SimulatedAgents:
    """The agents of all nodes. The simulated cluster asks them how fast each job is, and tells them what happens to it.

    Args:
        kinds: kinds of all jobs that may share GPUs.
        pairs: the true shares of pairs.
        settings: the settings.
        gpu_memory_mb: memory of one GPU by GPU type, MB; empty: unknown.
        metrics: for each trial, its metric by the seconds that it has run. A trial reports it at each observation.
    """

    def __init__(
        self,
        kinds: Mapping[JobId, SharingKind],
        pairs: Colocation,
        settings: AgentSettings | None = None,
        gpu_memory_mb: Mapping[str, int] | None = None,
        metrics: Mapping[JobId, Callable[[float], float]] | None = None,
    ) -> None:
        self.kinds = kinds
        self.gpu_memory_mb = dict(gpu_memory_mb or {})
        self.results: dict[JobId, tuple[tuple[float, float], ...]] = {}
        """(seconds run, metric) that each trial has reported, if better than all before."""
        self._metrics = metrics or {}
        self._pairs = pairs
        self._settings = settings or AgentSettings()
        self._random = np.random.default_rng(self._settings.seed)
        self._groups = Groups(self, self._settings.control)
        self._types: dict[JobId, str] = {}
        """GPU type on which each job last ran."""
        self.trials: list[PackTrial] = []
        self._trial_of: dict[frozenset[JobId], PackTrial] = {}

    @property
    def groups(self) -> list[Group]:
        """The groups that run."""
        return self._groups.groups

    @property
    def group_of(self) -> dict[JobId, Group]:
        """Group of each co-located job."""
        return self._groups.group_of

    @property
    def first_slice_s(self) -> dict[JobId, float]:
        """When each job had first run for a time slice, s."""
        return self._groups.account.first_slice_s

    @property
    def ran_s(self) -> Mapping[JobId, float]:
        """Time for which each job trained, s: it held GPUs, had started, and was not suspended."""
        return self._groups.account.ran_s

    @property
    def resumes(self) -> Counter[JobId]:
        """How often each job was resumed."""
        return self._groups.resumes

    def kind(self, job: JobId) -> SharingKind:
        """Kind of the job. A job without one is a kind of its own with a utilisation of 1."""
        return self.kinds.get(job, SharingKind(job))

    # Orders.

    def order(self, groups: Sequence[SharedGpus], now_s: float, running: Mapping[JobId, bool]) -> list[Group]:
        """Run these groups from now on. Returns those that begin a new time slice. See `Groups.order`."""
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
        """End a time slice: count it, measure, and choose the next packs."""
        self._groups.end_slice(group, now_s)

    # The `NodeProbe` of the groups.

    def seen(self, pack: Pack) -> PackSeen:
        """Measure a pack: the true shares, with noise."""
        gpu_type = self._types[pack.jobs[0]]
        shares = self._shares(pack, gpu_type)
        noise = np.maximum(self._random.normal(1.0, self._settings.noise, len(pack.jobs)), 0.0)
        speeds = tuple(float(shares[job] * factor) for job, factor in zip(pack.jobs, noise, strict=True))
        trial = self._trial_of.get(frozenset(pack.jobs))
        if trial is not None:  # a pack that a guaranteed job has left has none until the next order
            trial.slices += 1
        return PackSeen(pack.jobs, gpu_type, speeds)

    def steps(self, pack: Pack, group: Group) -> Steps:
        """Steps of the guaranteed job: as many as its speed allows, with noise."""
        assert pack.guaranteed is not None, "steps are of the guaranteed job"
        mean_s = self.kind(pack.guaranteed).step_s / max(self.factor(pack.guaranteed), 1e-9)
        count = int(group.order.slice_s / mean_s)
        if count < 1:
            return Steps()
        spread = (self._settings.step_noise * mean_s) ** 2
        mean_s *= 1 + self._settings.step_noise * self._random.standard_normal() / math.sqrt(count)
        return Steps(count, mean_s, spread * max(count - 1, 0))

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        """No job: nodes have enough host memory."""
        return ()

    def begun_s(self, job: JobId) -> float:
        """Before all else, because a job enters a group once it has started."""
        return -math.inf

    def on_s(self, job: JobId) -> float:
        """At once: -inf."""
        return -math.inf

    def off_s(self, job: JobId) -> float:
        """At once: the resumed job pays for the switch with `switch_s`."""
        return -math.inf

    def pinned(self, job: JobId) -> frozenset[int]:
        """No GPUs: a resumed job may get any GPU of the node."""
        return frozenset()

    def crowded(self, pack: Pack) -> bool:
        """Never: a suspended job leaves nothing on its GPUs."""
        return False

    # Events of jobs.

    def started(self, job: JobId, gpu_type: str, now_s: float) -> None:
        """Note that a job holds GPUs from now on."""
        self._types[job] = gpu_type
        self._groups.started(job, now_s)

    def ran_alone(self, job: JobId, seconds: float, now_s: float) -> None:
        """Note that a job has had its GPUs to itself for these seconds until now."""
        self._groups.ran_alone(job, seconds, now_s)

    def left(self, job: JobId, now_s: float, *, ended: bool) -> Group | None:
        """Remove a job that has left its GPUs. Returns its group, in which the next packs run; None: no job is left in
        it."""
        group = self._groups.left(job, now_s)
        for key in [key for key in self._trial_of if job in key]:
            self._trial_of.pop(key).ended = ended
        return group

    # Queries.

    def factor(self, job: JobId) -> float:
        """Present speed of the job, relative to its speed alone."""
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
        """True shares of the jobs of a pack. Beside a guaranteed job, the other jobs are on different GPUs if there are
        enough."""
        shares = {}
        for job in pack.jobs:
            others = [other for other in pack.jobs if other != job]
            if pack.guaranteed not in (None, job):
                others = [other for other in others if other == pack.guaranteed]
            each = [self._share(gpu_type, self.kind(job), self.kind(other)) for other in others]
            shares[job] = min(each, default=1.0) if job == pack.guaranteed else math.prod(each)
        return dict.fromkeys(shares, 0.0) if 0.0 in shares.values() else shares

    def _share(self, gpu_type: str, mine: SharingKind, theirs: SharingKind) -> float:
        known = self._pairs.share(gpu_type, mine.name, theirs.name)
        return 1 / max(mine.utilisation + theirs.utilisation, 1.0) if known is None else known

    def use(self, job: JobId) -> JobUse:
        """What the agents have observed of a job."""
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
            max(kind.memory_mb, 1) if profiled else 0,  # a job of unknown memory fits beside any other
            ran_s,
            moved_s=account.moved_s.get(job),
            results=self.results.get(job, ()),
            answers=True,
        )

    def take_seen(self) -> tuple[PackSeen, ...]:
        """Measurements of packs since the last call."""
        return self._groups.take_seen()
