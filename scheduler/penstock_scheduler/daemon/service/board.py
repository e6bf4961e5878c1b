"""What the daemon knows now: the round loop's thread writes it, the API's threads read it.

`ObservedCluster` stands between the loop and its cluster and shows the board the reports that pass. The loop gives the board each
observation once its GPU-seconds are counted. The board keeps the store's table of jobs up to date and wakes the clients that wait
for a change.

A job's view has two parts. Its state, allocation, reason and so on make a new version whenever they change. Its *live figures*,
progress and GPU-seconds, change all the time and make no version. The store has them as of the newest
version; `Board.figures_of` puts in those of the newest tick, so that all answers show the same.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import shorten
from types import MappingProxyType

from penstock_profiles.wire import LONGEST_TEXT, Report, Result
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.messages import AllocationView, JobView, ResultView
from penstock_scheduler.api.ports import NOT_COUNTED, Cluster, Fate, GpuSecondsByJob, RoundListener, Submitter
from penstock_scheduler.daemon.service.activity import Activity
from penstock_scheduler.daemon.service.known import Event, Known
from penstock_scheduler.daemon.service.output import Outputs
from penstock_scheduler.jobs.learned_models import ReportedProgress
from penstock_scheduler.jobs.results import CLOCKED, Results
from penstock_scheduler.jobs.reused_ids import begins_s, former_id, is_another
from penstock_scheduler.model import Action, ClusterState, Job, JobSpec, Outcome, Phase, Placement, Plan, Refusal, Stop
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import BadJobSpec, ClusterAway, StoreError
from penstock_scheduler.rounds.plan_check import PlanCheck, StartCheck
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.rounds import summarise
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

SUBMITTED_S = 300.0
"""Longest time between a submission through the API and its job's time of submission by the cluster's clock, and more."""

REPLACED = Fate(
    "UNKNOWN",
    None,
    None,
    text="was forgotten by Slurm when slurmctld was killed or lost its state, and another job has its id now: how it ended is "
    "not known. Submit it again if its work is not done",
)
"""The end of a job whose id another job has."""

FORGOTTEN = Fate(
    "UNKNOWN",
    None,
    None,
    text="ended while penstockd did not see it, and Slurm has forgotten it: its state, its exit code and the time of its end are "
    "not known, and its GPU-hours may lack the time after penstockd last saw it. Slurm's accounting (slurmdbd) would know "
    "them, and a larger MinJobAge keeps them longer",
)
"""The end of a job that nothing knows of."""


NEW = JobView(id="", version=0, name="", user="", state="queued", submit_s=0.0, spec=JobSpec())
"""The last view of a job that has none yet."""


class Board(Known, RoundListener):
    """What is known now, from the round loop. Methods may be called from any thread.

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
        super().__init__(store)
        self._on_end = on_end
        self.submitter = submitter
        self._record: RoundRecord | None = store.last_round()
        self._live = self._stored()
        self.results = Results()
        for job in [job for job, view in self._live.items() if view.start_s is not None]:
            for report in store.newest_reports(job, CLOCKED):
                self.results.take(report)
        self._viewed: RoundRecord | None = None
        """The round with which the views were made."""
        self._touched: set[str] = set()
        """Live jobs with a new result or a new key since the newest tick."""
        self._made: dict[str, tuple[Job, str, ResultView | None, JobView]] = {}
        """Live job -> the job as last observed, its reason and newest result then, and the view made of these."""
        self._progress: dict[str, ReportedProgress] = {}
        """Live job -> its newest progress and total, as it reported them."""
        for job in self._live:
            for report in _progress_reports(store, job):
                self._take_progress(report)
        self._gpu_seconds: dict[str, Mapping[str, float]] = {}
        """Live job -> GPU type -> GPU-seconds, as of the newest tick; kept until its end is in the store."""
        self.counted: tuple[float, Mapping[str, Mapping[str, float]]] | None = None
        """The newest observation's time, and the GPU-seconds then."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called after each observation."""
        self.endings: dict[str, str] = {}
        """Live job -> why the API has cancelled it, for its `ended_text`; only for what its user did not ask for."""
        self._stops: dict[str, tuple[RoundRecord | None, Stop]] = {}
        """Live job -> the newest round then, and why its run was stopped without a round; until there is another round."""
        self.silent_agents: int | None = None
        """Agents of nodes that are silent, as of the newest tick; None: there are no agents, or no tick yet."""
        self._activity = Activity()
        self._outputs = Outputs(submitter)
        self.plan_check = PlanCheck()
        self.start_check = StartCheck()
        self._changing = threading.Lock()

    # --- for the round loop

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
        """Take in an observation of the cluster.

        Args:
            gpu_seconds: job -> GPU type -> GPU-seconds so far, of all jobs that are there or have just ended.

        Raises:
            StoreError: only the figures were taken in; the next call takes in the rest.
        """
        with self._changing:
            self._gpu_seconds = {**self._gpu_seconds, **gpu_seconds}
            self._take_state(state, now_s)
        self.plan_check.take(self._record, state, now_s)
        self.start_check.take(self._record, state, now_s)
        self.on_tick()

    def _take_state(self, state: ClusterState, now_s: float) -> None:
        notes = {each.job.id: (each.code, each.text) for each in state.waiting}
        found, touched = self._to_view(state)
        views = [self._view(job, before, now_s, *notes.get(job.id, ("", ""))) for job, before in found]
        views += self._left_alone(state.refused)
        gone = self._live.keys() - state.present.keys()
        if gone:
            in_order = [job for job in self._live if job in gone]
            views += self._ended(in_order, now_s, dict.fromkeys(state.replaced, REPLACED))
        views = self._outputs.added_to(views, self._live)
        changed = [view for view in views if view is not self._live.get(view.id)]
        charges = [line for view in changed if view.state == "ended" for line in charges_of(view, view.gpu_seconds)]
        number = self.store.save_jobs(changed, charges) if changed else 0
        with self._lock:
            self.state, self.observed_s, self.held = state, now_s, _held(state)
            self._viewed, self._touched = self._record, self._touched - touched
            for job in self._made.keys() - state.present.keys():
                del self._made[job]
            self._made |= {
                job.id: (job, view.note or self._reason(job), view.result, view)
                for (job, _), view in zip(found, views, strict=False)
            }
            for view in changed:
                self.counts.job(self._live.get(view.id), view)
                if view.state == "ended":
                    self._forget(view.id)
                else:
                    self._live[view.id] = view
            self._gpu_seconds = {job: amounts for job, amounts in self._gpu_seconds.items() if job in self._live}
            self.counted = now_s, self._gpu_seconds
        self._announce(changed, number)

    def _is_back(self, job: Job, before: JobView | None) -> bool:
        """Whether this job has completed, and the cluster has forgotten that; it is cancelled, so that it does not run again.

        A slurmctld that was killed forgets the ends of its last seconds. It shows the job as running for some minutes, and then
        requeues it; or as pending, and runs it again.
        """
        if before is None or not is_back(before, job):
            return False
        if self.submitter is not None:
            try:
                self.submitter.cancel(job.id, None)
            except (BadJobSpec, ClusterAway) as error:
                log.warning("job that has completed is not cancelled yet", extra={"job": job.id, "text": str(error)})
        log.warning("job has completed, and the cluster has forgotten that", extra={"job": job.id, "user": job.user})
        return True

    def _announce(self, views: Sequence[JobView], number: int) -> None:
        """Tell the API's callers and those who wait for a job's end. `number`: of the first view's change in the store."""
        for at, view in enumerate(views):
            self._publish(Event("job", view.user, view.model_dump_json(), number + at, view.id))
            if view.state == "ended":
                self._on_end(view)

    def _to_view(self, state: ClusterState) -> tuple[list[tuple[Job, JobView | None]], set[str]]:
        """The jobs whose view may have changed, with their last one; and all for which not only the observation says so."""
        with self._lock:
            touched = self._touched | self._stops.keys()
        found = {job.id: job for job in state.changed(self.state if self._viewed is self._record else None)}
        found |= {each.job.id: each.job for each in state.waiting}
        unseen = {job.id for job in state.unseen}  # `_left_alone` has the views of these
        found |= {job: state.present[job] for job in touched - unseen if job in state.present}
        known = [(job, self._live.get(job.id) or self.store.job(job.id)) for job in found.values()]
        return [(job, old) for job, old in known if job.id in self._live or not self._is_back(job, old)], touched

    def decided(self, record: RoundRecord) -> None:
        """Take in a round."""
        self._record = record
        self.counts.round(record)
        self._publish(Event("round", "", summarise(record).model_dump_json(), record.snapshot.round))
        self.on_tick()

    def stopped(self, stops: Mapping[str, Stop]) -> None:
        """Take in stops that no round decided."""
        with self._changing:
            self._stops |= {job: (self.record, stop) for job, stop in stops.items() if job in self._live}

    def take_reports(self, reports: Sequence[Report]) -> None:
        """Take in reports, by whatever transport they came."""
        for report in reports:
            self._activity.take(report, site_time_s())
            self.results.take(report, live=True)
            self._take_progress(report)
            if isinstance(report.body, Result):
                with self._lock:
                    self._touched.add(report.job_id)

    def _take_progress(self, report: Report) -> None:
        known = self._progress.get(report.job_id, ReportedProgress())
        if (newer := known.after(report)) is not known:
            self._progress[report.job_id] = newer

    def idle(self, after_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs whose GPUs have been idle for longer than `after_s`: each run once."""
        return self._activity.idle(self._live, after_s)

    def silent(self, after_s: float, now_s: float) -> list[tuple[JobView, float]]:
        """(job, seconds) of running jobs that reported before, but not in the last `after_s` seconds: each run once."""
        return self._activity.silent(self._live, after_s, now_s)

    # --- for the API

    @property
    def record(self) -> RoundRecord | None:
        """The newest round."""
        return self._record

    @record.setter
    def record(self, record: RoundRecord) -> None:
        self._record = record

    @property
    def round(self) -> tuple[int, dict[str, float]] | None:
        """See `Known`."""
        return None if self._record is None else (self._record.snapshot.round, self._record.plan.prices)

    @property
    def newest_report(self) -> tuple[float | None, int]:
        """When the newest report came, in s since 1970 (None: none has come), and how many running jobs have reported."""
        return self._activity.newest_s, self._activity.reporting(self._live)

    def unheard(self, after_s: float, now_s: float) -> list[str]:
        """See `Activity`. Empty where the store does not answer, which the check of its disk says."""

        def newest(job: str) -> float | None:
            if job not in self._progress:
                return None
            return next(
                (report.time_s for report in self.store.newest_reports(job, ("started", "observation"), 1)), None
            )

        with contextlib.suppress(StoreError):
            return self._activity.unheard(self.state.jobs if self.state else (), newest, after_s, now_s)
        return []

    def unspooled(self) -> list[str]:
        """Running jobs that have not reported and were not told to report to the daemon's spool."""
        state = self.state
        holding = () if state is None else (job.id for job in state.holding if job.id in state.unspooled)
        return [job for job in holding if job not in self._progress]

    def progress(self) -> dict[str, tuple[float, float | None]]:
        """Live job -> its newest progress and total, as far as jobs have reported them."""
        return {job: (found.done, found.total) for job, found in list(self._progress.items()) if job in self._live}

    def figures_of(self, view: JobView) -> JobView:
        """See `Known`."""
        if view.state == "ended":
            return view
        found = self._progress.get(view.id)
        gpu_seconds = _amounts(self._gpu_seconds.get(view.id, {})) or view.gpu_seconds
        figures: dict[str, object] = {"gpu_seconds": gpu_seconds}
        if found is not None:
            figures |= {"progress": found.done, "total": found.total, "cannot_save": found.cannot_save}
        return view.model_copy(update=figures)

    def adopt(self, view: JobView) -> None:
        """Take in a job that the cluster has just shown as this user's, whether or not a round has seen it or its end.

        It makes nobody the owner of a job that is known as another user's: that one had the id before. Raises StoreError.
        """
        with self._changing:
            current = self._live.get(view.id) or self.store.job(view.id) or view
            if is_former(current, view.user, view.key, view.submit_s):
                self._set_aside(current, view.submit_s)
                current = view
            adopted = current.model_copy(update={"key": view.key})
            self.store.save_jobs([adopted])
            if adopted.state != "ended":
                with self._lock:
                    self._live[view.id] = adopted
                    self._touched.add(view.id)

    # --- views

    def _reason(self, job: Job) -> str:
        plan = self._plan_of(job)
        if plan is None:
            return ""
        assignment = plan.assignments.get(job.id)
        reason = assignment.reason if assignment else plan.waiting.get(job.id)
        return reason.code.value if reason else ""

    def _plan_of(self, job: Job) -> Plan | None:
        """The newest plan, unless the job has come since: then the plan may have another job that had its id."""
        record = self.record
        return None if record is None or is_another(job, record.snapshot.time_s) else record.plan

    def _left_alone(self, refused: Iterable[Refusal]) -> list[JobView]:
        """Live jobs that are not managed any more, for example because somebody overwrote their AdminComment."""
        found = []
        for each in refused:
            view, note = self._live.get(each.job), f"is not managed any more: {each.text}"
            if view is None:
                continue
            seen: dict[str, object] = {"reason": "refused", "note": note}
            if each.runs is not None:
                seen["state"] = "running" if each.runs else "queued"
            if each.runs is False:
                seen["allocation"] = None
            if any(getattr(view, name) != value for name, value in seen.items()):
                since_s = view.note_s if view.note == note else site_time_s()
                found.append(view.model_copy(update=seen | {"version": view.version + 1, "note_s": since_s}))
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
        reason = code or self._reason(job)
        # Most jobs have not changed since the last tick, and a view costs a hundred times what this comparison does.
        result = self.results.newest(job.id)
        if before is not None and self._is_as_made(before, job, note or reason, result):
            return before
        version = before.version if before else 0
        if before is not None and is_another(job, before.submit_s):
            self._set_aside(before, now_s)
            before = None
        old = before or NEW
        plan = self._plan_of(job)
        stop = self._own_stop(job.id) or (plan.stops.get(job.id) if plan else None)
        fields = JobView(
            id=job.id,
            version=version,
            name=job.name[:1000],
            user=job.user,
            account=job.account,
            partition=next(iter(job.partitions), old.partition),
            state=job.phase.value,
            submit_s=job.submit_s,
            start_s=_start_s(old, job, now_s),
            restarts=job.restarts,
            spec=job.spec,
            key=old.key,
            allocation=_shown(job),
            reason=reason,
            stopped=str(stop) if stop is not None else old.stopped,
            note=note,
            note_s=(old.note_s if note == old.note else now_s) if note else None,
            progress=old.progress,
            total=old.total,
            gpu_seconds=old.gpu_seconds,
            suspended=job.suspension,
            result=result or old.result,
            output=old.output,
            cannot_save=old.cannot_save,
        )
        if before is not None and fields == before:
            return before
        # The live figures make no new version by themselves; they follow with the next one.
        return self.figures_of(fields.model_copy(update={"version": fields.version + 1}))

    def _is_as_made(self, view: JobView, job: Job, why: str, result: ResultView | None) -> bool:
        """Whether this view was made of just these."""
        made = self._made.get(job.id)
        same = made is not None and made[3] is view and made[:3] == (job, why, result)
        return same and job.id not in self._stops

    def _own_stop(self, job: str) -> Stop | None:
        """Why a job's run was stopped without a round, since the newest round."""
        decided, stop = self._stops.get(job, (None, None))
        if stop is None or decided is self.record:
            return stop
        del self._stops[job]
        return None

    def _set_aside(self, former: JobView, now_s: float) -> None:
        """Keep a job whose id another job has now under an id of its own. Raises StoreError."""
        charges: list[LedgerLine] = []
        job, live = former.id, former.state != "ended"
        if live:
            (former,) = self._ended([job], now_s, {job: REPLACED})
            charges = charges_of(former, former.gpu_seconds)
        view = former.model_copy(update={"id": former_id(job, former.submit_s), "version": former.version + 1})
        number = self.store.set_aside(job, view, charges)
        log.warning("job id came again", extra={"job": job, "former": view.id, "user": view.user})
        with self._lock:
            self._forget(job)
            self._made.pop(job, None)
        self._publish(Event("job", view.user, view.model_dump_json(), number, view.id))
        if live:
            self._on_end(view)

    def _forget(self, job: str) -> None:
        """Drop what is known of a job that has ended."""
        self._live.pop(job, None)
        self._progress.pop(job, None)
        self._activity.forget(job)
        self._outputs.forget(job)
        self._stops.pop(job, None)
        self.results.forget(job)

    def _ended(
        self, jobs: Sequence[str], now_s: float, known: Mapping[str, Fate] = MappingProxyType({})
    ) -> list[JobView]:
        """The views of jobs that are gone. `known`: how some of them ended; the cluster is not asked for these."""
        asked = [job for job in jobs if job not in known]
        fates: dict[str, Fate | None] = self.submitter.fates(asked) if self.submitter and asked else {}
        views = []
        for job in jobs:
            fate = known.get(job) or fates.get(job, FORGOTTEN)
            if fate is None:
                continue  # the job exists, but no round may manage it now
            fate = FORGOTTEN if is_of_another(self._live[job], fate) else fate
            before, ending = self.figures_of(self._live[job]), self.endings.pop(job, "")
            stop = self._own_stop(job)
            views.append(
                before.model_copy(
                    update={
                        "version": before.version + 1,
                        "state": "ended",
                        "ended": fate.state,
                        "exit_code": fate.exit_code,
                        "ended_text": fate.text or (ending if fate.state == "CANCELLED" else self._failure(job, fate)),
                        "start_s": fate.start_s if before.start_s is None else before.start_s,
                        "end_s": now_s if fate.end_s is None else fate.end_s,
                        "allocation": None,
                        "suspended": None,
                        "reason": "",
                        **({"note": "", "note_s": None} if before.reason in ("held", "waiting-cluster") else {}),
                        "stopped": before.stopped if stop is None else str(stop),
                        "result": self.results.newest(job) or before.result,
                    }
                )
            )
        return views

    def _failure(self, job: str, fate: Fate) -> str:
        """What the job itself reported, if it failed: in one line, as its error may have a hundred."""
        known = self._progress.get(job)
        if known is None or not known.failure or fate.state == "COMPLETED":
            killed = fate.state == "FAILED" and fate.exit_code == 128 + signal.SIGKILL
            return "was killed by signal 9; often out of memory" if killed else ""
        return f"reported {shorten(known.failure, LONGEST_TEXT, placeholder=' ...')!r}"


def _start_s(before: JobView, job: Job, now_s: float) -> float | None:
    """When the job began first, by the cluster, or otherwise when it was first seen to run."""
    if before.start_s is not None or job.phase not in (Phase.RUNNING, Phase.STOPPING):
        return before.start_s
    return job.started_s or now_s


def has_other_key(view: JobView, key: str | None) -> bool:
    """Whether this is not the job that was submitted with this key, but one that has its id now."""
    return key is not None and view.key is not None and view.key != key


def is_of_another(view: JobView, fate: Fate) -> bool:
    """Whether the accounts speak of another job, which had the id before, or got it after slurmctld had lost this one."""
    if fate.submit_s is None:
        return False
    before = fate.end_s is not None and fate.end_s < begins_s(view.submit_s, view.start_s)
    return before or (view.restarts == 0 and fate.submit_s > view.submit_s + 1.0)


def is_back(before: JobView, job: Job) -> bool:
    """Whether a job that the cluster shows has completed, as this view says: it was not requeued, and no later run has begun."""
    same = job.restarts == before.restarts and not is_another(job, before.submit_s)
    later = job.started_s is not None and before.end_s is not None and job.started_s > before.end_s
    return before.ended == "COMPLETED" and same and not later


def is_former(view: JobView, user: str, key: str | None, submitted_s: float) -> bool:
    """Whether this is not the job that was just submitted by this user with this key, but one that had its id before."""
    if view.user != user or view.key is not None:
        return view.user != user or view.key != key
    return submitted_s > view.submit_s + SUBMITTED_S


class ObservedCluster:
    """A cluster whose reports the board and the models see before the loop does. See `ports.Cluster`."""

    def __init__(self, cluster: Cluster, board: Board, learn: Callable[..., None]) -> None:
        self._cluster, self._board, self._learn = cluster, board, learn
        self._fresh: list[Report] = []

    def observe(self) -> ClusterState:
        """See `ports.Cluster`."""
        state = self._cluster.observe()
        # The board has the reports before the state, so that the view of a job that has ended includes its last report.
        fresh = self._cluster.reports()
        self._fresh.extend(fresh)
        if any(isinstance(report.body, Result) for report in fresh):
            with contextlib.suppress(StoreError):  # the loop stores them, too, and tries again
                self._board.store.add_reports(fresh)  # a client that learns of a result asks for all results at once
        self._board.take_reports(fresh)
        self._learn(fresh)
        return state

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`."""
        return self._cluster.apply(actions)

    def reports(self) -> Sequence[Report]:
        """See `ports.Cluster`."""
        fresh, self._fresh = self._fresh, []
        return fresh


def _shown(job: Job) -> AllocationView | None:
    """The GPUs that a job holds or is about to hold."""
    return allocation_view(job.allocation) if job.allocation and job.phase is not Phase.QUEUED else None


def allocation_view(placement: Placement) -> AllocationView:
    """A placement, for clients."""
    return AllocationView(
        gpu_type=placement.gpu_type,
        gpus=placement.gpus,
        nodes={share.node: share.gpus for share in placement.shares},
    )


def _progress_reports(store: SqlStore, job: str) -> list[Report]:
    """The newest start of a job, the newest report of its progress, and of its saving: in their order."""
    kinds = (("started",), ("observation", "ended"), ("checkpointed", "save_failed"))
    found = [report for kind in kinds for report in store.newest_reports(job, kind, 1)]
    return sorted(found, key=lambda report: (report.epoch, report.sequence))


def _held(state: ClusterState) -> dict[str, int]:
    held: dict[str, int] = {}
    for job in state.jobs:
        if job.phase is not Phase.QUEUED and job.allocation is not None:
            for share in job.allocation.shares:
                held[share.node] = held.get(share.node, 0) + share.gpus
    return held


def _amounts(gpu_seconds: Mapping[str, float]) -> dict[str, float]:
    return {gpu_type: amount for gpu_type, amount in gpu_seconds.items() if amount > 0}


def charges_of(view: JobView, gpu_seconds: Mapping[str, float], suffix: str = "") -> list[LedgerLine]:
    """The ledger's entries for GPU-seconds of a job that has ended, by GPU type. The keys ensure that each is made only once.

    Args:
        suffix: of the keys, for a further entry about the same job.
    """
    return [
        LedgerLine(
            id=0,
            key=f"gpu-seconds:{view.id}:{view.submit_s:.0f}:{gpu_type}{suffix}",
            time_s=view.end_s or 0.0,
            account=view.account,
            user=view.user,
            job=view.id,
            kind="gpu-seconds",
            amount=amount,
            text=gpu_type,
        )
        for gpu_type, amount in gpu_seconds.items()
    ]
