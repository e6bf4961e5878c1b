"""Jobs of one GPU each that share a pool of GPUs, window by window: exclusively, in time slices, packed at random or by
introspection.

It complements the simulated cluster, which allocates only whole GPUs. A window is a time slice (60 s), in which each GPU runs
one pack with the shares of a table of pairs. If a job ends within a window, its GPU and its partner's speed stay as they were
until the window ends. The pool is like one node: a suspended job may continue on any of its GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.colocation import Colocation
from penstock_scheduler.model import JobId, Pack
from penstock_scheduler.rounds.sharing.packing import Measured, PackingSettings, Tenant, choose, learn, undo
from penstock_scheduler.rounds.sharing.slices import entry_s, next_packs


class PoolSettings(BaseModel):
    """The pool and its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpus: int = Field(default=4, ge=1, description="GPUs in the pool.")
    gpu_type: str = Field(default="v100", description="The GPUs' type, by its name in the table of pairs.")
    slice_s: float = Field(default=60.0, gt=0, description="Length of a window, seconds.")
    switch_s: float = Field(default=1.0, ge=0, description="Time that a resumed job loses, seconds.")
    noise: float = Field(default=0.0, ge=0, description="Standard deviation of a measured share, as a part of it.")


@dataclass(frozen=True, slots=True)
class PoolJob:
    """A job for one GPU."""

    id: JobId
    kind: str
    work_s: float
    """Running time alone, seconds."""
    arrival_s: float = 0.0


@dataclass(slots=True)
class PairTrial:
    """One pack, from its beginning to its end."""

    kinds: tuple[str, str]
    total: float
    """True sum of its jobs' shares."""
    windows: int = 0
    """Number of windows in which it ran."""
    undone: bool = False
    """Whether it was split up. Otherwise one of its jobs ended."""


@dataclass(slots=True)
class Outcome:
    """The results of a run."""

    ended_s: dict[JobId, float] = field(default_factory=dict)
    first_slice_s: dict[JobId, float] = field(default_factory=dict)
    """When each ended its first window."""
    ran_s: dict[JobId, float] = field(default_factory=dict)
    """Job -> time for which it had a GPU, alone or packed."""
    trials: list[PairTrial] = field(default_factory=list)
    resumes: int = 0


class Sharing(Protocol):
    """Decides which jobs are packed together, and which packs are split up."""

    slices: bool
    """Whether packs have time slices. Otherwise each pack keeps its GPU until it ends."""

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """Packs to split up after a window. `scarce`: whether there are more jobs than GPUs."""

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """Pairs to pack, among jobs that have had a window alone. `excess_gpus`: number of packs minus number of GPUs."""


@dataclass(slots=True)
class Alone:
    """Packs no jobs. With `slices`, jobs have time slices; without, they wait in the queue."""

    slices: bool

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """No pack."""
        return ()

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """No pair."""
        return ()


@dataclass(slots=True)
class Introspection:
    """Gandiva's packing (`penstock_scheduler.rounds.sharing.packing`) with its learning."""

    known: Colocation
    gpu_type: str
    utilisation: Mapping[str, float]
    """Learn a kind's utilisation from a window alone."""
    settings: PackingSettings = field(default_factory=PackingSettings)
    slices: bool = True

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """Learn from the measurements, and return the packs that do not pay."""
        learn(self.known, self.gpu_type, seen)
        return undo(seen, spare_gpus, self.settings)

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """The most promising pairs."""
        for tenant in tenants:
            self.known.observe_alone(self.gpu_type, tenant.kind, self.utilisation[tenant.kind])
        return choose(tenants, excess_gpus, self.known, self.gpu_type, 0, now_s, self.settings)


@dataclass(slots=True)
class RandomPairs:
    """The baseline of Gavel's simulator (stanford-futuredata/gavel @c4fa400, `scheduler/policies/gandiva.py`).

    While there are more jobs than GPUs, all jobs without a partner are paired at random, and pairs with shares below 1 in total
    are dropped. It learns nothing. If there are fewer packs than GPUs, GPUs stay idle.
    """

    random: random.Random
    only_excess: bool = False
    """Pack only as many jobs as exceed the GPUs, and split packs as soon as GPUs are idle. Not in Gavel."""
    slices: bool = True

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """Packs with shares below 1 in total, or all packs once every job can have a GPU."""
        bad = [measured for measured in seen if not scarce or measured.total < 1]
        fine = [measured for measured in seen if measured not in bad]
        return bad + self.random.sample(fine, min(spare_gpus, len(fine))) if self.only_excess else bad

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """Random pairs."""
        if not scarce:
            return ()
        order = self.random.sample(list(tenants), len(tenants))
        pairs = list(zip(order[::2], order[1::2], strict=False))
        return pairs[: max(excess_gpus, 0)] if self.only_excess else pairs


class Pool:
    """Simulates the pool over time; call `run`."""

    def __init__(
        self,
        jobs: Sequence[PoolJob],
        truth: Colocation,
        sharing: Sharing,
        settings: PoolSettings,
        seed: int = 0,
    ) -> None:
        """
        Args:
            jobs: all jobs that arrive.
            truth: shares of all pairs of their kinds on the pool's GPU type. A missing pair does not fit.
            sharing: decides which jobs are packed.
            settings: of the pool.
            seed: for the noise.
        """
        self._jobs = {job.id: job for job in jobs}
        self._truth, self._sharing, self._settings = truth, sharing, settings
        self._random = np.random.default_rng(seed)
        self._left_s = {job.id: job.work_s for job in jobs}
        self._served_s: dict[Pack, float] = {}
        self._trials: dict[Pack, PairTrial] = {}
        self._alone: dict[JobId, Tenant] = {}
        """Jobs that have had a window alone."""
        self._outcome = Outcome(ran_s=dict.fromkeys(self._jobs, 0.0))

    def run(self, until_s: float = float("inf")) -> Outcome:
        """Simulate window by window until all jobs have ended, or until `until_s`."""
        waiting = sorted(self._jobs.values(), key=lambda job: job.arrival_s)
        running: tuple[Pack, ...] = ()
        now_s = 0.0
        while (waiting or self._served_s) and now_s < until_s:
            while waiting and waiting[0].arrival_s <= now_s:
                self._served_s[Pack((waiting.pop(0).id,))] = entry_s(self._started_s(), self._settings.slice_s)
            self._pack(now_s)
            served_s = self._served_s if self._sharing.slices else dict.fromkeys(self._served_s, 0.0)
            chosen = next_packs(list(self._served_s), served_s, self._settings.gpus, running)
            seen = self._window(running, chosen, now_s)
            now_s += self._settings.slice_s
            self._undo(seen, now_s)
            running = tuple(pack for pack in chosen if pack in self._served_s)
        return self._outcome

    def progress_s(self) -> dict[JobId, float]:
        """Work of each job so far, in seconds of running alone."""
        return {job: self._jobs[job].work_s - left_s for job, left_s in self._left_s.items()}

    def _pack(self, now_s: float) -> None:
        tenants = [
            self._alone[pack.jobs[0]] for pack in self._served_s if len(pack.jobs) == 1 and pack.jobs[0] in self._alone
        ]
        excess = len(self._served_s) - self._settings.gpus
        for one, other in self._sharing.choose(tenants, excess, self._scarce(), now_s):
            pack = Pack((one.job, other.job))
            served = [self._served_s.pop(Pack((job,))) for job in pack.jobs]
            self._served_s[pack] = sum(served) / 2
            self._moved(pack, now_s)
            total = self._truth.total(self._settings.gpu_type, one.kind, other.kind) or 0.0
            self._trials[pack] = PairTrial((one.kind, other.kind), total)
            self._outcome.trials.append(self._trials[pack])

    def _window(self, before: Sequence[Pack], chosen: Sequence[Pack], now_s: float) -> list[Measured]:
        """Run the chosen packs for a slice, and measure those of two jobs."""
        jobs = [job for pack in chosen for job in pack.jobs]
        resumed = set(jobs) - {job for pack in before for job in pack.jobs}
        self._outcome.resumes += len(resumed)
        seen = []
        for pack in chosen:
            shares = self._shares(pack)
            self._served_s[pack] += self._settings.slice_s
            for job, share in zip(pack.jobs, shares, strict=True):
                lost_s = self._settings.switch_s if job in resumed else 0.0
                self._progress(job, share, now_s + lost_s, self._settings.slice_s - lost_s)
            if len(pack.jobs) == 2:
                self._trials[pack].windows += 1
                one, other = (self._alone[job] for job in pack.jobs)
                noise = np.maximum(self._random.normal(1.0, self._settings.noise, 2), 0.0)
                seen.append(Measured((one, other), (shares[0] * noise[0], shares[1] * noise[1])))
            else:
                self._alone.setdefault(pack.jobs[0], Tenant(pack.jobs[0], self._jobs[pack.jobs[0]].kind))
        for job in jobs:
            self._outcome.first_slice_s.setdefault(job, now_s + self._settings.slice_s)
            self._outcome.ran_s[job] += self._settings.slice_s
        return seen

    def _shares(self, pack: Pack) -> tuple[float, ...]:
        if len(pack.jobs) == 1:
            return (1.0,)
        one, other = (self._jobs[job].kind for job in pack.jobs)
        gpu_type = self._settings.gpu_type
        if not self._truth.total(gpu_type, one, other):
            return (0.0, 0.0)
        return (self._truth.share(gpu_type, one, other) or 0.0, self._truth.share(gpu_type, other, one) or 0.0)

    def _progress(self, job: JobId, share: float, from_s: float, seconds: float) -> None:
        left_s = self._left_s[job]
        if left_s <= share * seconds:
            self._outcome.ended_s[job] = from_s + left_s / share
        self._left_s[job] = max(left_s - share * seconds, 0.0)

    def _undo(self, seen: Sequence[Measured], now_s: float) -> None:
        """Split the packs that do not pay, and remove ended jobs."""
        spare = self._settings.gpus - len(self._served_s)
        gone = self._sharing.undo(seen, max(spare, 0), self._scarce())
        apart = {Pack((measured.pack[0].job, measured.pack[1].job)) for measured in gone}
        for pack in list(self._served_s):
            ended = [job for job in pack.jobs if self._left_s[job] <= 0]
            if not ended and pack not in apart:
                continue
            served_s = self._served_s.pop(pack)
            if pack in self._trials:
                self._trials.pop(pack).undone = pack in apart
                self._moved(pack, now_s)
            self._served_s |= {Pack((job,)): served_s for job in pack.jobs if job not in ended}

    def _started_s(self) -> list[float]:
        """Time on a GPU of each job that has had any."""
        started = self._outcome.first_slice_s
        return [served_s for pack, served_s in self._served_s.items() if started.keys() & set(pack.jobs)]

    def _scarce(self) -> bool:
        """Whether there are more jobs than GPUs."""
        jobs = [job for pack in self._served_s for job in pack.jobs]
        return sum(self._left_s[job] > 0 for job in jobs) > self._settings.gpus

    def _moved(self, pack: Pack, now_s: float) -> None:
        for job in pack.jobs:
            self._alone[job] = replace(self._alone[job], moved_s=now_s)
