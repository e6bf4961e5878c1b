"""The round loop: observe, decide, act, record. The daemon and the simulator run this one loop.

A *tick* observes the cluster and takes each unfinished action of the present plan one step further; when the trigger
says that a round is due, it decides a new plan first. Nothing that matters lives here between two ticks: the plan is in
the store before its first action, and what is left to do is the difference between the plan and the cluster.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock_profiles.wire import Report
from penstock_scheduler.diff import actions
from penstock_scheduler.errors import RoundFailed
from penstock_scheduler.model import ClusterState, GpuLimit, Job, JobId, Outcome, Phase, Plan, Progress, Snapshot
from penstock_scheduler.ports import Clock, Cluster, ModelSource, Policy, Store, Trigger
from penstock_scheduler.records import RoundRecord

log = logging.getLogger(__name__)

UNSAVED = 100_000
"""Reports that are kept in memory while the store takes none; older ones are in the jobs' own files still."""


class RoundLoop:
    """Runs rounds until told to stop.

    Args:
        tick_s: seconds between two looks at the cluster.
        rest_s: while nothing but the time is different from the last round's snapshot, a round that is due is passed over until
            so many seconds after that one: what it would decide was there, and left all as it is. 0: every round is decided.
        settings: the policy's settings, for the record.
        limits: the site's own limits on these jobs, beside those that the cluster reports.
        on_round: called with each decided round, after it was saved and before it is acted on.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        store: Store,
        trigger: Trigger,
        policy: Policy,
        models: ModelSource,
        *,
        tick_s: float,
        rest_s: float = 0.0,
        settings: Mapping[str, Any] | None = None,
        limits: Callable[[Sequence[Job]], tuple[GpuLimit, ...]] = lambda jobs: (),
        on_round: Callable[[RoundRecord], None] = lambda record: None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._store = store
        self._trigger = trigger
        self._policy = policy
        self._models = models
        self._tick_s = tick_s
        self._rest_s = rest_s
        self._decided: Snapshot | None = None
        self._settings = dict(settings or {})
        self._limits = limits
        self._next: tuple[Policy, dict[str, Any]] | None = None
        self.paused = False
        """While true, no round is decided; what is under way goes on."""
        self._on_round = on_round
        self._told: dict[str, Outcome] = {}
        self._unsaved: deque[Report] = deque(maxlen=UNSAVED)
        last = store.last_round()
        self._round = last.snapshot.round if last else 0
        self._plan: Plan | None = last.plan if last else None
        self._attained: dict[JobId, dict[str, float]] = last.snapshot.attained if last else {}
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
            except RoundFailed as error:
                log.warning(
                    "tick failed", extra={"round": self._round, "error": type(error).__name__, "text": str(error)}
                )
            except Exception:
                log.exception("tick failed, and should not have: please report it", extra={"round": self._round})
            on_tick()
            if not stop():
                self._clock.sleep(self._tick_s)

    def decide_by(self, policy: Policy, settings: Mapping[str, Any]) -> None:
        """Decide by another policy from the next round on. May be called from another thread."""
        self._next = policy, dict(settings)

    def tick(self) -> tuple[Outcome, ...]:
        """Look once, decide if a round is due, and act. Returns what became of the actions.

        Raises:
            RoundFailed: the cluster or the store is away, or the policy has no usable plan.
        """
        started = time.perf_counter()
        state = self._cluster.observe()
        observed = time.perf_counter()
        self._unsaved.extend(self._cluster.reports())
        if self._unsaved:  # what a store that is away did not take is offered again at the next tick
            self._store.add_reports(tuple(self._unsaved))
            self._unsaved.clear()
        now_s = self._clock.now_s()
        self._count(state, now_s)
        if not self.paused and self._trigger.due(now_s, state):
            self._decide(state, now_s, observed - started)
            self._trigger.decided(now_s, state)
        if self._plan is None:
            return ()
        outcomes = self._cluster.apply(actions(self._plan, state.jobs))
        self._tell(state, outcomes)
        return outcomes

    def _decide(self, state: ClusterState, now_s: float, observe_seconds: float) -> None:
        if self._next is not None:
            (self._policy, self._settings), self._next, self._decided = self._next, None, None
        known = self._models.models(state.jobs, {node.gpu_type for node in state.nodes})
        jobs = tuple(
            dataclasses.replace(job, target=self._target(job.id))
            if job.phase in (Phase.STARTING, Phase.STOPPING)
            else job
            for job in state.jobs
        )
        snapshot = Snapshot(
            round=self._round + 1,
            time_s=now_s,
            nodes=state.nodes,
            jobs=jobs,
            models=known.estimators,
            restart_costs_s=known.restart_costs_s,
            refused=state.refused,
            limits=(*state.limits, *self._limits(jobs)),
            unscaled=known.unscaled,
            remaining=known.remaining,
            attained=self._attained,
            sensitivities=known.sensitivities,
        )
        if self._at_rest(snapshot):
            return
        started = time.perf_counter()
        plan = self._policy.decide(snapshot)
        seconds = {"observe": observe_seconds, "decide": time.perf_counter() - started}
        record = RoundRecord(snapshot, self._policy.name, self._settings, plan, seconds)
        self._store.save_round(record)
        self._round, self._plan, self._decided = snapshot.round, plan, snapshot
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
        """Add the time since the last look to what each job has attained, on the GPUs that it holds now.

        The first look of a daemon adds the time since the last round that was saved: jobs run on while it is away.
        """
        passed_s = max(now_s - self._seen_s, 0.0) if self._seen_s is not None else 0.0
        before, self._attained, self._seen_s = self._attained, {}, now_s
        for job in state.jobs:
            attained = before.get(job.id, {})
            if job.allocation is not None and job.phase in (Phase.RUNNING, Phase.STOPPING):
                held = job.allocation
                attained = attained | {held.gpu_type: attained.get(held.gpu_type, 0.0) + held.gpus * passed_s}
            if attained:
                self._attained[job.id] = attained

    def _at_rest(self, snapshot: Snapshot) -> bool:
        last = self._decided
        if last is None or not snapshot.time_s - last.time_s < self._rest_s:
            return False
        # What jobs attain and have left only grows and shrinks with the time.
        same = ("round", "time_s", "attained", "remaining")
        return dataclasses.replace(snapshot, **{name: getattr(last, name) for name in same}) == last

    def _target(self, job: str) -> Any:
        assignment = self._plan.assignments.get(job) if self._plan else None
        return assignment.placement if assignment else None

    def _tell(self, state: ClusterState, outcomes: tuple[Outcome, ...]) -> None:
        """Log and store each outcome once, not on every tick that repeats it; what was under way and is gone is done."""
        busy = {outcome.action.job for outcome in outcomes}
        arrived = {job.id for job in state.jobs if job.phase in (Phase.RUNNING, Phase.QUEUED)} - busy
        done = tuple(
            Outcome(told.action, Progress.DONE)
            for job, told in self._told.items()
            if job in arrived and told.progress is Progress.UNDER_WAY
        )
        news = [outcome for outcome in (*done, *outcomes) if self._told.get(outcome.action.job) != outcome]
        self._told = {outcome.action.job: outcome for outcome in outcomes}
        if not news:
            return
        self._store.add_outcomes(self._clock.now_s(), news)
        for outcome in news:
            level = logging.WARNING if outcome.progress is Progress.FAILED else logging.INFO
            log.log(
                level,
                "action",
                extra={
                    "round": outcome.action.round,
                    "job": outcome.action.job,
                    "action": outcome.action.kind,
                    "placement": str(getattr(outcome.action, "placement", "none")),
                    "progress": outcome.progress.value,
                    "text": outcome.text,
                },
            )
