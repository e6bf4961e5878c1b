"""What the daemon knows now: written by the round loop's thread, read by the service's.

`Watched` stands between the loop and its cluster and shows the board all that passes; the board keeps the jobs table of
the store up to date and tells those who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from penstock_profiles.wire import Ended, Observation, Report, Result, Resumed, Started, Suspended
from penstock_scheduler.errors import StoreError
from penstock_scheduler.messages import AllocationView, JobView, LedgerLine, ResultView
from penstock_scheduler.model import Action, ClusterState, EndedRun, Job, Outcome, Phase, Placement, Refusal
from penstock_scheduler.ports import ClusterParts, Fate, Submitter
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.results import CLOCKED, Results
from penstock_scheduler.store import SqlStore, summarise

log = logging.getLogger(__name__)

IDLE_BELOW = 0.02
"""Utilisation, as NVML samples it, below which GPUs count as doing nothing: a job that trains at all shows tens of per cent."""

Listener = Callable[[str, str, str], None]
"""Is told (kind, user or "" for all, JSON)."""


class Board:
    """What is known now; its methods may be called from any thread."""

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
        """Of each live job: as it was last observed, the reason and the newest result then, and the view made of these."""
        self._heard: dict[str, tuple[float, float | None]] = {}
        self._spoke_s: dict[str, float] = {}
        """When a job that holds GPUs was last heard of."""
        self._idle_s: dict[str, tuple[float, float]] = {}
        """Of a job whose reports say that its GPUs do nothing: since when they do, and when the newest of them came."""
        self._found: set[tuple[str, str, int]] = set()
        """("idle" or "silent", job, its restarts) that were found so already."""
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._changing = threading.Lock()

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """The event loop on which clients wait."""
        self._loop = loop

    # --- the round loop's side

    def saw(self, state: ClusterState, now_s: float, elsewhere: Collection[str] = ()) -> None:
        """Take in what was observed. Raises StoreError; then nothing is taken in, and the next call does it.

        Runs on nodes that are `elsewhere`, in the cloud, hold no GPUs of the site.
        """
        with self._changing:
            self._saw(state, now_s, frozenset(elsewhere))

    def _saw(self, state: ClusterState, now_s: float, elsewhere: frozenset[str]) -> None:
        there = {job.id: job for job in state.jobs}
        views = [self._view(job, self._live.get(job.id), now_s) for job in state.jobs]
        gone = [job for job in self._live if job not in there]
        if gone:
            here = {over.job: over for over in state.ended if elsewhere.isdisjoint(over.held.nodes)}
            views += self._ended(gone, here, now_s)
        changed = [view for view in views if view is not self._live.get(view.id)]
        charges = [line for view in changed if view.state == "ended" for line in _charges(view)]
        if changed:
            self.store.save_jobs(changed, charges)
        with self._lock:
            self.state, self.observed_s = state, now_s
            self._shown = {
                job.id: (job, self._reason(job.id), view.result, view)
                for job, view in zip(state.jobs, views, strict=False)
            }
            for view in changed:
                if view.state == "ended":
                    self._live.pop(view.id, None)
                    self._heard.pop(view.id, None)
                    self._spoke_s.pop(view.id, None)
                    self._idle_s.pop(view.id, None)
                    self.results.forget(view.id)
                else:
                    self._live[view.id] = view
        for view in changed:
            self._tell("job", view.user, view.model_dump_json(), view.id)
            if view.state == "ended":
                self._on_end(view)

    def decided(self, record: RoundRecord) -> None:
        """Take in a round."""
        self.record = record
        self._tell("round", "", summarise(record).model_dump_json())

    def heard(self, reports: Sequence[Report]) -> None:
        """Take in reports, of whatever transport."""
        for report in reports:
            body, now_s = report.body, time.time()
            self._spoke_s[report.job_id] = now_s
            self.results.take(report, live=True)
            if isinstance(body, Started):
                self._heard[report.job_id] = body.progress, body.total
            elif isinstance(body, Observation) or (isinstance(body, Ended) and body.progress):
                # A run that failed before it knew what those before it had reached ends with 0.
                self._heard[report.job_id] = body.progress, self._heard.get(report.job_id, (0.0, None))[1]
            if isinstance(body, Observation) and body.utilisation is not None and body.utilisation < IDLE_BELOW:
                since_s, _ = self._idle_s.get(report.job_id, (now_s, now_s))
                self._idle_s[report.job_id] = since_s, now_s
            busy = isinstance(body, Observation) and (body.utilisation or 0.0) >= IDLE_BELOW
            if busy or isinstance(body, Started | Suspended | Resumed):
                self._idle_s.pop(report.job_id, None)  # a run that begins, or has stood still, is judged anew

    def idle(self, after_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs whose reports have said for `after_s` that their GPUs do nothing: each run once."""
        return self._found_now(
            "idle", {job: last_s - since_s for job, (since_s, last_s) in list(self._idle_s.items())}, after_s
        )

    def silent(self, after_s: float, now_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs that have reported and then nothing for longer than `after_s`: each run once."""
        return self._found_now(
            "silent", {job: now_s - spoke_s for job, spoke_s in list(self._spoke_s.items())}, after_s
        )

    def _found_now(self, what: str, seconds: Mapping[str, float], after_s: float) -> list[tuple[JobView, float]]:
        found = []
        for job, so_far_s in seconds.items():
            view = self._live.get(job)
            if view is None or view.state != "running":
                for table in (self._spoke_s, self._idle_s):  # it will speak again where it runs next
                    table.pop(job, None)
            elif so_far_s > after_s and view.allocation and (run := (what, job, view.restarts)) not in self._found:
                self._found.add(run)
                found.append((view, so_far_s))
        self._found = {run for run in self._found if run[1] in self._live}
        return found

    # --- the service's side

    def job(self, job: str) -> JobView | None:
        """A job as it is now, or as it ended. Raises StoreError."""
        return self._live.get(job) or self.store.job(job)

    def now(self, job: str) -> JobView | None:
        """A job as it is now; None: it has ended, or there is none."""
        return self._live.get(job)

    def refusal(self, job: str) -> Refusal | None:
        """Why a job that asks for Penstock is not managed; None: it does not ask, or it is."""
        state = self.state
        return next((each for each in state.refused if each.job == job), None) if state is not None else None

    def adopt(self, view: JobView) -> None:
        """Take in a job that was just submitted, before a round sees it, or its end. Raises StoreError."""
        with self._changing:
            current = self._live.get(view.id) or self.store.job(view.id) or view
            adopted = current.model_copy(update={"key": view.key})
            self.store.save_jobs([adopted])
            if adopted.state != "ended":
                self._live[view.id] = adopted

    def live(self) -> list[JobView]:
        """All jobs that have not ended."""
        with self._lock:
            return list(self._live.values())

    async def changed(self, job: str, version: int, timeout_s: float) -> None:
        """Return when a live job's version is above `version` or it has ended, at the latest after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while (view := self._live.get(job)) is not None and view.version <= version:
            event = self._waiting.setdefault(job, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), max(until_s - time.monotonic(), 0.0))
            except TimeoutError:
                return

    def _tell(self, kind: str, user: str, text: str, job: str = "") -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, kind, user, text, job)

    def _wake(self, kind: str, user: str, text: str, job: str) -> None:
        if (event := self._waiting.pop(job, None)) is not None:
            event.set()
        for listener in tuple(self.listeners):
            listener(kind, user, text)

    def _reason(self, job: str) -> str:
        plan = self.record.plan if self.record else None
        if plan is None:
            return ""
        given = plan.assignments.get(job)
        why = given.reason if given else plan.waiting.get(job)
        return why.code.value if why else ""

    def _view(self, job: Job, before: JobView | None, now_s: float) -> JobView:
        """The job as clients see it: `before` itself, the very object, where nothing has changed."""
        reason = self._reason(job.id)
        # Most jobs are as they were a tick ago, and a view costs a hundred times what this comparison does.
        shown, result = self._shown.get(job.id), self.results.newest(job.id)
        if shown is not None and shown[3] is before and shown[:3] == (job, reason, result):
            return before
        if before is None:
            before = self.store.job(job.id)
        has = job.phase in (Phase.RUNNING, Phase.STOPPING)
        progress, total = self._heard.get(job.id, (None, None))
        record = self.record
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
            progress=before.progress if before else None,
            total=before.total if before else None,
            gpu_seconds=before.gpu_seconds if before else {},
            result=result or (before.result if before else None),
        )
        if before is not None and fields == before:
            return before
        # What changes all the time is brought up to date when something else changes, and asks nobody to look by itself.
        attained = record.snapshot.attained.get(job.id) if record else None
        return fields.model_copy(
            update={
                "version": fields.version + 1,
                "progress": fields.progress if progress is None else progress,
                "total": fields.total if total is None else total,
                "gpu_seconds": attained or fields.gpu_seconds,
            }
        )

    def _attained(self, job: str, last: EndedRun | None, now_s: float) -> dict[str, float]:
        """What a job that has ended held by GPU type, GPU-seconds: up to the newest round, and of its last run since then."""
        record = self.record
        attained = dict(record.snapshot.attained.get(job, {})) if record else {}
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
                continue  # it is there, but no round may manage it now
            before = self._live[job]
            attained = self._attained(job, last_runs.get(job), now_s)
            progress, total = self._heard.get(job, (before.progress, before.total))
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


class Watched:
    """A cluster whose answers the board, and the models, see."""

    def __init__(
        self, parts: ClusterParts, board: Board, now_s: Callable[[], float], learn: Callable[..., None]
    ) -> None:
        self._cluster, self._cloud_nodes = parts.cluster, parts.cloud_nodes
        self._board, self._now_s, self._learn = board, now_s, learn
        self._fresh: list[Report] = []

    def observe(self) -> ClusterState:
        """See `ports.Cluster`."""
        state = self._cluster.observe()
        # What jobs say comes before what becomes of them: the last word of one that has ended is in its view then.
        fresh = self._cluster.reports()
        self._fresh.extend(fresh)
        if any(isinstance(report.body, Result) for report in fresh):
            with contextlib.suppress(StoreError):  # the loop stores them, too, and tries again
                self._board.store.add_reports(fresh)  # who is told of a result asks for all of them at once
        self._board.heard(fresh)
        self._learn(fresh)
        elsewhere = [node.name for node in self._cloud_nodes.nodes()] if self._cloud_nodes and state.ended else ()
        self._board.saw(state, self._now_s(), elsewhere)
        return state

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`."""
        return self._cluster.apply(actions)

    def reports(self) -> Sequence[Report]:
        """See `ports.Cluster`."""
        fresh, self._fresh = self._fresh, []
        return fresh


def allocation_view(placement: Placement) -> AllocationView:
    """A placement as clients see it."""
    return AllocationView(
        gpu_type=placement.gpu_type,
        gpus=placement.gpus,
        nodes={share.node: share.gpus for share in placement.shares},
    )


def _charges(view: JobView) -> list[LedgerLine]:
    """What a job that has ended used, by GPU type. The keys keep a second look from charging it twice."""
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
