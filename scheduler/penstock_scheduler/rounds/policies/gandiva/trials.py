"""Trials of one search (`trial_group`): which of them train on, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock_scheduler.model import Job, JobId, Pack, Phase, Reason, ReasonCode, Snapshot
from penstock_scheduler.rounds.policies.gandiva.node import search_of
from penstock_scheduler.rounds.policies.gandiva.settings import GandivaSettings
from penstock_scheduler.rounds.sharing.groups import TrialSeen, judge

Search = tuple[str, str]
"""A search: its user, and the name that the user gave it."""


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
        for job in sorted(snapshot.jobs, key=lambda job: (job.submit_s, job.id)):
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
            return (job.submit_s, 0, job.id)
        return (self.submit_s[search], self.rank.get(job.id, len(self.rank)), job.id)

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
