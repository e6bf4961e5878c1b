"""Keeps the queue in the store: which jobs hold no GPUs, since when, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock_scheduler.api.history_messages import QueueEntry
from penstock_scheduler.api.ports import NOT_COUNTED, GpuSecondsByJob, RoundListener
from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.model import ClusterState, Job, JobId, Phase, PlainJob, Reason
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.store.sql import SqlStore

NEW = "new"
"""Code of a job that no round has considered."""
NOT_FOR_GPUS = frozenset({"held", "waiting-cluster", "refused", "never-fits"})
"""Codes of jobs that no free GPU would start: a person has to do something."""

Why = tuple[str, str, str, float | None]
"""Code, text, needs, estimated start."""


class WaitLog(RoundListener):
    """Writes to the store what has changed in the queue. To be called by the round loop's thread alone."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._open = {entry.job: entry for entry in store.waits()}
        self._record = store.last_round()
        self._seen: tuple[ClusterState, RoundRecord | None] | None = None
        """The newest observation that is in the store, and the round by which its jobs' reasons are."""

    def decided(self, record: RoundRecord) -> None:
        """Take in a round: why jobs wait."""
        self._record = record

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
        """Take in an observation. Raises StoreError; then the next call takes in what this one did not."""
        seen, round_before = self._seen if self._seen is not None else (None, None)
        jobs = state.changed(seen if round_before is self._record else None)
        queue = dict(self._queue(jobs, state, now_s))
        left = self._open.keys() - state.present.keys() - queue.keys()
        left |= {job.id for job in jobs if job.id in self._open and job.id not in queue}
        over = {
            (job, was.since_s): max(now_s, was.since_s)
            for job in (*left, *queue)
            if (was := self._open.get(job)) is not None
            and (job in left or queue[job].code != was.code or queue[job].submit_s != was.submit_s)
        }
        news = [entry for job, entry in queue.items() if entry is not self._open.get(job)]
        self._store.save_waits(news, over)
        for job in left:
            del self._open[job]
        self._open |= queue
        self._seen = state, self._record

    def _queue(self, jobs: Iterable[Job], state: ClusterState, now_s: float) -> Iterator[tuple[JobId, QueueEntry]]:
        """The entries of these jobs, and of all that wait for something else or are refused."""
        for job in jobs:
            if job.phase in (Phase.QUEUED, Phase.STARTING):
                yield job.id, self._entry(job, self._why(job.id), now_s)
        for each in state.waiting:
            yield each.job.id, self._entry(each.job, (each.code, each.text, "", None), now_s)
        for plain in state.plain:
            yield plain.id, self._entry(plain, ("plain", plain.text, plain.needs, plain.room_s), now_s)
        unseen = {job.id for job in state.unseen}
        for refusal in state.refused:
            if refusal.job in state.present and refusal.job not in unseen:
                continue
            before, why = self._open.get(refusal.job), ("refused", refusal.text, "", None)
            if before is None:
                before = QueueEntry(
                    position=None, job=refusal.job, name=refusal.name[:1000], user=refusal.user, submit_s=now_s,
                    since_s=now_s, code="",
                )  # fmt: skip
            yield refusal.job, _changed(before, why, now_s)

    def _entry(self, job: Job | PlainJob, why: Why, now_s: float) -> QueueEntry:
        """The job's entry: the very object of the last observation if nothing has changed."""
        before = self._open.get(job.id)
        if before is None or is_another(job, before.submit_s):
            before = QueueEntry(
                position=None,
                job=job.id,
                name=job.name[:1000],
                user=job.user,
                account=job.account,
                partition=next(iter(job.partitions), ""),
                submit_s=job.submit_s,
                since_s=now_s,
                code="",
            )
        return _changed(before, why, now_s)

    def _why(self, job: JobId) -> Why:
        plan = self._record.plan if self._record is not None else None
        reason: Reason | None = None
        if plan is not None:
            given = plan.assignments.get(job) or plan.bursts.get(job)
            reason = plan.waiting.get(job) if given is None else given.reason
        if reason is None:
            return NEW, "no round has considered the job yet; the next round will", "", None
        return reason.code.value, reason.text, reason.needs, reason.estimated_start_s


def _changed(before: QueueEntry, why: Why, now_s: float) -> QueueEntry:
    """The entry with this reason. Another code begins a new span of waiting."""
    if (before.code, before.text, before.needs, before.estimated_start_s) == why:
        return before
    changes: dict[str, object] = dict(zip(("code", "text", "needs", "estimated_start_s"), why, strict=True))
    if before.code not in ("", why[0]):
        changes["since_s"] = max(now_s, before.since_s + 0.001)
    return before.model_copy(update=changes)


def numbered(entries: list[QueueEntry]) -> list[QueueEntry]:
    """The queue with positions: first what waits for GPUs, in the order of submission, then the rest."""
    ours = [entry for entry in entries if entry.code not in NOT_FOR_GPUS]
    rest = [entry for entry in entries if entry.code in NOT_FOR_GPUS]
    return [entry.model_copy(update={"position": place}) for place, entry in enumerate(ours, 1)] + rest
