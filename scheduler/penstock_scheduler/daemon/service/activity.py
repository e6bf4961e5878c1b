"""Finds running jobs whose GPUs are idle, and running jobs that have stopped reporting, from their reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock_profiles.wire import Observation, Report, Resumed, Started, Suspended
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.model import Job, Phase

IDLE_BELOW = 0.02
"""GPUs whose utilisation, as NVML samples it, is below this count as idle. Jobs that train show at least tens of per cent."""


CLOCKS_DIFFER_S = 60.0
"""By how much the clocks of a node and of slurmctld may differ, s."""


class Activity:
    """Records when each job last reported and since when its GPUs have been idle. Finds each run at most once for each."""

    def __init__(self) -> None:
        self._reported_s: dict[str, float] = {}
        """Job -> when its newest report came."""
        self._idle_s: dict[str, tuple[float, float]] = {}
        """Job whose reports say that its GPUs are idle -> since when they say so, and when the newest of them came."""
        self.newest_s: float | None = None
        """When the newest report of any job came; None: none has come."""
        self._heard: set[tuple[str, int]] = set()
        """(job, its restarts) of runs that have reported."""
        self._found: set[tuple[str, str, int]] = set()
        """("idle" or "silent", job, its restarts) that were found before."""

    def take(self, report: Report, now_s: float) -> None:
        """Take in a report that came now."""
        job, body = report.job_id, report.body
        self._reported_s[job] = self.newest_s = now_s
        busy = isinstance(body, Started | Suspended | Resumed)  # the run starts or was suspended: forget its idle time
        if isinstance(body, Observation):
            busy = (body.utilisation or 0.0) >= IDLE_BELOW
            if body.utilisation is not None and not busy:
                since_s, _ = self._idle_s.get(job, (now_s, now_s))
                self._idle_s[job] = since_s, now_s
        if busy:
            self._idle_s.pop(job, None)

    def forget(self, job: str) -> None:
        """Drop what is known of a job that is not running."""
        self._reported_s.pop(job, None)
        self._idle_s.pop(job, None)

    def unheard(
        self, jobs: Iterable[Job], newest: Callable[[str], float | None], after_s: float, now_s: float
    ) -> list[str]:
        """Jobs with a run that has gone on for longer than `after_s` without a report, although the script should report: an
        earlier run did, or the job spec says how far its batch may grow, and only the executor makes it grow. Others may not
        use Penstock's client at all.

        Args:
            jobs: as observed.
            newest: when a job's newest report was written, by the clock of its node; None if it has never reported.
            after_s: how long a run may take to its first report.
            now_s: now.
        """
        found = []
        for job in jobs:
            begun_s = job.started_s
            if job.phase is not Phase.RUNNING or begun_s is None or now_s - begun_s <= after_s:
                continue
            # A run that stands still on shared GPUs may have had no time to begin.
            if job.suspension is not None or job.suspended_s or (job.id, job.restarts) in self._heard:
                continue
            at_s = newest(job.id)
            if at_s is None:
                should = job.spec.max_batch_size is not None
            else:
                should = bool(job.restarts) and at_s < begun_s - CLOCKS_DIFFER_S
            if should:
                found.append(job.id)
            elif at_s is not None:
                self._heard.add((job.id, job.restarts))
        return found

    def reporting(self, live: Mapping[str, JobView]) -> int:
        """How many of the running jobs have reported."""
        return sum(
            1 for job in list(self._reported_s) if (view := live.get(job)) is not None and view.state == "running"
        )

    def idle(self, live: Mapping[str, JobView], after_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs whose reports have said for longer than `after_s` that their GPUs are idle."""
        idle_s = {job: last_s - since_s for job, (since_s, last_s) in list(self._idle_s.items())}
        return self._find("idle", live, idle_s, after_s)

    def silent(self, live: Mapping[str, JobView], after_s: float, now_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs whose newest report came more than `after_s` ago."""
        silent_s = {job: now_s - reported_s for job, reported_s in list(self._reported_s.items())}
        return self._find("silent", live, silent_s, after_s)

    def _find(
        self, what: str, live: Mapping[str, JobView], seconds: Mapping[str, float], after_s: float
    ) -> list[tuple[JobView, float]]:
        found = []
        for job, so_far_s in seconds.items():
            view = live.get(job)
            if view is None or view.state != "running":
                self.forget(job)  # its next run will report again
            elif so_far_s > after_s and view.allocation and (run := (what, job, view.restarts)) not in self._found:
                self._found.add(run)
                found.append((view, so_far_s))
        self._found = {run for run in self._found if run[1] in live}
        self._heard = {run for run in list(self._heard) if run[0] in live}  # others add to it
        return found
