"""Results of trials: the metric that each trial has reached and after how much running time, so that a policy can compare them.

The running time of a job follows from its reports, by the clock of its node: from `Started` to `Ended`, without the time from
`Suspended` to `Resumed`. A run without `Ended` ended with its last checkpoint or result, because later work is lost. The
running time is therefore the same after a restart of the daemon, from the reports in the store.

A job that an agent freezes does not report that. Where an agent tells how long a job has run, a new result counts at most that
time. Results from before a restart of the daemon are not corrected.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field

from penstock_profiles.wire import Ended, Report, Result, Resumed, Started, Suspended
from penstock_scheduler.api.messages import ResultView
from penstock_scheduler.model import JobId, JobUse, Snapshot

CLOCKED = ("started", "checkpointed", "suspended", "resumed", "result", "ended")
"""Kinds of reports that tell how long a job has run and what it has reached."""

MOST = 256
"""Most results of a job in a snapshot. If there are more, every other one is dropped."""


@dataclass(slots=True)
class _TrialReports:
    newest: tuple[int, int] = (-1, -1)
    """(epoch, number) of the newest report that was counted."""
    ran_s: float = 0.0
    """Running time before `since_s`, seconds."""
    since_s: float | None = None
    """Since when the job runs without a pause, by its node's clock; None: it does not run."""
    reported_s: float = 0.0
    """Time of the newest report."""
    last: ResultView | None = None
    fresh: list[tuple[float, float]] = field(default_factory=list)
    """(seconds run, metric) of results that are in no snapshot yet."""
    best: list[tuple[float, float]] = field(default_factory=list)
    """(seconds run, metric) of results that were better than all earlier ones."""

    def stop(self, at_s: float) -> None:
        if self.since_s is not None:
            self.ran_s += max(at_s - self.since_s, 0.0)
            self.since_s = None

    def so_far_s(self) -> float:
        return self.ran_s + (max(self.reported_s - self.since_s, 0.0) if self.since_s is not None else 0.0)

    def keep(self, at_s: float, metric: float) -> None:
        """Keep a result if it is better than all earlier ones: policies use no others. One result a second is enough."""
        if self.best and metric <= self.best[-1][1]:
            return
        if self.best and int(self.best[-1][0]) == int(at_s):
            self.best.pop()
        self.best.append((at_s, metric))
        if len(self.best) > MOST:
            self.best = self.best[::-2][::-1]


class Results:
    """The results of all present jobs. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._trials: dict[JobId, _TrialReports] = {}
        self._lock = threading.Lock()

    def take(self, report: Report, *, live: bool = False) -> None:
        """Count a report. Reports come in the order in which the job made them; a known report changes nothing.

        Args:
            live: whether the report has just come, rather than from the store.
        """
        body, at_s = report.body, report.time_s
        if body.kind not in CLOCKED:
            return
        with self._lock:
            trial = self._trials.setdefault(report.job_id, _TrialReports())
            number = report.epoch, report.sequence
            if number <= trial.newest:
                return
            if report.epoch > trial.newest[0]:
                trial.stop(trial.reported_s)
            trial.newest, trial.reported_s = number, at_s
            if isinstance(body, Suspended | Ended):
                trial.stop(at_s)
            elif trial.since_s is None and isinstance(body, Started | Resumed | Result):
                trial.since_s = at_s
            if isinstance(body, Result):
                ran_s = trial.so_far_s()
                trial.last = ResultView(metric=body.metric, progress=body.progress, ran_s=ran_s)
                if live:
                    trial.fresh.append((ran_s, body.metric))
                    del trial.fresh[:-MOST]
                else:
                    trial.keep(ran_s, body.metric)

    def newest(self, job: JobId) -> ResultView | None:
        """The newest result of a job; None: it has none."""
        trial = self._trials.get(job)
        return trial.last if trial is not None else None

    def forget(self, job: JobId) -> None:
        """Forget a job that has ended."""
        with self._lock:
            self._trials.pop(job, None)

    def on(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the results of its jobs, where jobs can share GPUs: no other policy needs them."""
        state = snapshot.sharing
        if state is None:
            return snapshot
        uses = dict(state.uses)
        with self._lock:
            for job in snapshot.jobs:
                trial = self._trials.get(job.id)
                if trial is None or trial.last is None:
                    continue
                # A job on a node without an agent is judged by its own reports.
                use = uses.get(job.id) or JobUse(job.id, ran_s=trial.so_far_s())
                for at_s, metric in trial.fresh:
                    trial.keep(min(at_s, use.ran_s) if use.ran_s > 0 else at_s, metric)
                trial.fresh.clear()
                uses[job.id] = dataclasses.replace(use, results=tuple(trial.best))
        return dataclasses.replace(snapshot, sharing=dataclasses.replace(state, uses=uses))
