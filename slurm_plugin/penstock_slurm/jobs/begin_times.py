"""Begin times: what Slurm does with waiting jobs while penstockd is away, and deadlines of held jobs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from penstock_scheduler.model import JobId
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmWriter
from penstock_slurm.gateway.base import ADMIN, WAITING, Write
from penstock_slurm.jobs.messages import in_turn
from penstock_slurm.jobs.notes import kept_by_begin, overdue, plain_shape

log = logging.getLogger(__name__)

MOST_RELEASES = 200
"""Held jobs that are released to their deadlines at a time, through few processes."""

MOST_LEFT = 50
"""Jobs that are left to Slurm at a time: each takes processes of its own."""


def let_deadlines_count(writer: SlurmWriter, jobs: Iterable[SlurmJob], now_s: float) -> None:
    """Release held jobs whose deadline is over, because Slurm ends them only then."""
    over = in_turn((job for job in jobs if job.held and overdue(job, now_s)), MOST_RELEASES)
    for job, error in zip(
        over, writer.write([Write(job.id, "release", admin_holds=job.reason == ADMIN) for job in over]), strict=True
    ):
        if error is not None:
            log.info("cannot release the job to its deadline", extra={"job": job.id, "text": str(error)})


class BeginTimes:
    """The begin times after which Slurm starts waiting jobs by itself. None: the site wants no such times.

    Slurm does not tell the begin time of a job with a dependency, so this object remembers when it was renewed.
    """

    def __init__(self, writer: SlurmWriter, after_s: float | None) -> None:
        self._writer, self._after_s = writer, after_s
        self._renewed_s: dict[JobId, float] = {}

    def renew(self, jobs: Collection[SlurmJob], acted: Collection[JobId], now_s: float) -> None:
        """Renew the begin times: one command for all, twice in `plain_after_s`.

        A held job, for example after a stop, gets such a time and the shape in which it would run.

        Args:
            jobs: managed jobs, also those that wait for something else than GPUs.
            acted: jobs that a round acts on, which are left alone.
            now_s: the time.
        """
        if self._after_s is None:
            return
        after_s, due, left = self._after_s, [], list[SlurmJob]()
        for job in jobs:
            shape = plain_shape(job)
            if (
                shape is None
                or job.state not in WAITING
                or job.id in acted
                or overdue(job, now_s)
                or job.reason == ADMIN
            ):
                continue
            begins_s = max(job.eligible_s or 0.0, self._renewed_s.get(job.id, -after_s) + after_s)
            if job.held or (job.required_nodes and kept_by_begin(job, now_s)):
                left.append(job)
            elif not job.required_nodes and begins_s - now_s < after_s / 2:
                due.append(job.id)
        for job in in_turn(left, MOST_LEFT):
            self._leave(job, after_s)
        if due:
            try:
                self._writer.begin_later(due, after_s)
            except SlurmError as error:
                log.warning("cannot renew begin times", extra={"jobs": len(due), "text": str(error)})
                return
        waiting = {job.id for job in jobs}
        kept = {job: at_s for job, at_s in self._renewed_s.items() if job in waiting}
        self._renewed_s = kept | dict.fromkeys(due, now_s)

    def _leave(self, job: SlurmJob, after_s: float) -> None:
        shape = plain_shape(job)
        assert shape is not None
        cpus = shape.nodes * job.cpus_for(shape.gpus_per_node, shape.tasks_per_node or 1)
        try:
            self._writer.leave_to_slurm(job.id, shape, cpus, after_s)
        except SlurmError as error:
            log.warning("cannot leave the job to Slurm", extra={"job": job.id, "text": str(error)})
