"""What the daemon remembers of managed jobs from one observation to the next.

Nothing here is needed after a restart. A daemon that has forgotten it waits longer; it never does anything twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock_scheduler.model import Job, JobId
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.states import WAITING, Facts, State, state
from penstock_slurm.time_limits import LimitedRun, seen

log = logging.getLogger(__name__)

Run = tuple[JobId, int]
"""A job, and the restarts of the run."""


@dataclass(slots=True)
class Remembered:
    """See the module. Times in seconds since 1970."""

    pending_since_s: dict[Run, float] = field(default_factory=dict)
    """By restarts, too: a run between two observations leaves a credential of its own."""
    released_s: dict[JobId, float] = field(default_factory=dict)
    """When a job was first seen where it was sent, before its start."""
    tries: dict[tuple[JobId, int], int] = field(default_factory=dict)
    """(job, round) -> attempts to start it."""
    stopped_s: dict[Run, float] = field(default_factory=dict)
    """When Penstock stopped the run, because Slurm does not tell that of a requeued job."""
    signalled: dict[JobId, str] = field(default_factory=dict)
    """The request for which a job was signalled."""
    limited: dict[JobId, LimitedRun] = field(default_factory=dict)
    """The newest run of each job with a time limit."""

    def saw(
        self,
        managed: Mapping[JobId, SlurmJob],
        jobs: Mapping[JobId, Job],
        listed: Iterable[SlurmJob],
        now_s: float,
    ) -> set[Run]:
        """Take over an observation. Returns the runs that may still matter: the present and the last one of each job."""
        pending = {(job_id, job.restarts) for job_id, job in managed.items() if job.state in WAITING}
        self.pending_since_s = {key: self.pending_since_s.get(key, now_s) for key in pending}
        starting = {job_id for job_id, _ in pending if jobs[job_id].allocation is not None}
        self.released_s = {job_id: self.released_s.get(job_id, now_s) for job_id in starting}
        self.tries = {key: count for key, count in self.tries.items() if key[0] in managed}
        runs = {(job_id, job.restarts - before) for job_id, job in managed.items() for before in (0, 1)}
        self.stopped_s = {key: at_s for key, at_s in self.stopped_s.items() if key in runs}
        self.signalled = {job_id: request for job_id, request in self.signalled.items() if job_id in managed}
        self.limited = seen(self.limited, listed, now_s)
        return runs

    def stopped(self, job: SlurmJob, asked_s: float, answered_s: float) -> None:
        """Note that Penstock has stopped a run between these times: in whole seconds, as in Slurm."""
        self.stopped_s[job.id, job.restarts] = float(math.floor((asked_s + answered_s) / 2))


class StateLog:
    """Logs each change of a job's state."""

    def __init__(self) -> None:
        self._states: dict[JobId, State] = {}
        """As logged: of managed jobs, and of jobs whose processes are still ending."""

    @property
    def jobs(self) -> frozenset[JobId]:
        """The jobs whose end was not logged yet."""
        return frozenset(self._states)

    def saw(self, job_id: JobId, now: State) -> None:
        """Log a job's state if it has changed."""
        before = self._states.get(job_id)
        if before is not now:
            self._states[job_id] = now
            log.info("state", extra={"job": job_id, "state": now.value, "before": before and before.value})

    def ended(self, gone: Mapping[JobId, SlurmJob | None], ended: Callable[[JobId], bool]) -> None:
        """Log what became of jobs that Slurm does not list any more.

        Args:
            gone: such jobs -> their record; None: Slurm does not know the job.
            ended: tells whether a job's newest run has reported that the job is over.
        """
        for job_id, slurm_job in gone.items():
            if job_id in self._states:
                now = state(slurm_job, Facts(ended=ended(job_id)))
                self.saw(job_id, now)
                if now is not State.STOPPING:  # else its processes are still ending
                    del self._states[job_id]
