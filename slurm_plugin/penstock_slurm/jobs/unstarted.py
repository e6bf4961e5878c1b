"""Jobs that Slurm does not start where they are sent: each waits before it is sent again, twice as long each time.

A plan cannot know all that Slurm knows, and a job that it sends in vain in every round keeps its GPUs from others for ever.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from penstock_scheduler.model import Job, JobId, Phase
from penstock_scheduler.people.units import clock
from penstock_scheduler.safety.back_off import back_off_s

MOST_S = 1800.0
"""Longest time between two attempts, s."""


@dataclass(frozen=True, slots=True)
class _Attempts:
    """Attempts in vain, one after the other."""

    count: int
    last_s: float
    until_s: float
    """When the job may be sent again."""
    why: str


class Unstarted:
    """What the daemon remembers of such jobs. After a restart it tries each of them again.

    Args:
        first_s: how long a job waits after the second attempt in vain, s; after the first it is sent again at once, since
            another place may do. It is also the least time between two attempts that count.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._jobs: dict[JobId, _Attempts] = {}

    def refused(self, job_id: JobId, why: str, now_s: float) -> None:
        """An attempt was in vain. `why` is a sentence."""
        before = self._jobs.get(job_id)
        if before is not None and now_s - before.last_s < self._first_s:
            return
        count = 1 if before is None else before.count + 1
        pause_s = 0.0 if count == 1 else back_off_s(min(self._first_s, MOST_S), count - 1, MOST_S)
        self._jobs[job_id] = _Attempts(count, now_s, now_s + pause_s, why)

    def paused(self, jobs: Mapping[JobId, Job], others: Container[JobId], now_s: float) -> dict[JobId, str]:
        """Jobs that are not sent now, and for what they wait, as a sentence without its subject.

        Args:
            jobs: all that a round may place or stop. Those that run begin anew.
            others: jobs that wait for something else. Nobody gets an attempt by holding and releasing a job.
            now_s: s since 1970.
        """
        waits = (Phase.QUEUED, Phase.STARTING)
        self._jobs = {
            job_id: attempts
            for job_id, attempts in self._jobs.items()
            if job_id in others or ((job := jobs.get(job_id)) is not None and job.phase in waits)
        }
        return {
            job_id: f"waits until {clock(each.until_s)} to be sent again, after {each.count} attempts in vain: {each.why}"
            for job_id, each in self._jobs.items()
            if now_s < each.until_s and job_id in jobs
        }
