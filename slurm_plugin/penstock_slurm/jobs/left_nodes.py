"""The nodes that a stopped job ran on: while it waits, it names them no more."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from penstock_scheduler.model import JobId
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmWriter
from penstock_slurm.jobs.in_turn import in_turn

log = logging.getLogger(__name__)

MOST = 20
"""Jobs at a time. Each takes a process."""


class LeftNodes:
    """Slurm keeps the nodes that Penstock sent a job to. When slurmctld starts or is reconfigured, it fails each job that names a
    node which is no longer in slurm.conf, waiting jobs too.
    """

    def __init__(self, writer: SlurmWriter) -> None:
        self._writer = writer
        self._done: dict[JobId, int] = {}
        """Job -> its restarts when the command was given, which is given once a run."""

    def clear(self, jobs: Sequence[SlurmJob], acted: Collection[JobId]) -> None:
        """Let jobs that are held after a run name no nodes.

        Args:
            jobs: managed jobs, and those that wait for something else than GPUs.
            acted: jobs that a round acts on, which get nodes next.
        """
        self._done = {job.id: self._done[job.id] for job in jobs if job.id in self._done}
        left = [
            job
            for job in jobs
            if job.held and job.required_nodes and job.restarts > self._done.get(job.id, 0) and job.id not in acted
        ]
        if not (due := in_turn(left, MOST)):
            return
        try:
            self._writer.name_no_nodes([job.id for job in due])
        except SlurmError as error:
            log.info("cannot take the nodes of former runs from jobs", extra={"jobs": len(due), "text": str(error)})
            return
        self._done |= {job.id: job.restarts for job in due}
