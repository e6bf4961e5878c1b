"""What jobs have shown about saving their state: whether they can, and how long saving and starting take.

A job that has completed a checkpoint has shown that it can save, until it reports that it could not. Another job loses all
its work when it is stopped, so
`rounds/policies/staying.py` keeps it where it runs.

A run of a job whose earlier runs have reported counts as starting until its own first report, or until a start should be over:
a drain, and a move for a gain, wait that long.

A restart costs the time to save plus the time from Slurm's start of a run to the run's first report. Both are known from a
job's first run. Of several measurements the median counts, because a single one may have waited for a slow disk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from penstock_profiles.wire import Checkpointed, Report, SaveFailed, Started
from penstock_scheduler.model import Job, JobId, Phase

NEWEST = 8
"""Newest measurements of a job or a node that count."""

STARTING_S = (120.0, 600.0)
"""Least and most time for which a run without a report counts as starting, s. Between them it is `LONGER` times the longest start
that is known of the job. Importing took 69 s on a busy node, and a slow file system can take minutes."""

LONGER = 3.0


@dataclass(frozen=True, slots=True)
class RestartCosts:
    """Measured restart costs, seconds."""

    own_s: dict[JobId, float] = field(default_factory=dict)
    """Of jobs that were measured themselves."""
    alike_s: dict[JobId, float] = field(default_factory=dict)
    """Of other jobs: what jobs of the same model family, or the starts on the same nodes, took."""


NO_COSTS = RestartCosts()


class ReportHistory(Protocol):
    """Stored reports: the daemon's store."""

    def newest_reports(self, job: str, kinds: Sequence[str], newest: int | None = None) -> list[Report]:
        """The newest reports of a job of these kinds, oldest first; None: all of them."""
        ...


@dataclass(slots=True)
class _Shown:
    """What one job has shown."""

    saves_s: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    starts_s: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    failure: str = ""
    """Why the last checkpoint could not be written, if it could not."""
    begun: Report | None = None
    """The newest report of a beginning that has not been compared with Slurm's start yet."""
    heard_s: float = -math.inf
    """When its newest report was written, by the clock of its node."""

    def add(self, report: Report) -> None:
        self.heard_s = max(self.heard_s, report.time_s)
        if isinstance(report.body, Checkpointed):
            self.saves_s.append(report.body.seconds)
            self.failure = ""
        elif isinstance(report.body, SaveFailed):
            self.failure = report.body.text or "it gave no reason"
        elif isinstance(report.body, Started):
            self.begun = report


_NOTHING = _Shown()
"""Of a job that has shown nothing."""


class Saving:
    """What jobs have shown. `history` has what they reported before this daemon started."""

    def __init__(self, history: ReportHistory) -> None:
        self._history = history
        self._jobs: dict[JobId, _Shown] = {}
        self._of_nodes: dict[str, deque[float]] = {}

    def refresh(self, jobs: Sequence[Job], news: dict[JobId, list[Report]]) -> None:
        """Take over what these jobs have reported since the last call, and forget all other jobs."""
        before, self._jobs = self._jobs, {}
        for job in jobs:
            if job.phase is Phase.QUEUED and not job.restarts:
                continue  # it never ran; what is known is of a job that had its id before
            shown = before.get(job.id)
            if shown is None:
                shown, fresh = _Shown(), self._stored(job.id)
                fresh += [report for report in news.get(job.id, ()) if report not in fresh]
            else:
                fresh = news.get(job.id, [])
            for report in fresh:
                shown.add(report)
            self._jobs[job.id] = shown
            self._measure_start(job, shown)

    def saves(self, job: Job) -> bool:
        """Whether the job has completed a checkpoint, or its job spec says that it saves, and the last attempt has not failed."""
        shown = self._jobs.get(job.id, _NOTHING)
        return not shown.failure and (job.spec.says_it_saves or bool(shown.saves_s))

    def failure(self, job: JobId) -> str:
        """Why the last checkpoint of the job could not be written, if it could not."""
        return self._jobs.get(job, _NOTHING).failure

    def starts_until_s(self, job: Job) -> float:
        """See `JobFacts.starts_until_s`."""
        shown = self._jobs.get(job.id, _NOTHING)
        if job.phase is not Phase.RUNNING or job.started_s is None or not -math.inf < shown.heard_s < job.started_s:
            return 0.0
        least_s, most_s = STARTING_S
        return job.started_s + min(max(LONGER * max(shown.starts_s, default=0.0), least_s), most_s)

    def costs(self, jobs: Sequence[Job]) -> RestartCosts:
        """The restart costs that have been measured. Pauses of whole moves count before these; see `SpecModels`."""
        families: dict[str, _Shown] = {}
        for job in jobs:
            if job.spec.model_family is not None and (shown := self._jobs.get(job.id)) is not None:
                of_family = families.setdefault(job.spec.model_family, _Shown(deque(), deque()))
                of_family.saves_s.extend(shown.saves_s)
                of_family.starts_s.extend(shown.starts_s)
        found = RestartCosts()
        for job in jobs:
            own = self._jobs.get(job.id, _NOTHING)
            if own.saves_s and own.starts_s:
                found.own_s[job.id] = median(own.saves_s) + median(own.starts_s)
                continue
            family = families.get(job.spec.model_family or "", _NOTHING)
            saves_s = own.saves_s or family.saves_s
            starts_s = own.starts_s or self._starts_on_nodes(job) or family.starts_s
            if saves_s and starts_s:
                found.alike_s[job.id] = median(saves_s) + median(starts_s)
        return found

    def _stored(self, job: JobId) -> list[Report]:
        return [
            *self._history.newest_reports(job, ("checkpointed", "save_failed"), NEWEST),
            *self._history.newest_reports(job, ("started",), 1),
        ]

    def _measure_start(self, job: Job, shown: _Shown) -> None:
        """Compare the newest beginning with Slurm's start of the same run. Their clocks agree well enough for munge."""
        if shown.begun is None or job.phase is not Phase.RUNNING or job.started_s is None or job.allocation is None:
            return
        took_s = shown.begun.time_s - job.started_s
        if took_s < 0:
            return  # the report of an earlier run
        shown.begun = None
        shown.starts_s.append(took_s)
        for node in job.allocation.nodes:
            self._of_nodes.setdefault(node, deque(maxlen=NEWEST)).append(took_s)

    def _starts_on_nodes(self, job: Job) -> list[float]:
        nodes = job.allocation.nodes if job.allocation is not None else ()
        return [took_s for node in nodes for took_s in self._of_nodes.get(node, ())]
