"""How long jobs have waited in the queue, over all their runs: what waiting budgets count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from penstock_scheduler.model import Job, JobId, Phase

IN_QUEUE = frozenset({Phase.QUEUED, Phase.STARTING})


class QueueTime(BaseModel):
    """A job's time outside the queue, since its submission."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out_s: float = 0.0
    """Seconds that it has spent outside the queue, in runs that are over."""
    left_s: float | None = None
    """When its present run began, s since 1970; None: it is in the queue."""

    def waits_since_s(self, submit_s: float, now_s: float) -> float:
        """The time at which a wait of the same length without any run would have begun. It stands still in the queue."""
        return submit_s + self.out_s + (0.0 if self.left_s is None else max(now_s - self.left_s, 0.0))


def counted(known: Mapping[JobId, QueueTime], jobs: Iterable[Job], now_s: float) -> dict[JobId, QueueTime]:
    """The queue times of these jobs now. Unchanged entries are the same objects; other jobs are forgotten.

    A job that is not known and has run before counts from its return to the queue, so it waits too long rather than too
    short: leaving costs money.
    """
    found = {}
    for job in jobs:
        time = known.get(job.id)
        if time is None:
            before_s = max(job.requeued_s or job.submit_s, job.submit_s) - job.submit_s
            time = QueueTime(out_s=before_s)
        if job.phase in IN_QUEUE and time.left_s is not None:
            time = QueueTime(out_s=time.out_s + max(now_s - time.left_s, 0.0))
        elif job.phase not in IN_QUEUE and time.left_s is None:
            time = QueueTime(out_s=time.out_s, left_s=now_s if job.started_s is None else min(job.started_s, now_s))
        found[job.id] = time
    return found


def returned(job: Job, now_s: float) -> QueueTime:
    """The queue time of a job that comes back from the cloud now: star-wait counts from its return."""
    return QueueTime(out_s=max(now_s - job.submit_s, 0.0))
