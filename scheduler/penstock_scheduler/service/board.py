"""What the daemon knows now: the round loop's thread writes it, the API's threads read it.

`ObservedCluster` stands between the loop and its cluster and shows the board all that passes. The board keeps the store's
table of jobs up to date and wakes the clients that wait for a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from penstock_profiles.wire import Ended, Observation, Report, Result, Started
from penstock_scheduler.errors import StoreError
from penstock_scheduler.messages import AllocationView, JobView, LedgerLine, ResultView
from penstock_scheduler.model import Action, ClusterState, EndedRun, Job, Outcome, Phase, Placement, Refusal
from penstock_scheduler.ports import ClusterParts, Fate, Submitter
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.results import CLOCKED, Results
from penstock_scheduler.service.activity import Activity
from penstock_scheduler.store import SqlStore, summarise

Listener = Callable[[str, str, str], None]
"""Called with an event's kind, the user that may see it ("": all users), and its JSON."""


class Board:
    """What is known now. Methods may be called from any thread.

    Args:
        submitter: what knows how jobs ended; None: the cluster does not tell.
        on_end: called with each job that has ended.
    """

    def __init__(
        self,
        store: SqlStore,
        submitter: Submitter | None,
        on_end: Callable[[JobView], None] = lambda view: None,
    ) -> None:
        self.store = store
        self._on_end = on_end
        self.submitter = submitter
        self.counters: Counter[str] = Counter()
        self.state: ClusterState | None = None
        self.observed_s: float | None = None
        self.record: RoundRecord | None = store.last_round()
        self.listeners: set[Listener] = set()
        self._live = {view.id: view for _, view in store.jobs(states=("queued", "starting", "running", "stopping"))}
        self.results = Results()
        for job in [job for job, view in self._live.items() if view.start_s is not None]:
            for report in store.newest_reports(job, CLOCKED):
                self.results.take(report)
        self._shown: dict[str, tuple[Job, str, ResultView | None, JobView]] = {}
        """Live job -> the job as last observed, its reason and newest result then, and the view made of these."""
        self._progress: dict[str, tuple[float, float | None]] = {}
        """Live job -> its newest progress and total, as it reported them."""
        self._activity = Activity()
        self._waiting: dict[str, asyncio.Event] = {}
        """Live job -> is set when the job changes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._changing = threading.Lock()

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop on which clients wait."""
        self._loop = loop

    # --- for the round loop

    def take_state(self, state: ClusterState, now_s: float, elsewhere: Collection[str] = ()) -> None:
        """Take in an observation of the cluster.

        Args:
            elsewhere: nodes in the cloud. A run there holds no GPUs of the site.

        Raises:
            StoreError: nothing was taken in; the next call takes it in.
        """
        with self._changing:
            self._take_state(state, now_s, frozenset(elsewhere))

    def _take_state(self, state: ClusterState, now_s: float, elsewhere: frozenset[str]) -> None:
        jobs = (*state.jobs, *(each.job for each in state.waiting))
        notes = {each.job.id: (each.code, each.text) for each in state.waiting}
        there = {job.id for job in jobs}
        views = [self._view(job, self._live.get(job.id), now_s, *notes.get(job.id, ("", ""))) for job in jobs]
        views += self._left_alone(state.refused)
        gone = [job for job in self._live if job not in there]
        if gone:
            last_runs = {run.job: run for run in state.ended if elsewhere.isdisjoint(run.held.nodes)}
            views += self._ended(gone, last_runs, now_s)
        changed = [view for view in views if view is not self._live.get(view.id)]
        charges = [line for view in changed if view.state == "ended" for line in _charges(view)]
        if changed:
            self.store.save_jobs(changed, charges)
        with self._lock:
            self.state, self.observed_s = state, now_s
            self._shown = {
                job.id: (job, view.note or self._reason(job.id), view.result, view)
                for job, view in zip(jobs, views, strict=False)
            }
            for view in changed:
                if view.state == "ended":
                    self._live.pop(view.id, None)
                    self._progress.pop(view.id, None)
                    self._activity.forget(view.id)
                    self.results.forget(view.id)
                else:
                    self._live[view.id] = view
        for view in changed:
            self._publish("job", view.user, view.model_dump_json(), view.id)
            if view.state == "ended":
                self._on_end(view)

    def take_round(self, record: RoundRecord) -> None:
        """Take in a round."""
        self.record = record
        self._publish("round", "", summarise(record).model_dump_json())

    def take_reports(self, reports: Sequence[Report]) -> None:
        """Take in reports, by whatever transport they came."""
        for report in reports:
            body = report.body
            self._activity.take(report, time.time())
            self.results.take(report, live=True)
            if isinstance(body, Started):
                self._progress[report.job_id] = body.progress, body.total
            elif isinstance(body, Observation) or (isinstance(body, Ended) and body.progress):
                # A run that fails before it has read its checkpoint ends with progress 0.
                self._progress[report.job_id] = body.progress, self._progress.get(report.job_id, (0.0, None))[1]

    def idle(self, after_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs whose GPUs have been idle for longer than `after_s`: each run once."""
        return self._activity.idle(self._live, after_s)

    def silent(self, after_s: float, now_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs that reported before, but not in the last `after_s` seconds: each run once."""
        return self._activity.silent(self._live, after_s, now_s)

    # --- for the API

    @property
    def newest_report(self) -> tuple[float | None, int]:
        """When the newest report came, in s since 1970 (None: none has come), and how many running jobs have reported."""
        return self._activity.newest_s, self._activity.reporting(self._live)

    def job(self, job: str) -> JobView | None:
        """A job, live or ended; None: there is none. Raises StoreError."""
        return self._live.get(job) or self.store.job(job)

    def live_job(self, job: str) -> JobView | None:
        """A job that has not ended; None: it has ended, or there is none."""
        return self._live.get(job)

    def live(self) -> list[JobView]:
        """All jobs that have not ended."""
        with self._lock:
            return list(self._live.values())

    def refusal(self, job: str) -> Refusal | None:
        """Why Penstock does not manage a job that has a job spec; None: it manages the job, or there is no job spec."""
        state = self.state
        return next((each for each in state.refused if each.job == job), None) if state is not None else None

    def adopt(self, view: JobView) -> None:
        """Take in a job that was just submitted, whether or not a round has seen it or its end. Raises StoreError."""
        with self._changing:
            current = self._live.get(view.id) or self.store.job(view.id) or view
            adopted = current.model_copy(update={"key": view.key})
            self.store.save_jobs([adopted])
            if adopted.state != "ended":
                self._live[view.id] = adopted

    @property
    def awaited(self) -> frozenset[str]:
        """Jobs that clients wait for: they are answered at the job's next change."""
        return frozenset(self._waiting)

    async def wait_for_change(self, job: str, version: int, timeout_s: float) -> None:
        """Return when a live job's version is above `version` or it has ended, at the latest after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while (view := self._live.get(job)) is not None and view.version <= version:
            event = self._waiting.setdefault(job, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), max(until_s - time.monotonic(), 0.0))
            except TimeoutError:
                return

    def _publish(self, kind: str, user: str, text: str, job: str = "") -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, kind, user, text, job)

    def _wake(self, kind: str, user: str, text: str, job: str) -> None:
        if (event := self._waiting.pop(job, None)) is not None:
            event.set()
        for listener in tuple(self.listeners):
            listener(kind, user, text)

    # --- views

    def _reason(self, job: str) -> str:
        plan = self.record.plan if self.record else None
        if plan is None:
            return ""
        assignment = plan.assignments.get(job)
        reason = assignment.reason if assignment else plan.waiting.get(job)
        return reason.code.value if reason else ""

    def _left_alone(self, refused: Iterable[Refusal]) -> list[JobView]:
        """Live jobs that are not managed any more, for example because somebody overwrote their AdminComment."""
        found = []
        for each in refused:
            view = self._live.get(each.job)
            if view is not None and view.note != each.text:
                found.append(
                    view.model_copy(update={"version": view.version + 1, "reason": "refused", "note": each.text})
                )
        return found

    def _view(self, job: Job, before: JobView | None, now_s: float, code: str = "", note: str = "") -> JobView:
        """The job for clients. Returns `before` itself, the very object, if nothing has changed.

        Args:
            job: the job as observed.
            before: its last view.
            now_s: the time.
            code: why the job waits for something else than GPUs; empty: the newest round's reason counts.
            note: the same as a sentence.
        """
        reason = code or self._reason(job.id)
        # Most jobs have not changed since the last tick, and a view costs a hundred times what this comparison does.
        shown, result = self._shown.get(job.id), self.results.newest(job.id)
        if shown is not None and shown[3] is before and shown[:3] == (job, note or reason, result):
            return before
        if before is None:
            before = self.store.job(job.id)
        has = job.phase in (Phase.RUNNING, Phase.STOPPING)
        progress, total = self._progress.get(job.id, (None, None))
        record = self.record
        stop = record.plan.stops.get(job.id) if record else None
        fields = JobView(
            id=job.id,
            version=before.version if before else 0,
            name=job.name[:1000],
            user=job.user,
            account=job.account,
            state=job.phase.value,
            submit_s=job.submit_s,
            start_s=before.start_s if before and before.start_s is not None else now_s if has else None,
            restarts=job.restarts,
            spec=job.spec,
            key=before.key if before else None,
            allocation=allocation_view(job.allocation) if job.allocation and job.phase is not Phase.QUEUED else None,
            reason=reason,
            stopped=str(stop) if stop is not None else before.stopped if before is not None else "",
            note=note,
            progress=before.progress if before else None,
            total=before.total if before else None,
            gpu_seconds=before.gpu_seconds if before else {},
            result=result or (before.result if before else None),
        )
        if before is not None and fields == before:
            return before
        # Progress and GPU-seconds change all the time. By themselves they make no new version; they follow with the next one.
        attained = record.snapshot.attained_gpu_s(job.id) if record else None
        return fields.model_copy(
            update={
                "version": fields.version + 1,
                "progress": fields.progress if progress is None else progress,
                "total": fields.total if total is None else total,
                "gpu_seconds": attained or fields.gpu_seconds,
            }
        )

    def _attained(self, job: str, last: EndedRun | None, now_s: float) -> dict[str, float]:
        """GPU type -> GPU-seconds of a job that has ended: those up to the newest round, and those of its last run since."""
        record = self.record
        attained = dict(record.snapshot.attained_gpu_s(job)) if record else {}
        if last is not None:
            since_s = max(record.snapshot.time_s if record else 0.0, last.started_s)
            more = last.held.gpus * max(min(last.ended_s, now_s) - since_s, 0.0)
            attained[last.held.gpu_type] = attained.get(last.held.gpu_type, 0.0) + more
        return {gpu_type: amount for gpu_type, amount in attained.items() if amount > 0}

    def _ended(self, jobs: Sequence[str], last_runs: Mapping[str, EndedRun], now_s: float) -> list[JobView]:
        fates: dict[str, Fate | None] = self.submitter.fates(jobs) if self.submitter else {}
        views = []
        for job in jobs:
            fate = fates.get(job, Fate("UNKNOWN", None, None))
            if fate is None:
                continue  # the job exists, but no round may manage it now
            before = self._live[job]
            attained = self._attained(job, last_runs.get(job), now_s)
            progress, total = self._progress.get(job, (before.progress, before.total))
            views.append(
                before.model_copy(
                    update={
                        "version": before.version + 1,
                        "state": "ended",
                        "ended": fate.state,
                        "exit_code": fate.exit_code,
                        "ended_text": fate.text,
                        "end_s": now_s if fate.end_s is None else fate.end_s,
                        "allocation": None,
                        "reason": "",
                        "progress": progress,
                        "total": total,
                        "gpu_seconds": attained or before.gpu_seconds,
                        "result": self.results.newest(job) or before.result,
                    }
                )
            )
        return views


class ObservedCluster:
    """A cluster that shows what passes to the board and to the models. See `ports.Cluster`."""

    def __init__(
        self, parts: ClusterParts, board: Board, now_s: Callable[[], float], learn: Callable[..., None]
    ) -> None:
        self._cluster, self._cloud_nodes = parts.cluster, parts.cloud_nodes
        self._board, self._now_s, self._learn = board, now_s, learn
        self._fresh: list[Report] = []

    def observe(self) -> ClusterState:
        """See `ports.Cluster`."""
        state = self._cluster.observe()
        # Reports come before the state, so that the view of a job that has ended includes its last report.
        fresh = self._cluster.reports()
        self._fresh.extend(fresh)
        if any(isinstance(report.body, Result) for report in fresh):
            with contextlib.suppress(StoreError):  # the loop stores them, too, and tries again
                self._board.store.add_reports(fresh)  # a client that learns of a result asks for all results at once
        self._board.take_reports(fresh)
        self._learn(fresh)
        elsewhere = [node.name for node in self._cloud_nodes.nodes()] if self._cloud_nodes and state.ended else ()
        self._board.take_state(state, self._now_s(), elsewhere)
        return state

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`."""
        return self._cluster.apply(actions)

    def reports(self) -> Sequence[Report]:
        """See `ports.Cluster`."""
        fresh, self._fresh = self._fresh, []
        return fresh


def allocation_view(placement: Placement) -> AllocationView:
    """A placement, for clients."""
    return AllocationView(
        gpu_type=placement.gpu_type,
        gpus=placement.gpus,
        nodes={share.node: share.gpus for share in placement.shares},
    )


def _charges(view: JobView) -> list[LedgerLine]:
    """What a job that has ended used, by GPU type. The keys ensure that it is charged only once."""
    return [
        LedgerLine(
            id=0,
            key=f"gpu-seconds:{view.id}:{view.submit_s:.0f}:{gpu_type}",
            time_s=view.end_s or 0.0,
            account=view.account,
            user=view.user,
            job=view.id,
            kind="gpu-seconds",
            amount=amount,
            text=gpu_type,
        )
        for gpu_type, amount in view.gpu_seconds.items()
    ]
