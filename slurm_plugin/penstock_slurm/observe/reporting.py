"""Takes what jobs report out of the spool."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock_profiles.wire import Checkpointed, ControlMessage, Report, Started
from penstock_scheduler.api.ports import Clock
from penstock_scheduler.jobs import report_quota
from penstock_scheduler.jobs.models import MOST_COST_S
from penstock_scheduler.jobs.report_quota import ReportQuota
from penstock_scheduler.model import JobId
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import SlurmWriter
from penstock_slurm.jobs.messages import say
from penstock_slurm.observe.managed import ManagedJobs

log = logging.getLogger(__name__)

RECENT_S = 86_400.0
"""How far back a new daemon searches for reports of jobs that ended while no daemon ran."""


class Reporting:
    """Reads the reports of managed jobs, and for a last time those of jobs that have ended since the last observation.

    A job that its user cancels, or that reaches its time limit, is not managed any more, but still saves and reports it.
    """

    def __init__(self, writer: SlurmWriter, spool: Spool, clock: Clock, managed: ManagedJobs) -> None:
        self._writer, self._spool, self._clock, self._managed = writer, spool, clock, managed
        self._quota = ReportQuota()
        self._owners: dict[JobId, int] = {}
        self.saved: set[JobId] = set()
        """Jobs that have reported a checkpoint."""
        self._known = spool.recent(clock.now_s() - RECENT_S)
        """Jobs whose reports may matter."""
        self._listed: set[JobId] = set()
        self._unread: list[Report] = []
        """What the spool gave in a call that failed after that."""

    def read(self) -> Sequence[Report]:
        """What has come since the last call, without what is beyond a job's quota."""
        managed = self._managed
        gone = self._known - managed.jobs.keys()
        self._owners |= {job_id: record.uid for job_id, record in managed.looked.items()}
        self._unread += self._spool.read([*managed.told, *sorted(gone)], self._owners, gone | managed.unheard)
        for report in self._unread:
            self._measure_pause(report)
        found, self._unread = self._unread, []
        self.saved |= {report.job_id for report in found if isinstance(report.body, Checkpointed)}
        kept, over = self._quota.admit(found, self._clock.now_s())
        # What an earlier daemon has read and stored is no haste of the job's.
        for job_id in [each for each in over & managed.records.keys() if not self._spool.catches_up(each)]:
            say(self._writer, managed.records[job_id], report_quota.TEXT)
        ended = {job_id: job for job_id, job in managed.gone.items() if job_id not in managed.jobs}
        managed.states.ended(ended, self._spool.ended)
        self._forget(managed.jobs.keys() | (managed.gone.keys() & managed.states.jobs))
        return kept

    def _forget(self, keep: set[JobId]) -> None:
        """Forget all jobs but these."""
        before, listed = (self._known, self._listed), self._managed.listed
        self._known, self._listed = keep, listed
        if before[0] <= keep and before[1] <= listed:
            return
        self.saved &= keep
        self._owners = {job_id: uid for job_id, uid in self._owners.items() if job_id in keep}
        self._spool.forget(keep, listed)
        self._quota.forget(keep)

    def _measure_pause(self, report: Report) -> None:
        """Note the pause of a move that this report ends."""
        record = self._managed.records.get(report.job_id)
        if record is None or (control := self._spool.control(report.job_id)) is None:
            return
        if (found := measured(control, report, self._clock.now_s())) is None:
            return
        self._spool.tell(found, record.uid)
        if found.pauses_s != control.pauses_s:
            pause_s = round(found.pauses_s[-1], 2)
            log.info("pause", extra={"round": found.round, "job": report.job_id, "pause_s": pause_s})


PAUSES = 8
"""Newest pauses of a job that are kept."""


def measured(control: ControlMessage, report: Report, now_s: float) -> ControlMessage | None:
    """The control message with the pause that this report, read at `now_s`, ends; None: it ends none.

    The clocks of nodes and daemon mostly agree, because munge refuses large differences. A pause that seems to end before it
    began was not measured: one of them was set, or another penstockd leads. A job reports its beginning when it likes, so a pause
    counts as `MOST_COST_S` at most.
    """
    if not isinstance(report.body, Started) or control.moved_s is None:
        return None
    if report.epoch < control.epoch or control.request is not None:
        return None
    pause_s = min(report.time_s - control.moved_s, now_s - control.moved_s, MOST_COST_S)  # a report may claim any time
    pauses_s = control.pauses_s if pause_s < 0 else (*control.pauses_s, pause_s)[-PAUSES:]
    return control.model_copy(update={"moved_s": None, "pauses_s": pauses_s})
