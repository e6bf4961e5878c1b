"""Jobs of one GPU each that share a pool of GPUs, window by window: exclusive, in turns, packed at random or by
introspection.

It stands beside the simulated cluster, which gives whole GPUs only. A window is a slice (60 s): each GPU runs one pack
in it, at the shares of a table of pairs. A job that ends within a window leaves its GPU, or its partner's speed, as it
was until the window is over. The jobs of the pool are as on one node: a job that was suspended goes on on any of its
GPUs.
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
from penstock_scheduler.sharing.packing import Measured, PackingSettings, Tenant, choose, learn, undo
from penstock_scheduler.sharing.slices import entry_s, next_packs


class PoolSettings(BaseModel):
    """The pool and its measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpus: int = Field(default=4, ge=1, description="GPUs in the pool.")
    gpu_type: str = Field(default="v100", description="Their type, as the table of pairs names it.")
    slice_s: float = Field(default=60.0, gt=0, description="Length of a window, seconds.")
    switch_s: float = Field(default=1.0, ge=0, description="Part of its window that a resumed job loses, seconds.")
    noise: float = Field(default=0.0, ge=0, description="Standard deviation of a measured share, as a part of it.")


@dataclass(frozen=True, slots=True)
class PoolJob:
    """A job that wants one GPU."""

    id: JobId
    kind: str
    work_s: float
    """Time it needs alone, seconds."""
    arrival_s: float = 0.0


@dataclass(slots=True)
class PairTrial:
    """One pack, from its beginning to its end."""

    kinds: tuple[str, str]
    total: float
    """True sum of its shares."""
    windows: int = 0
    """In which it ran."""
    undone: bool = False
    """Whether it was undone; otherwise a job of it ended."""


@dataclass(slots=True)
class Outcome:
    """What became of the jobs."""

    ended_s: dict[JobId, float] = field(default_factory=dict)
    first_slice_s: dict[JobId, float] = field(default_factory=dict)
    """When each ended its first window."""
    ran_s: dict[JobId, float] = field(default_factory=dict)
    """Time in which it held a GPU, alone or packed."""
    trials: list[PairTrial] = field(default_factory=list)
    resumes: int = 0


class Sharing(Protocol):
    """Who is packed with whom, and which packs are undone."""

    slices: bool
    """Whether packs take turns; otherwise each keeps its GPU until it ends."""

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """Packs to undo after a window. `scarce`: whether there are more jobs than GPUs."""

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """Pairs to pack, of jobs that have had a window alone. `excess_gpus`: packs less GPUs."""


@dataclass(slots=True)
class Alone:
    """Nobody is packed; with `slices` jobs take turns, without they wait in the queue."""

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
    """Gandiva's: `penstock_scheduler.sharing.packing`, with what it learns."""

    known: Colocation
    gpu_type: str
    utilisation: Mapping[str, float]
    """By kind, what a window alone shows."""
    settings: PackingSettings = field(default_factory=PackingSettings)
    slices: bool = True

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """Those that do not pay; what was seen is learned."""
        learn(self.known, self.gpu_type, seen)
        return undo(seen, spare_gpus, self.settings)

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """Those that promise most."""
        for tenant in tenants:
            self.known.observe_alone(self.gpu_type, tenant.kind, self.utilisation[tenant.kind])
        return choose(tenants, excess_gpus, self.known, self.gpu_type, 0, now_s, self.settings)


@dataclass(slots=True)
class RandomPairs:
    """The baseline of Gavel's simulator (stanford-futuredata/gavel @c4fa400, `scheduler/policies/gandiva.py`).

    While there are more jobs than GPUs, all jobs without a partner are paired at random, and pairs are dropped whose
    shares add up to less than 1. It remembers nothing, and where packs become fewer than GPUs, it leaves GPUs idle.
    """

    random: random.Random
    only_excess: bool = False
    """Pair no more jobs than there are too many, and take packs apart as soon as GPUs are idle: not in Gavel."""
    slices: bool = True

    def undo(self, seen: Sequence[Measured], spare_gpus: int, scarce: bool) -> Sequence[Measured]:
        """Those that add up to less than 1, and all when every job can have a GPU."""
        bad = [measured for measured in seen if not scarce or measured.total < 1]
        fine = [measured for measured in seen if measured not in bad]
        return bad + self.random.sample(fine, min(spare_gpus, len(fine))) if self.only_excess else bad

    def choose(
        self, tenants: Sequence[Tenant], excess_gpus: int, scarce: bool, now_s: float
    ) -> Sequence[tuple[Tenant, Tenant]]:
        """Anybody with anybody."""
        if not scarce:
            return ()
        order = self.random.sample(list(tenants), len(tenants))
        pairs = list(zip(order[::2], order[1::2], strict=False))
        return pairs[: max(excess_gpus, 0)] if self.only_excess else pairs


class Pool:
    """The pool over time; `run` is all there is to do."""

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
            jobs: those to come.
            truth: shares of all pairs of their kinds on the pool's GPU type; a pair without is one that does not fit.
            sharing: who is packed.
            settings: see there.
            seed: of the noise.
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
        """Window by window until all jobs have ended, or to `until_s`."""
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
        """Work that each job has done so far, in seconds alone."""
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
        """Undo the packs that do not pay, and let those go who have ended."""
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
        """What those have had who have had anything."""
        started = self._outcome.first_slice_s
        return [served_s for pack, served_s in self._served_s.items() if started.keys() & set(pack.jobs)]

    def _scarce(self) -> bool:
        """Whether there are more jobs than GPUs."""
        jobs = [job for pack in self._served_s for job in pack.jobs]
        return sum(self._left_s[job] > 0 for job in jobs) > self._settings.gpus

    def _moved(self, pack: Pack, now_s: float) -> None:
        for job in pack.jobs:
            self._alone[job] = replace(self._alone[job], moved_s=now_s)
