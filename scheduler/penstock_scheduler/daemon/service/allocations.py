"""Writes the allocation spans of jobs to the store, as the round loop sees them begin and end.

The store is the record: a penstockd that starts again goes on with the spans that are open there. What begins and ends with an
observation is in `penstock_scheduler.accounts.spans`. This module adds why, and the indices of the GPUs, which the
cluster tells some time after the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from penstock_profiles.wire import Started
from penstock_scheduler.accounts.gpu_seconds import in_cloud
from penstock_scheduler.accounts.spans import Closed, corrected, fits, follow, nodes_of, of_run, shared_jobs, unseen
from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.ports import NOT_COUNTED, Accounts, GpuIds, GpuSecondsByJob, RoundListener
from penstock_scheduler.model import ClusterState, EndedRun, Job, JobId, ReasonCode
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

CHECKS = 20
"""Most jobs whose indices are asked for in one tick: about 5 ms each on Slurm."""
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 600.0
"""Time to the second question for a job's indices, which doubles with each; after a wait of the latter, nobody asks again."""
REPORT_LATE_S = 60.0
"""How far a node's clock may be behind, so that a run's own report does not count as that of the run before."""

_STAYS = frozenset({ReasonCode.KEPT, ReasonCode.PINNED, ReasonCode.IN_FLIGHT})
"""Reasons that do not say why a job has what it has."""


class AllocationLog(RoundListener):
    """Keeps the store's allocation spans. To be called by the round loop's thread alone.

    Args:
        gpu_ids: asks the cluster for indices; None: it does not tell them.
        cloud_nodes: names of nodes that a cloud fills.
    """

    def __init__(self, store: SqlStore, gpu_ids: GpuIds | None, cloud_nodes: Callable[[], Collection[str]]) -> None:
        self._store, self._gpu_ids, self._cloud_nodes = store, gpu_ids, cloud_nodes
        self._open = {span.job: span for span in store.open_spans()}
        self._lacking: dict[JobId, tuple[float, float]] = {}
        """Job whose GPUs' indices are not known -> when to ask again, and how long to wait after that."""
        self._causes: dict[JobId, str] = {}
        self._jobs: Mapping[JobId, Job] = {}
        self._shared: frozenset[JobId] = frozenset()
        last = store.last_round()
        self._seen_s = 0.0
        if last is not None:
            self._seen_s = last.snapshot.time_s
            self._jobs = {job.id: job for job in last.snapshot.jobs}
            self.decided(last)

    def decided(self, record: RoundRecord) -> None:
        """Take in a round: why jobs get what they get."""
        plan = record.plan
        self._shared = shared_jobs(plan)
        self._causes = {job: text for job, text in self._causes.items() if job in plan.assignments} | {
            job: f"{given.reason.code.value}: {given.reason.text}"
            for job, given in plan.assignments.items()
            if given.reason.code not in _STAYS
        }

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
        """Take in an observation. Raises StoreError; then the next call takes in what this one did not."""
        found = follow(self._open, state, self._shared, self._seen_s or now_s, now_s)
        ended = [*map(self._ended, found.closed), *filter(None, map(self._gone, found.gone))]
        begun = [self._begun(job, from_s) for job, from_s in found.opened]
        self._store.save_spans(
            [*found.moved, *ended, *begun], once=[span for run in found.missed for span in self._missed(run)]
        )
        self._open |= {span.job: span for span in found.moved}
        for span in ended:
            self._open.pop(span.job, None)
            self._lacking.pop(span.job, None)
        for span in begun:
            self._open[span.job] = span
            self._lacking[span.job] = now_s, FIRST_WAIT_S
        self._jobs = state.present
        self._seen_s = now_s
        self._learn_gpu_ids(now_s)

    def correct(self, since_s: float, limit: int, accounts: Accounts) -> None:
        """Replace estimated ends by those in the cluster's accounts, of spans that ended since then. Raises StoreError.

        Args:
            limit: most spans.
        """
        jobs = {span.job for span in self._store.estimated_spans(since_s, limit)}
        if not jobs:
            return
        spans = self._store.spans_of(jobs)
        runs: dict[JobId, list[EndedRun]] = {}
        for run in accounts(sorted(jobs), min(each[0].from_s for each in spans.values())):
            runs.setdefault(run.job, []).append(run)
        told = [span for job, each in spans.items() for span in corrected(each, runs.get(job, ()))]
        added = [self._placed(span) for job, each in spans.items() for span in unseen(each, runs.get(job, ()))]
        self._store.save_spans(told, once=added)
        if told or added:
            log.info("ends of allocations learned from the accounts", extra={"spans": len(told), "added": len(added)})

    def _begun(self, job: Job, from_s: float) -> AllocationSpan:
        held = job.allocation
        assert held is not None
        return AllocationSpan(
            job=job.id,
            user=job.user,
            account=job.account,
            partition=held.partition or next(iter(job.partitions), ""),
            gpu_type=held.gpu_type,
            nodes=nodes_of(held),
            where="cloud" if in_cloud(held, self._cloud_nodes()) else "site",
            shared=job.id in self._shared,
            run_s=from_s if job.started_s is None else job.started_s,
            restarts=job.restarts,
            from_s=from_s,
            cause=self._causes.get(job.id, ""),
        )

    def _ended(self, closed: Closed) -> AllocationSpan:
        """The span with what ended it."""
        span = closed.span
        if closed.why == "resized":
            code, text = "resized", "its run goes on with other GPUs"
        elif closed.why == "sharing":
            code, text = "sharing", "its run goes on, and it shares its GPUs" + (" no more" if span.shared else "")
        elif (stop := self._store.newest_stop(span.job, span.from_s)) is not None:
            code, text = stop.code.value, stop.text
        else:
            code, text = "requeued", "it was put back into the queue, and Penstock did not ask for that"
        return span.model_copy(update={"end": code, "end_text": text})

    def _fate(self, job: JobId) -> tuple[str, str]:
        view = self._store.job(job)
        if view is None or view.state != "ended":
            return "ended", ""
        return "ended", view.ended + (f": it {view.ended_text}" if view.ended_text else "")

    def _gone(self, job: JobId) -> AllocationSpan | None:
        """The last span of a job that is gone, with the end that the board found; None: the job has not ended.

        A job that Slurm is still cleaning up holds its GPUs until then. The end is Slurm's all the same.
        """
        view, span = self._store.job(job), self._open[job]
        if view is None or view.state != "ended":
            return None
        known = view.ended != "UNKNOWN" and view.end_s is not None
        end_s = (view.end_s if known else None) or (self._seen_s or span.from_s)
        code, text = self._fate(job)
        changes = {"to_s": max(end_s, span.from_s), "exact": known, "end": code, "end_text": text}
        return span.model_copy(update=changes)

    def _missed(self, run: EndedRun) -> list[AllocationSpan]:
        """The span of a run that began and ended between two observations; none if it is nobody's."""
        job, view = self._jobs.get(run.job), None
        if job is None:
            view = self._store.job(run.job)
        if not run.held.gpus or (job is None and view is None):
            return []
        user, account = (job.user, job.account) if job is not None else (view.user, view.account) if view else ("", "")
        span = self._placed(of_run(run, user, account, next(iter(job.partitions), "") if job is not None else ""))
        code, text = self._fate(run.job)
        return [span.model_copy(update={"end": code, "end_text": text, "cause": self._causes.get(run.job, "")})]

    def _placed(self, span: AllocationSpan) -> AllocationSpan:
        away = any(node in self._cloud_nodes() for node in span.nodes)
        return span.model_copy(update={"where": "cloud" if away else "site"})

    def _learn_gpu_ids(self, now_s: float) -> None:
        """Ask for the indices of the GPUs of new spans, a few at a time."""
        due = [job for job, (next_s, _) in self._lacking.items() if next_s <= now_s][:CHECKS]
        known: list[AllocationSpan] = []
        for job in due:
            span, wait_s = self._open[job], self._lacking.pop(job)[1]
            found = dict(self._gpu_ids(job)) if self._gpu_ids is not None else {}
            if not fits(span, found):
                found = self._reported(span)
            if fits(span, found):
                known.append(span.model_copy(update={"gpu_ids": found}))
            elif wait_s <= LAST_WAIT_S:
                self._lacking[job] = now_s + wait_s, 2 * wait_s
        self._store.save_spans(known)
        self._open |= {span.job: span for span in known}

    def _reported(self, span: AllocationSpan) -> dict[str, tuple[int, ...]]:
        """The indices that the run itself has reported; empty: it has not."""
        for report in self._store.newest_reports(span.job, ("started",), 1):
            if isinstance(report.body, Started) and report.time_s >= span.run_s - REPORT_LATE_S:
                return dict(report.body.gpu_ids)
        return {}
