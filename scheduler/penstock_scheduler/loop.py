"""The round loop: observe, decide, act, record. The daemon and the simulator run this one loop.

A *tick* observes the cluster and takes each unfinished action of the present plan one step further; when the trigger
says that a round is due, it decides a new plan first. Nothing that matters lives here between two ticks: the plan is in
the store before its first action, and what is left to do is the difference between the plan and the cluster.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock_profiles.wire import Report
from penstock_scheduler.diff import actions, cloud_actions
from penstock_scheduler.errors import RoundFailed
from penstock_scheduler.idle import idle_since
from penstock_scheduler.model import (
    BudgetLine,
    BurstJob,
    CloudAction,
    CloudState,
    ClusterState,
    EndedRun,
    Job,
    JobId,
    Outcome,
    Phase,
    Placement,
    Plan,
    Progress,
    Snapshot,
    Start,
)
from penstock_scheduler.ports import Burst, Clock, ClusterParts, ModelSource, Policy, Store, Trigger
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.sharing.rules import broken

log = logging.getLogger(__name__)

UNSAVED = 100_000
"""Reports that are kept in memory while the store takes none; older ones are in the jobs' own files still."""


FORGET_S = 300.0
"""How long a job's GPU-seconds outlive it: so its last ones are in a saved round, and one that Slurm takes its time to requeue,
out of sight meanwhile, keeps what it has."""


class RoundLoop:
    """Runs rounds until told to stop.

    Args:
        parts: the cluster, with its accounts, agents and cloud nodes where it has them.
        tick_s: seconds between two looks at the cluster.
        rest_s: while nothing but the time is different from the last round's snapshot, a round that is due is passed over until
            so many seconds after that one: what it would decide was there, and left all as it is. 0: every round is decided.
        settings: the policy's settings, for the record.
        rules: what the site makes of a snapshot before it is decided: its limits, budgets, drains.
        cloud: where jobs may leave for; None: the site has none.
        overspent: asked before each order to the cloud, with account, dollars and the time: a budget of the site that it would
            break as things are now, for what the round saw of it may be old; None: it may be ordered.
        on_round: called with each decided round, after it was saved and before it is acted on.
    """

    def __init__(
        self,
        parts: ClusterParts,
        clock: Clock,
        store: Store,
        trigger: Trigger,
        policy: Policy,
        models: ModelSource,
        *,
        tick_s: float,
        rest_s: float = 0.0,
        settings: Mapping[str, Any] | None = None,
        rules: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
        cloud: Burst | None = None,
        overspent: Callable[[str, float, float], BudgetLine | None] = lambda account, usd, now_s: None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
    ) -> None:
        self._cluster = parts.cluster
        self._accounts = parts.accounts
        self._agents = parts.agents
        self._cloud_nodes = parts.cloud_nodes
        self._clock = clock
        self._store = store
        self._trigger = trigger
        self._policy = policy
        self._models = models
        self._tick_s = tick_s
        self._rest_s = rest_s
        self._decided: Snapshot | None = None
        self._settings = dict(settings or {})
        self._rules = rules
        self._next: tuple[Policy, dict[str, Any]] | None = None
        self.paused = False
        """While true, no round is decided; what is under way goes on."""
        self.failure = ""
        """Why the newest tick that failed did."""
        self._failing_since_s: float | None = None
        self._cloud = cloud
        self._overspent = overspent
        self._on_round = on_round
        self._told: dict[tuple[JobId, str], Outcome] = {}
        """(job, kind of action) -> its newest outcome: the cluster and the cloud may both do something for a job."""
        self._unsaved: deque[Report] = deque(maxlen=UNSAVED)
        last = store.last_round()
        self._round = last.snapshot.round if last else 0
        self._plan: Plan | None = last.plan if last else None
        self._attained: dict[JobId, dict[str, float]] = last.snapshot.attained if last else {}
        self._absent: dict[JobId, float] = {}
        self._held: dict[JobId, _CountedRun] = {}
        self._idle_since_s: dict[str, tuple[float, ...]] = {}
        if last:
            self._held = {
                job.id: run for job in last.snapshot.jobs if (run := _run(job, last.snapshot.time_s)) is not None
            }
            placements = {job: given.placement for job, given in last.plan.assignments.items()}
            self._sent(last.snapshot.jobs, placements, last.snapshot.time_s)
        self._seen_s = last.snapshot.time_s if last else None
        if last:
            log.info("plan taken up", extra={"round": self._round, "assignments": len(last.plan.assignments)})

    def run(self, stop: Callable[[], bool], on_tick: Callable[[], None] = lambda: None) -> None:
        """Tick until `stop()`. A tick that fails is logged, changes nothing more, and the next one tries again.

        `on_tick` is called after each tick, failed or not: the sign of life.
        """
        while not stop():
            try:
                self.tick()
                self._failing_since_s = None
            except RoundFailed as error:
                self._failed(str(error))
                log.warning(
                    "tick failed", extra={"round": self._round, "error": type(error).__name__, "text": str(error)}
                )
            except Exception as error:
                self._failed(repr(error))
                log.exception("tick failed, and should not have: please report it", extra={"round": self._round})
            on_tick()
            if not stop():
                self._clock.sleep(self._tick_s)

    def _failed(self, text: str) -> None:
        self.failure = text
        if self._failing_since_s is None:
            self._failing_since_s = self._clock.now_s()

    @property
    def failing_s(self) -> float | None:
        """For how long every tick has failed; None: the last one did not."""
        return None if self._failing_since_s is None else self._clock.now_s() - self._failing_since_s

    def decide_by(self, policy: Policy, settings: Mapping[str, Any]) -> None:
        """Decide by another policy from the next round on. May be called from another thread."""
        self._next = policy, dict(settings)

    def pace(self, trigger: Trigger, tick_s: float) -> None:
        """Another trigger and another time between two looks, from now on. To be called between two ticks."""
        self._trigger, self._tick_s = trigger, tick_s

    def tick(self) -> tuple[Outcome, ...]:
        """Look once, decide if a round is due, and act. Returns what became of the actions.

        Raises:
            RoundFailed: the cluster or the store is away, or the policy has no usable plan.
        """
        started = time.perf_counter()
        now_s = (
            self._clock.now_s()
        )  # before the look, which may take long: what ran then is seen, what ends meanwhile may not be
        state = self._cluster.observe()
        observed = time.perf_counter()
        self._count(state, now_s)  # before anything that can fail: what has ended is told once
        self._unsaved.extend(self._cluster.reports())
        if self._unsaved:  # what a store that is away did not take is offered again at the next tick
            self._store.add_reports(tuple(self._unsaved))
            self._unsaved.clear()
        cloud = self._cloud.observe(state.jobs) if self._cloud is not None else None
        if not self.paused and self._trigger.due(now_s, state):
            self._decide(state, cloud, now_s, observed - started)
            self._trigger.decided(now_s, state)
        if self._plan is None:
            return ()
        runs = cloud.runs if cloud is not None else ()
        asked = self._cloud.asks() if self._cloud is not None else ()
        if self._agents is not None:
            self._agents.share(self._plan.shared)
        outcomes = self._cluster.apply((*asked, *actions(self._plan, state.jobs, {run.job for run in runs})))
        if self._cloud is not None:
            outcomes += self._order(self._cloud, cloud_actions(self._plan, state.jobs, runs), state.jobs)
        self._tell(state, outcomes)
        sent = (each.action for each in outcomes if each.progress is Progress.UNDER_WAY)
        self._sent(state.jobs, {action.job: action.placement for action in sent if isinstance(action, Start)}, now_s)
        return outcomes

    def _order(self, cloud: Burst, wanted: Sequence[CloudAction], jobs: Sequence[Job]) -> tuple[Outcome, ...]:
        """One after the other, for each order is in the ledger before the next is looked at."""
        accounts = {job.id: job.account for job in jobs}
        outcomes: tuple[Outcome, ...] = ()
        for action in wanted:
            if (
                isinstance(action, BurstJob)
                and (line := self._overspent(accounts[action.job], action.usd, self._clock.now_s())) is not None
            ):
                text = f"{line} does not allow ${action.usd:.2f} any more"
                outcomes += (Outcome(action, Progress.FAILED, text),)
            else:
                outcomes += tuple(cloud.apply((action,)))
        return outcomes

    def _decide(self, state: ClusterState, cloud: CloudState | None, now_s: float, observe_seconds: float) -> None:
        if self._next is not None:
            (self._policy, self._settings), self._next, self._decided = self._next, None, None
        types = {node.gpu_type for node in state.nodes}
        if cloud is not None:
            types |= {offer.gpu_type for offer in cloud.offers}
        known = self._models.models(state.jobs, types)
        jobs = tuple(
            job if job.phase is Phase.RUNNING else dataclasses.replace(job, target=self._target(job.id))
            for job in state.jobs
        )
        sharing = None if self._agents is None else self._agents.sharing()
        groups = sharing.groups if sharing is not None else ()
        self._idle_since_s = idle_since(self._idle_since_s, state.nodes, jobs, groups, now_s)
        snapshot = Snapshot(
            round=self._round + 1,
            time_s=now_s,
            nodes=state.nodes,
            jobs=jobs,
            models=known.estimators,
            restart_costs_s=known.restart_costs_s,
            refused=state.refused,
            limits=state.limits,
            unscaled=known.unscaled,
            unmeasured=known.unmeasured,
            remaining=known.remaining,
            attained=self._attained,
            cloud=cloud,
            sensitivities=known.sensitivities,
            sharing=sharing,
            idle_since_s=self._idle_since_s,
        )
        snapshot = self._rules(snapshot)
        if self._at_rest(snapshot):
            return
        started = time.perf_counter()
        plan = self._policy.decide(snapshot)
        if wrong := broken(snapshot, plan):
            raise RoundFailed(
                f"policy {self._policy.name} made a plan that cannot be: {'; '.join(wrong)}; please report it"
            )
        seconds = {"observe": observe_seconds, "decide": time.perf_counter() - started}
        record = RoundRecord(snapshot, self._policy.name, self._settings, plan, seconds)
        self._store.save_round(record)
        self._round, self._plan, self._decided = snapshot.round, plan, snapshot
        if log.isEnabledFor(logging.INFO):
            log.info(
                "round",
                extra={
                    "round": snapshot.round,
                    "jobs": len(jobs),
                    "placed": len(plan.assignments),
                    "waiting": len(plan.waiting),
                    "decide_s": round(seconds["decide"], 3),
                }
                | ({"status": plan.solve.status.value, "gap": round(plan.solve.gap, 6)} if plan.solve else {}),
            )
        self._on_round(record)

    def _count(self, state: ClusterState, now_s: float) -> None:
        """Add the time since the last look to what each job has attained, on the site's GPUs that it holds or has held.

        Time in which a job was suspended is not counted, but for what came after the last look at a run that is over.

        By the cluster's own times of starts and ends where it says them, so that the sum is what its accounts say; those are
        whole seconds, so that a run which has been counted up to now may turn out to have ended a moment before. Where nobody
        knows when between two looks a run ended, it is the middle. The first look of a daemon adds the time since the last
        round that was saved: jobs run on while it is away. A look may take long, and what ended in the course of it is counted
        up to its beginning, and the rest at the next one, where such a job is told of again.
        """
        since_s = now_s if self._seen_s is None else self._seen_s
        present = {job.id: job for job in state.jobs}
        ended = {run.job: run for run in state.ended if run.job not in present}
        held = {job.id: run for job in state.jobs if (run := _run(job, now_s)) is not None}
        gpu_seconds: list[tuple[JobId, Placement, float]] = []
        over = {
            job_id: run
            for job_id, run in self._held.items()
            if (job := present.get(job_id)) is None or job.restarts != run.restarts or job.leaving
        }
        recorded = self._recorded(over, present, ended)
        for job_id, before in over.items():
            if recorded.get(job_id):
                for each in recorded[job_id]:
                    begin_s = before.counted_s if each.started_s == before.started_s else each.started_s
                    ended_s = each.ended_s if job_id in present else min(each.ended_s, now_s)
                    gpu_seconds.append((job_id, each.held, ended_s - begin_s))
            elif job_id not in ended:
                seconds = _rest_s(before, present.get(job_id), held.get(job_id), now_s)
                gpu_seconds.append((job_id, before.on, seconds))
        for job_id, run in held.items():
            known = self._held.get(job_id)
            if known is None or known.sent or known.restarts != run.restarts:
                begin_s = _begin_s(run.started_s, since_s)
                # It may have been suspended before that, too: of a run that was out of sight for a look.
                stood_s = min(run.suspended_s, max(now_s - begin_s, 0.0))
            else:
                begin_s = known.counted_s
                stood_s = run.suspended_s - known.suspended_s
            gpu_seconds.append((job_id, run.on, max(now_s, begin_s) - begin_s - stood_s))
        for job_id, last in ended.items():
            known = self._held.get(job_id)
            if recorded.get(job_id):
                continue
            if known is not None and known.started_s == last.started_s:
                gpu_seconds.append((job_id, last.held, min(last.ended_s, now_s) - known.counted_s))
            elif last.ended_s > since_s:
                gpu_seconds.append((job_id, last.held, min(last.ended_s, now_s) - _begin_s(last.started_s, since_s)))
        self._absent = {job: self._absent.get(job, now_s) for job in self._attained if job not in present}
        self._attained = {
            job: attained for job, attained in self._attained.items() if now_s - self._absent.get(job, now_s) < FORGET_S
        }
        elsewhere = set() if self._cloud_nodes is None else {node.name for node in self._cloud_nodes.nodes()}
        for job_id, on, seconds in gpu_seconds:
            if not elsewhere.isdisjoint(on.nodes):
                continue
            attained = self._attained.get(job_id, {})
            now = max(attained.get(on.gpu_type, 0.0) + on.gpus * seconds, 0.0)
            self._attained[job_id] = attained | {on.gpu_type: now}
        self._held, self._seen_s = held, now_s

    def _recorded(
        self, over: Mapping[JobId, _CountedRun], present: Mapping[JobId, Job], ended: Mapping[JobId, EndedRun]
    ) -> dict[JobId, list[EndedRun]]:
        """By job, all of its runs since it was last counted, where the looks do not tell them and the accounts do."""

        def told(job_id: JobId, run: _CountedRun) -> bool:
            job = present.get(job_id)
            if job is None:
                return job_id in ended and ended[job_id].started_s == run.started_s
            return job.stopped_s is not None and job.restarts <= run.restarts + 1

        asked = {job_id: run for job_id, run in over.items() if not told(job_id, run)}
        if self._accounts is None or not asked:
            return {}
        found: dict[JobId, list[EndedRun]] = {}
        for each in self._accounts(asked.keys(), min(run.counted_s for run in asked.values()) - 1):
            # What ended in the very second of the last look ended after it, if it was there.
            run = asked.get(each.job)
            if run is not None and (each.started_s == run.started_s or each.ended_s > run.counted_s):
                found.setdefault(each.job, []).append(each)
        return found

    def _sent(self, jobs: Sequence[Job], placements: Mapping[JobId, Placement], seen_s: float) -> None:
        """These are on their way, and may have run and be back in the queue when they are seen next."""
        for job in jobs:
            if job.id in placements and job.id not in self._held and not job.leaving:
                self._held[job.id] = _CountedRun(placements[job.id], None, job.restarts, seen_s, sent=True)

    def _at_rest(self, snapshot: Snapshot) -> bool:
        last = self._decided
        if last is None or not snapshot.time_s - last.time_s < self._rest_s:
            return False
        if snapshot.sharing is not None:
            return False  # every slice shows something new
        # What jobs attain and have left only grows and shrinks with the time.
        same = ("round", "time_s", "attained", "remaining")
        return dataclasses.replace(snapshot, **{name: getattr(last, name) for name in same}) == last

    def _cause(self, job: JobId, held: Placement | None) -> str:
        """Why there is anything to do: what the job holds, and the plan's reason for something else."""
        assert self._plan is not None
        given = self._plan.assignments.get(job)
        reason = self._plan.waiting.get(job) if given is None else given.reason
        return f"holds {held or 'nothing'}: {reason.text if reason is not None else 'the plan has changed'}"

    def _target(self, job: str) -> Any:
        assignment = self._plan.assignments.get(job) if self._plan else None
        return assignment.placement if assignment else None

    def _tell(self, state: ClusterState, outcomes: tuple[Outcome, ...]) -> None:
        """Log and store each outcome once, not on every tick that repeats it; what was under way and is gone is done."""
        busy = {outcome.action.job for outcome in outcomes}
        arrived = {job.id for job in state.jobs if job.phase in (Phase.RUNNING, Phase.QUEUED)} - busy
        done = tuple(
            Outcome(told.action, Progress.DONE)
            for (job, _), told in self._told.items()
            if job in arrived and told.progress is Progress.UNDER_WAY
        )
        news = [outcome for outcome in (*done, *outcomes) if self._told.get(_key(outcome)) != outcome]
        self._told = {_key(outcome): outcome for outcome in outcomes}
        if not news:
            return
        self._store.add_outcomes(self._clock.now_s(), news)
        held = {job.id: job.allocation for job in state.jobs}
        for outcome in news:
            level = logging.WARNING if outcome.progress is Progress.FAILED else logging.INFO
            if not log.isEnabledFor(level):
                continue
            log.log(
                level,
                "action",
                extra={
                    "round": outcome.action.round,
                    "job": outcome.action.job,
                    "action": outcome.action.kind,
                    "placement": str(getattr(outcome.action, "placement", "none")),
                    "cause": self._cause(outcome.action.job, held.get(outcome.action.job)),
                    "progress": outcome.progress.value,
                    "text": outcome.text,
                },
            )


def _key(outcome: Outcome) -> tuple[JobId, str]:
    return outcome.action.job, outcome.action.kind


@dataclasses.dataclass(frozen=True, slots=True)
class _CountedRun:
    """A run whose time counts as its job's."""

    on: Placement
    started_s: float | None
    """On the cluster's clock; None: it does not say."""
    restarts: int
    counted_s: float
    """Up to when it is counted."""
    sent: bool = False
    """Whether it was not seen yet."""
    suspended_s: float = 0.0
    """For how long it had been suspended by then."""


def _run(job: Job, now_s: float) -> _CountedRun | None:
    """The job's present run, if it holds anything that counts."""
    if job.allocation is None or job.leaving or job.phase not in (Phase.RUNNING, Phase.STOPPING):
        return None
    counted_s = max(now_s, job.started_s or 0.0)
    return _CountedRun(job.allocation, job.started_s, job.restarts, counted_s, suspended_s=job.suspended_s)


def _begin_s(started_s: float | None, since_s: float) -> float:
    """From when a run counts that was not there at `since_s`. One that began in that very second began after it."""
    return since_s if started_s is None or started_s <= since_s - 1 else started_s


def _rest_s(run: _CountedRun, job: Job | None, after: _CountedRun | None, now_s: float) -> float:
    """What is still to be counted of a run that is over, seconds.

    Args:
        run: as it was last seen, or sent.
        job: its job now; None: it is out of sight.
        after: the job's present run.
        now_s: the time.
    """
    if job is not None and job.restarts > run.restarts + 1:
        return 0.0  # after two restarts nobody can say when the first of them was
    if job is not None and job.stopped_s is not None:
        return min(job.stopped_s, now_s) - run.counted_s
    if run.started_s is None and not run.sent:
        return 0.0  # a cluster that tells no times
    if run.sent and job is None:
        return 0.0  # it never began, as far as anybody knows
    latest = (now_s, job.requeued_s if job is not None else None, after.started_s if after is not None else None)
    latest_s = min(time_s for time_s in latest if time_s is not None)
    ended_s = math.floor((run.counted_s + max(latest_s, run.counted_s)) / 2)
    return (max(ended_s, run.counted_s) - run.counted_s) / 2 if run.sent else ended_s - run.counted_s
