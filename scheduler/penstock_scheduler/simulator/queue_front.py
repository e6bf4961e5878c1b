"""Jobs that arrive, and jobs that wait: all of them, or the front of the queue.

A policy that keeps all running jobs and starts others strictly in the order of submission decides by the free GPUs and
by the first waiting job alone. For such a policy the cluster can show just that: the GPUs of running jobs as held by
others, and the first few waiting jobs. The decisions are the same, and the cost of an observation does not depend on
how many jobs wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from penstock_scheduler.model import JobId
from penstock_scheduler.simulator.jobs import SimulatedJob


class Arrivals:
    """Jobs in the order in which they arrive."""

    def __init__(self, jobs: Iterable[SimulatedJob]) -> None:
        self._jobs = sorted(jobs, key=lambda job: job.submit_s)
        self._times_s = [job.submit_s for job in self._jobs]
        self._arrived = 0

    @property
    def over(self) -> bool:
        """Whether all jobs have arrived."""
        return self._arrived == len(self._jobs)

    @property
    def next_s(self) -> float:
        """When the next job arrives; infinite: no more jobs will."""
        return math.inf if self.over else self._times_s[self._arrived]

    def until(self, now_s: float) -> list[SimulatedJob]:
        """Jobs that arrive at or before `now_s` and have not been returned yet."""
        arrived = bisect_right(self._times_s, now_s)
        jobs = self._jobs[self._arrived : arrived]
        self._arrived = arrived
        return jobs


class SimulatedQueue:
    """Waiting jobs in the order of their submission.

    Args:
        front: number of waiting jobs that are shown where only the front is; 0: all are shown.
    """

    def __init__(self, front: int) -> None:
        self.front = front
        self.passed_over = 0
        """Number of jobs of the front that fit on no node now. As many more are shown."""
        self.observe_again = False
        """Whether the front has changed so that the policy must see it again at once."""
        self._waiting: list[tuple[float, JobId]] = []
        self._unstarted = 0
        """Jobs of the front that was shown last which have not started."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> JobId:
        """The job that waits at the front."""
        return self._waiting[0][1]

    def add(self, job: SimulatedJob) -> None:
        """Add a job that waits from now on."""
        insort(self._waiting, (job.submit_s, job.id))

    def remove(self, job: SimulatedJob) -> None:
        """Remove a job that starts."""
        del self._waiting[bisect_left(self._waiting, (job.submit_s, job.id))]
        self._unstarted -= 1

    def pass_over(self, jobs: int) -> None:
        """Note that this many jobs of the front fit on no node."""
        self.observe_again |= jobs > self.passed_over
        self.passed_over = jobs

    def show(self) -> list[JobId]:
        """The jobs of the front."""
        front = [job for _, job in self._waiting[: self.front + self.passed_over]]
        self._unstarted = len(front)
        return front

    def acted(self) -> None:
        """Note that actions were carried out. If all jobs of the front that fit have started, the policy must see the
        next ones."""
        if self.front and self._unstarted <= self.passed_over < len(self._waiting):
            self.observe_again = True

    @property
    def full(self) -> bool:
        """Whether the front has so many jobs that a job which arrives now would not be shown."""
        return len(self._waiting) >= self.front + self.passed_over
