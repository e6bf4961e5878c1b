"""Finds jobs to which Slurm has given the id of another job that it has forgotten.

The former job may be in the observation before, or only in the spool, where its control message has its time of submission.
The observation that finds such an id leaves the job out, so that everything forgets the former one as a job that is gone; the
next one shows it. A control message of its own ends what the former's would tell it, and its epoch supersedes the former's runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set

from penstock_profiles.wire import ControlMessage, claimed_epochs
from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.model import JobId
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.base import WAITING

log = logging.getLogger(__name__)


class ReusedIds:
    """Remembers when each listed job was submitted."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._submitted_s: dict[JobId, float] = {}

    def look(self, jobs: Iterable[SlurmJob], listed: Set[JobId]) -> frozenset[JobId]:
        """Take in an observation. Returns the jobs that it leaves out, each in the first observation that has it.

        Args:
            jobs: those whose records may have changed.
            listed: all jobs that Slurm lists.
        """
        known, found = self._submitted_s, set()
        for job in jobs:
            before_s, known[job.id] = known.get(job.id), job.submit_s
            if before_s == job.submit_s or job.restarts:
                continue
            if is_another(job, before_s) or is_another(job, self._told_s(job)):
                found.add(job.id)
        for job_id in known.keys() - listed:
            del known[job_id]
        return frozenset(found)

    def control(self, job: SlurmJob) -> ControlMessage | None:
        """The job's own control message; None: it has none."""
        found = self._spool.control(job.id)
        return None if found is None or is_another(job, found.submitted_s) else found

    def begin(self, job: SlurmJob) -> None:
        """Give a managed job a control message of its own if that of a former job is there. Raises StoreError."""
        former = self._spool.control(job.id)
        if former is None or not is_another(job, former.submitted_s):
            return
        # A job that runs has claimed its epoch already: the next one would supersede it.
        newest = max([former.epoch, *claimed_epochs(self._spool.folder, job.id)])
        control = ControlMessage(
            job_id=job.id,
            epoch=newest + 1 if job.state in WAITING else newest,
            round=0,
            submitted_s=job.submit_s,
            submitted_to=job.partition[0],
            holds=job.restarts,
        )
        self._spool.tell(control, job.uid)
        log.warning("job id came again", extra={"job": job.id, "user": job.user, "epoch": control.epoch})

    def _told_s(self, job: SlurmJob) -> float | None:
        control = self._spool.control(job.id)
        return None if control is None else control.submitted_s
