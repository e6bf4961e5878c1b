"""Finds running jobs whose GPUs are idle, and running jobs that have stopped reporting, from their reports."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_profiles.wire import Observation, Report, Resumed, Started, Suspended
from penstock_scheduler.api.messages import JobView

IDLE_BELOW = 0.02
"""GPUs whose utilisation, as NVML samples it, is below this count as idle. Jobs that train show at least tens of per cent."""


class Activity:
    """Records when each job last reported and since when its GPUs have been idle. Finds each run at most once for each."""

    def __init__(self) -> None:
        self._reported_s: dict[str, float] = {}
        """Job -> when its newest report came."""
        self._idle_s: dict[str, tuple[float, float]] = {}
        """Job whose reports say that its GPUs are idle -> since when they say so, and when the newest of them came."""
        self.newest_s: float | None = None
        """When the newest report of any job came; None: none has come."""
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
        return found
