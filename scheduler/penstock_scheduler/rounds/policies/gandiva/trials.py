"""Trials of one search (`trial_group`): which of them train on, and in which order; and the settings of `gandiva`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.model import Job, JobId, Pack, Phase, Reason, ReasonCode, Snapshot
from penstock_scheduler.model.job import in_order
from penstock_scheduler.rounds.sharing.groups import GroupSettings, TrialSeen, judge
from penstock_scheduler.rounds.sharing.packing import PackingSettings


class GandivaSettings(BaseModel):
    """Section `[policy.gandiva]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["introspective", "reactive"] = Field(
        default="introspective", description="reactive: no job is packed, and no job migrates."
    )
    slice_s: float = Field(default=60.0, gt=0, description="Length of a time slice, seconds.")
    max_height: float = Field(
        default=2.0,
        ge=1,
        description="A new job may land on a node until the jobs there want this many times the node's GPUs.",
    )
    groups: GroupSettings = Field(default=GroupSettings(), description="How trials of one search are judged.")

    interval_s: ClassVar[float] = 600.0
    """Least time between a job's last move and its next migration or growth, s: ten slices, so that a restart of half a minute
    costs a twentieth at most."""

    idle_s: ClassVar[float] = 300.0
    """Least time for which GPUs have been idle before a job grows into them, s: the job that comes next would have to wait
    until they are given back."""

    pack_interval_s: ClassVar[float] = PackingSettings.interval_s
    least_total: ClassVar[float] = PackingSettings.least_total

    @property
    def packing(self) -> PackingSettings:
        """Settings of `sharing.packing`."""
        return PackingSettings(least_total=self.least_total, interval_s=self.pack_interval_s)


Search = tuple[str, str]
"""A search: its user, and the name that the user gave it."""


def search_of(job: Job) -> tuple[str, str] | None:
    """The search that a trial belongs to: its user, and the name that the user gave the search."""
    return None if job.spec.trial_group is None else (job.user, job.spec.trial_group)


@dataclass(slots=True)
class Trials:
    """What a round knows about the searches' trials."""

    submit_s: dict[Search, float] = field(default_factory=dict)
    """When the first trial of each search was submitted, s since 1970."""
    rank: dict[JobId, int] = field(default_factory=dict)
    """Order in which the trials of a search land."""
    standing: dict[JobId, int] = field(default_factory=dict)
    """Order in which the trials of a search get time slices. Several trials may have the same place."""
    resting: dict[JobId, Reason] = field(default_factory=dict)
    """Trials that give their GPUs back and wait, because other trials are more promising -> the reason."""

    @classmethod
    def of(cls, snapshot: Snapshot, settings: GandivaSettings) -> Trials:
        """Judge the trials of every search. Without agents no trial is judged."""
        found = cls()
        for job in snapshot.jobs:
            if (key := search_of(job)) is not None:
                found.submit_s[key] = min(job.submit_s, found.submit_s.get(key, math.inf))
        if snapshot.sharing is None:
            return found
        groups: dict[Search, list[Job]] = {}
        for job in sorted(snapshot.jobs, key=lambda job: job.in_order):
            if (key := search_of(job)) is not None and job.id in snapshot.sharing.uses:
                groups.setdefault(key, []).append(job)
        for (_, name), jobs in groups.items():
            uses = [snapshot.sharing.uses[job.id] for job in jobs]
            trials = [TrialSeen(job.id, use.ran_s, use.results) for job, use in zip(jobs, uses, strict=True)]
            found._judge(name, {job.id: job for job in jobs}, trials, settings)
        return found

    def _judge(
        self, name: str, jobs: Mapping[JobId, Job], trials: Sequence[TrialSeen], settings: GandivaSettings
    ) -> None:
        verdict = judge(trials, settings.groups)
        self.rank |= {job: place for place, job in enumerate(verdict.order)}
        self.standing |= {job: 1 + min(place, verdict.judged) for place, job in enumerate(verdict.order)}
        self.standing |= dict.fromkeys(verdict.resting, 2 + verdict.judged)
        self.standing |= {trial.job: 0 for trial in trials if trial.trained_s < settings.slice_s}
        for job_id in verdict.resting:
            if jobs[job_id].phase in (Phase.QUEUED, Phase.RUNNING) and jobs[job_id].movable:
                text = f"other trials of {name} have better results after as much training"
                self.resting[job_id] = Reason(ReasonCode.STOPPED_BY_GROUP, text)

    def came(self, job: Job) -> tuple[object, ...]:
        """Sort key of the queue: by submission; a search's trials together, the more promising first."""
        search = search_of(job)
        if search is None:
            return (job.submit_s, 0, *in_order(job.id))
        return (self.submit_s[search], self.rank.get(job.id, len(self.rank)), *in_order(job.id))

    def ranked(self, packs: Sequence[Pack], jobs: Mapping[JobId, Job]) -> tuple[Pack, ...]:
        """The packs of a node with time slices; those of trials of one search get their rank."""
        found = list(packs)
        searches: dict[str, dict[int, int]] = {}
        for index, pack in enumerate(packs):
            keys = {search_of(jobs[job]) for job in pack.jobs}
            key = keys.pop()
            if key is not None and not keys:
                searches.setdefault(":".join(key), {})[index] = min(self.standing.get(job, 0) for job in pack.jobs)
        for search, places in searches.items():
            ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
            for index, place in places.items():
                found[index] = replace(found[index], search=search, rank=ranks[place])
        return tuple(found)
