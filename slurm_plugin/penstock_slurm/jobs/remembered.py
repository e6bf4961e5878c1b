"""What the daemon remembers of managed jobs from one observation to the next.

Nothing here is needed after a restart. A daemon that has forgotten it waits longer; it never does anything twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from penstock_scheduler.model import Job, JobId
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.base import WAITING
from penstock_slurm.jobs.states import Facts, State, state
from penstock_slurm.jobs.time_limits import LimitedRun, seen

log = logging.getLogger(__name__)

Run = tuple[JobId, int]
"""A job, and the restarts of the run."""

KILLED_AGAIN_S = 5.0
"""A run that took longer than this to end may have been ended twice, which revokes its credential anew. Slurm does that after
KillWait and twice MessageTimeout, 50 s by default."""


@dataclass(slots=True)
class Remembered:
    """See the module. Times in seconds since 1970."""

    pending: dict[JobId, tuple[int, float]] = field(default_factory=dict)
    """Pending job -> its restarts, and since when it was seen so: a run between two observations leaves a credential of its
    own."""
    released_s: dict[JobId, float] = field(default_factory=dict)
    """When a job was first seen where it was sent, before its start."""
    room_until_s: dict[JobId, float] = field(default_factory=dict)
    """Until when Slurm may take to stop the plain jobs that are where such a job was sent."""
    tries: dict[tuple[JobId, int], int] = field(default_factory=dict)
    """(job, round) -> attempts to start it."""
    stopped_s: dict[Run, float] = field(default_factory=dict)
    """When Penstock stopped the run, because Slurm does not tell that of a requeued job."""
    revoked_s: dict[Run, float] = field(default_factory=dict)
    """When the credential of a run that Penstock stopped had been revoked: Slurm had answered."""
    signalled: dict[JobId, str] = field(default_factory=dict)
    """The request for which a job was signalled."""
    limited: dict[JobId, LimitedRun] = field(default_factory=dict)
    """The newest run of each job with a time limit."""

    def saw(
        self,
        looked: Mapping[JobId, SlurmJob],
        jobs: Mapping[JobId, Job],
        at_rest: Set[JobId],
        records: Iterable[SlurmJob],
        now_s: float,
    ) -> None:
        """Take over an observation.

        Args:
            looked: the managed jobs that were looked at.
            jobs: what the scheduler sees of these.
            at_rest: the other managed jobs, which are as they were.
            records: all jobs that were looked at, and all that run.
            now_s: the time.
        """
        managed = looked.keys() | at_rest
        for job_id in self.pending.keys() - managed:
            del self.pending[job_id]
        for job_id, job in looked.items():
            if job.state not in WAITING:
                self.pending.pop(job_id, None)
            elif self.pending.get(job_id, (None, 0.0))[0] != job.restarts:
                self.pending[job_id] = job.restarts, now_s
        starting = [
            job_id for job_id, job in looked.items() if job.state in WAITING and jobs[job_id].allocation is not None
        ]
        self.released_s = {job_id: self.released_s.get(job_id, now_s) for job_id in starting}
        self.room_until_s = {job_id: self.room_until_s[job_id] for job_id in starting if job_id in self.room_until_s}
        self.tries = {key: count for key, count in self.tries.items() if key[0] in managed}
        self.signalled = {job_id: request for job_id, request in self.signalled.items() if job_id in managed}
        kept = {job_id: run for job_id, run in self.limited.items() if job_id in at_rest}
        self.limited = kept | seen(self.limited, records, now_s)

    def forget(self, matters: Callable[[JobId, int], bool]) -> None:
        """Forget the stops of all runs but these."""
        self.stopped_s = {run: at_s for run, at_s in self.stopped_s.items() if matters(*run)}
        self.revoked_s = {run: at_s for run, at_s in self.revoked_s.items() if matters(*run)}

    def revoked_for_s(self, job: SlurmJob, now_s: float) -> float:
        """For how long at least the credential of a pending job's last run has been revoked.

        Slurm revokes it when it begins to end the run. If Penstock did not stop the run, or if the run ended slowly, the time
        counts from when the job was first seen pending.
        """
        restarts, since_s = self.pending.get(job.id, (job.restarts, now_s))
        if restarts != job.restarts:
            return 0.0
        revoked_s = self.revoked_s.get((job.id, restarts - 1), -math.inf)
        return now_s - (revoked_s if since_s - revoked_s < KILLED_AGAIN_S else since_s)

    def stopped(self, job: SlurmJob, asked_s: float, answered_s: float) -> None:
        """Note that Penstock has stopped a run between these times: in whole seconds, as in Slurm."""
        self.stopped_s[job.id, job.restarts] = float(math.floor((asked_s + answered_s) / 2))
        self.revoked_s[job.id, job.restarts] = answered_s


class StateLog:
    """Logs each change of a job's state."""

    def __init__(self) -> None:
        self._states: dict[JobId, State] = {}
        """As logged: of managed jobs, and of jobs whose processes are still ending."""

    @property
    def jobs(self) -> Set[JobId]:
        """The jobs whose end was not logged yet: all managed ones, and those that are gone."""
        return self._states.keys()

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
