"""Results of trials: what each has reached, and after how much running, so that a policy can compare them.

How long a job had run by a result follows from what its runs say, by their nodes' clocks: from `Started` to `Ended`, without the
time from `Suspended` to `Resumed`; a run that said nothing at its end ended with its last checkpoint or result, for what came
after is lost. So it is the same after a restart of the daemon, from the store's reports. A job that is frozen and does not say
so would count time in which it stood still: where an agent knows how long it ran, a result that comes is never later than that;
but those from before a restart of the daemon are.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field

from penstock_profiles.wire import Ended, Report, Result, Resumed, Started, Suspended
from penstock_scheduler.messages import ResultView
from penstock_scheduler.model import JobId, JobUse, Snapshot

CLOCKED = ("started", "checkpointed", "suspended", "resumed", "result", "ended")
"""Kinds of reports that say how long a job has run, and what it has reached."""

MOST = 256
"""Results of a job that a snapshot holds; of more, every other one is left out."""


@dataclass(slots=True)
class _TrialReports:
    newest: tuple[int, int] = (-1, -1)
    """(epoch, number) of the newest report that was taken."""
    ran_s: float = 0.0
    """In stretches that are over."""
    since_s: float | None = None
    """When the present stretch began, by its node's clock; None: it stands still."""
    spoke_s: float = 0.0
    last: ResultView | None = None
    fresh: list[tuple[float, float]] = field(default_factory=list)
    """(seconds run, metric) of results that no snapshot has held yet."""
    best: list[tuple[float, float]] = field(default_factory=list)
    """Those that were better than all before."""

    def stop(self, at_s: float) -> None:
        if self.since_s is not None:
            self.ran_s += max(at_s - self.since_s, 0.0)
            self.since_s = None

    def so_far_s(self) -> float:
        return self.ran_s + (max(self.spoke_s - self.since_s, 0.0) if self.since_s is not None else 0.0)

    def keep(self, at_s: float, metric: float) -> None:
        """Only what is better than all before decides anything; of one second only the best."""
        if self.best and metric <= self.best[-1][1]:
            return
        if self.best and int(self.best[-1][0]) == int(at_s):
            self.best.pop()
        self.best.append((at_s, metric))
        if len(self.best) > MOST:
            self.best = self.best[::-2][::-1]


class Results:
    """Of all jobs that are there. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._trials: dict[JobId, _TrialReports] = {}
        self._lock = threading.Lock()

    def take(self, report: Report, *, live: bool = False) -> None:
        """Take in a report, in the order in which a job made them; one that was seen before changes nothing.

        Args:
            live: it comes just now, and is not from the store.
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
                trial.stop(trial.spoke_s)
            trial.newest, trial.spoke_s = number, at_s
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
        """The newest of a job; None: it has none."""
        trial = self._trials.get(job)
        return trial.last if trial is not None else None

    def forget(self, job: JobId) -> None:
        """The job has ended."""
        with self._lock:
            self._trials.pop(job, None)

    def on(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the results of its jobs, where jobs can share GPUs: no other policy looks at them."""
        state = snapshot.sharing
        if state is None:
            return snapshot
        uses = dict(state.uses)
        with self._lock:
            for job in snapshot.jobs:
                trial = self._trials.get(job.id)
                if trial is None or trial.last is None:
                    continue
                # One that runs where no agent tells of it is judged, too: by what it says itself.
                use = uses.get(job.id) or JobUse(job.id, ran_s=trial.so_far_s())
                for at_s, metric in trial.fresh:
                    trial.keep(min(at_s, use.ran_s) if use.ran_s > 0 else at_s, metric)
                trial.fresh.clear()
                uses[job.id] = dataclasses.replace(use, results=tuple(trial.best))
        return dataclasses.replace(snapshot, sharing=dataclasses.replace(state, uses=uses))
