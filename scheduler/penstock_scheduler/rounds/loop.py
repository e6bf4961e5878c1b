"""The round loop: observe, decide, act, record. The daemon and the simulator run this one loop.

A *tick* observes the cluster and takes each unfinished action of the present plan one step further. When the trigger says
that a round is due, the tick decides a new plan first. `RoundLoop.tick` has the steps.

Nothing that matters lives in memory between two ticks. The plan is in the store before its first action, and what is left to
do is the difference between the plan and the cluster.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock_profiles.wire import Report
from penstock_scheduler.accounts.gpu_seconds import GpuSeconds
from penstock_scheduler.api.ports import (
    Annotator,
    Burst,
    Clock,
    ClusterParts,
    Leadership,
    ModelSource,
    Policy,
    RoundListener,
    SiteRules,
    Store,
    Trigger,
)
from penstock_scheduler.burst.deciding.choices import within
from penstock_scheduler.jobs.claims import believed
from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.model import (
    BurstJob,
    CloudAction,
    CloudRun,
    CloudState,
    ClusterState,
    Hold,
    Job,
    JobId,
    Outcome,
    Phase,
    Placement,
    Plan,
    Progress,
    Snapshot,
    Start,
    Stop,
    StopCode,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import GateRecord, RoundRecord
from penstock_scheduler.model.snapshot import MoveBudget
from penstock_scheduler.people.errors import PenstockError, RoundFailed
from penstock_scheduler.people.units import clock as time_of_day
from penstock_scheduler.people.units import dollars
from penstock_scheduler.rounds.diff import actions, cloud_actions, concerned
from penstock_scheduler.rounds.idle import idle_since
from penstock_scheduler.rounds.outcomes import OutcomeLog
from penstock_scheduler.rounds.plan_gate import PlanGate, SafetySettings
from penstock_scheduler.rounds.policies.calm import charged
from penstock_scheduler.rounds.sharing.rules import broken
from penstock_scheduler.safety.health import LoopHealth, StepName
from penstock_scheduler.store.leadership.lease import ALONE

log = logging.getLogger(__name__)

BACK = "it comes back from the cloud: it was recalled, or its time or its money there is over"
"""Why the cloud has a job leave its instance, where the round's plan does not say."""

UNSAVED = 100_000
"""Reports kept in memory while the store is away. Older ones are still in the jobs' own files."""


class _ListenerFailed(PenstockError):
    """Listeners failed for reasons that nobody foresaw. The round goes on."""


@dataclass(frozen=True)
class RoundTiming:
    """When the loop ticks and decides."""

    trigger: Trigger
    """When a round is due."""
    tick_s: float
    """Seconds between two ticks."""
    rest_s: float = 0.0
    """Skips a round that is due for up to this long after the last one if only the time has changed since: the last plan still
    stands. 0: every round is decided."""
    settle_s: float = 0.0
    """How long after its start the loop decides and does nothing, seconds; it observes, counts and stores. For a store that was
    restored from a backup, with a plan that is out of date."""


@dataclass(frozen=True)
class RoundSurroundings:
    """A site's additions to the loop on its cluster."""

    rules: SiteRules = field(default_factory=SiteRules)
    annotators: tuple[Annotator, ...] = ()
    """They add to each snapshot, in this order, after the rules."""
    safety: SafetySettings | None = None
    """Bounds on the running jobs that a plan may stop, or None if there are none."""
    cloud: Burst | None = None
    """The cloud, or None if the site has none."""
    move_share: float | None = None
    """Share of the running GPU-time that exchanges of GPUs between running jobs may cost in any hour, where `safety` is None;
    None if any."""
    leadership: Leadership = ALONE
    """The right to write. Without it, a tick fails before it has done anything."""
    listeners: tuple[RoundListener, ...] = ()
    """They hear of each step of the loop, in this order. A listener that fails ends the tick."""


class RoundLoop:
    """Runs rounds until told to stop.

    Args:
        parts: the cluster, with its accounts, agents and cloud nodes where it has them.
        choice: the policy with its settings, for the record; None: its name alone.
        site: the site's rules, its cloud, and who listens.
    """

    _settles_because = "the store was restored from a backup"

    def __init__(
        self,
        parts: ClusterParts,
        clock: Clock,
        store: Store,
        timing: RoundTiming,
        policy: Policy,
        models: ModelSource,
        choice: PolicyChoice | None = None,
        site: RoundSurroundings | None = None,
    ) -> None:
        site = site or RoundSurroundings()
        self._cluster = parts.cluster
        self._accounts = parts.accounts
        self._agents = parts.agents
        self._cloud_nodes = parts.cloud_nodes
        self._cloud = site.cloud
        self._clock = clock
        self._store = store
        self._trigger = timing.trigger
        self._policy = policy
        self._choice = choice or PolicyChoice(name=policy.name)
        self._models = models
        self._rules, self._annotators, self._move_share = site.rules, site.annotators, site.move_share
        self._listeners = site.listeners
        self._leadership = site.leadership
        self._tick_s, self._rest_s = timing.tick_s, timing.rest_s
        # Whatever the clock is set to later.
        self._settled_s = clock.now_s() + timing.settle_s if timing.settle_s else -math.inf
        self.paused = False
        """While true, no round is decided; actions that are under way go on."""
        self.health = LoopHealth(clock.now_s)
        """What each step of a tick did last."""
        self._cloud_state = CloudState()
        """The cloud as of the newest tick."""
        self.failure = ""
        """Why the newest tick that failed did so."""
        self._failing_since_s: float | None = None
        self._next: tuple[Policy, PolicyChoice] | None = None
        """The policy that decides from the next round on."""
        self._decided: Snapshot | None = None
        """What the policy's newest plan was decided on."""
        self._idle_since_s: dict[str, tuple[float, ...]] = {}
        self._unsaved: deque[Report] = deque(maxlen=UNSAVED)
        last = store.last_round()
        self._outcomes = OutcomeLog(store, last)
        self._round, self._moves = (last.snapshot.round, charged(last.snapshot, last.plan)) if last else (0, ())
        self._plan: Plan | None = last.plan if last and not timing.settle_s else None
        self._submitted_s = {job.id: job.submit_s for job in last.snapshot.jobs} if last else {}
        """When the jobs of the plan were submitted."""
        self.gate: PlanGate | None = None
        """Refuses plans that stop too much; None: none is refused."""
        if site.safety is not None:
            seen_before, noted = (last.snapshot, last.gate) if last else (None, None)
            self.gate = PlanGate(site.safety, seen_before, noted, clock.now_s())
        self._gpu_seconds = GpuSeconds()
        if last is not None:
            self._take_up(last, parts)

    def _take_up(self, last: RoundRecord, parts: ClusterParts) -> None:
        """Go on with the last round, at the start."""
        seen = last.snapshot
        self._gpu_seconds = GpuSeconds(seen.attained, (*seen.jobs, *seen.unseen), seen.time_s)
        sent = {} if self._plan is None else last.plan.assignments
        self._gpu_seconds.sent(seen.jobs, {job: given.placement for job, given in sent.items()}, seen.time_s)
        if self._plan is not None and parts.resume is not None:
            parts.resume(seen, self._plan)
        log.info("plan loaded", extra={"round": self._round, "assignments": len(last.plan.assignments)})

    def run(self, stop: Callable[[], bool], on_tick: Callable[[], None] = lambda: None) -> None:
        """Tick until `stop()`. A tick that fails is logged, and the next tick tries again.

        `on_tick` is called after each tick, also after one that failed. It shows that the loop is alive.
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
                log.exception("tick failed unexpectedly; please report this as a bug", extra={"round": self._round})
            on_tick()
            if not stop():
                self._clock.sleep(self._tick_s)

    def _failed(self, text: str) -> None:
        self.failure = text
        if self.gate is not None:
            self.gate.failed(self._clock.now_s(), text)
        if self._failing_since_s is None:
            self._failing_since_s = self._clock.now_s()

    @property
    def settling(self) -> str:
        """Why nothing is decided or done yet: the store was restored, or is older than the jobs. Empty: it is."""
        if self._clock.now_s() >= self._settled_s:
            return ""
        until = time_of_day(self._settled_s)
        return f"{self._settles_because}; until {until}, Penstock only looks, and does nothing"

    @property
    def failing_s(self) -> float | None:
        """For how long every tick has failed, seconds; None: the last one succeeded."""
        return None if self._failing_since_s is None else self._clock.now_s() - self._failing_since_s

    def decide_by(self, policy: Policy, choice: PolicyChoice) -> None:
        """Decide by another policy from the next round on. May be called from another thread."""
        self._next = policy, choice

    def pace(self, trigger: Trigger, tick_s: float) -> None:
        """Use this trigger and this time between two ticks from now on. To be called between two ticks."""
        self._trigger, self._tick_s = trigger, tick_s

    def tick(self) -> tuple[Outcome, ...]:
        """One tick. Returns what became of the actions.

        1. Observe the cluster.
        2. Count the GPU-seconds since the previous tick, before anything can fail: the cluster tells only once what has ended.
           Then the listeners hear of the observation.
        3. Store the reports of jobs.
        4. Observe the cloud.
        5. If a round is due, decide a new plan and save it.
        6. Act: tell the agents which jobs share GPUs, then take each unfinished action one step further, first on the cluster
           and then in the cloud.
        7. Record the outcomes.

        Raises:
            RoundFailed: the cluster or the store is away, the policy has no usable plan, or this penstockd does not lead.
        """
        self._leadership.expect()
        started = time.perf_counter()
        now_s = self._clock.now_s()  # before the observation, which may take long and miss what ends meanwhile
        with self.health.step(StepName.OBSERVE):
            state = self._cluster.observe()
        observe_seconds = time.perf_counter() - started
        if state.told_round > self._round:
            self._settle(state.told_round, now_s)
        self._count(state, now_s)
        with suppress(_ListenerFailed), self.health.step(StepName.TELL):
            self._tell(lambda listener: listener.observed(state, now_s, self._gpu_seconds.so_far))
        if self.gate is not None:
            self.gate.saw(state, now_s)
        with self.health.step(StepName.REPORTS):
            self._store_reports()
        if self.settling:
            return ()
        cloud = self._cloud.observe(state.jobs) if self._cloud is not None else None
        self._cloud_state = CloudState() if cloud is None else cloud
        if not self.paused and self._trigger.due(now_s, state):
            with self.health.step(StepName.DECIDE, self._round + 1):
                self._decide(state, cloud, now_s, observe_seconds)
            self._trigger.decided(now_s, state)
        if self._plan is None:
            return ()
        with self.health.step(StepName.APPLY, self._plan.round):
            outcomes = self._act(self._plan, state, cloud)
            if stops := self._outcomes.record(self._plan, state, outcomes, self._clock.now_s()):
                with suppress(_ListenerFailed):
                    self._tell(lambda listener: listener.stopped(stops))
        self._gpu_seconds.sent(state.jobs, _starts_under_way(outcomes), now_s)
        return outcomes

    def _settle(self, told_round: int, now_s: float) -> None:
        """Only look for a while: the store lacks a round that placed jobs, so it is not the store that sent them there. Its
        file was lost or replaced, or its disk has lost what was written last."""
        known, restored = self._round, self.settling
        # No number of a round comes twice, so that the next start finds a store that has the rounds of all jobs.
        self._round, self._plan = told_round, None
        if restored or self.gate is None:
            return
        has = f"ends with round {known}" if known else "has no round"
        self._settles_because = (
            f"the store {has}, and jobs run by round {told_round}: it is empty or older than they are"
        )
        self._settled_s = now_s + self.gate.settings.grace_s
        log.error("the store is older than the jobs", extra={"round": told_round, "text": self.settling})

    def _tell(self, tell: Callable[[RoundListener], None]) -> None:
        """Tell each listener. An unforeseen error of one keeps neither the others nor a round from going on.

        Raises:
            RoundFailed: a listener could not do what a round needs, such as writing to the store.
            _ListenerFailed: listeners failed for reasons that nobody foresaw, which are logged.
        """
        failed: list[str] = []
        for listener in self._listeners:
            try:
                tell(listener)
            except RoundFailed:
                raise
            except Exception as error:
                name = type(listener).__name__
                failed.append(f"{name}: {type(error).__name__}")
                log.exception("a listener failed, rounds go on; please report this as a bug", extra={"listener": name})
        if failed:
            raise _ListenerFailed(", ".join(failed))

    def _count(self, state: ClusterState, now_s: float) -> None:
        unknown = None if self._accounts is None else self._gpu_seconds.unknown_ends(state)
        recorded = () if self._accounts is None or unknown is None else self._accounts(unknown.jobs, unknown.since_s)
        cloud_nodes = () if self._cloud_nodes is None else self._cloud_nodes.nodes()
        self._gpu_seconds.count(state, now_s, recorded, {node.name for node in cloud_nodes})

    def _store_reports(self) -> None:
        """Store what jobs have reported. Reports that the store did not take are offered again at the next tick."""
        self._unsaved.extend(self._cluster.reports())
        if self._unsaved:
            self._store.add_reports(tuple(self._unsaved))
            self._unsaved.clear()

    @property
    def choice(self) -> PolicyChoice:
        """The policy that decides the next round, with all settings."""
        pending = self._next
        return self._choice if pending is None else pending[1]

    @property
    def at_rest(self) -> bool:
        """Whether no round is decided because an admin has paused the loop, or because the store was restored lately."""
        return self.paused or bool(self.settling)

    @property
    def incomplete(self) -> str:
        """Parts that the newest observation of the cluster lacks, or why the loop settles; empty if neither."""
        return self.settling or (self.gate.incomplete if self.gate is not None else "")

    @property
    def cloud(self) -> Burst | None:
        """The cloud, or None if the site has none."""
        return self._cloud

    @property
    def cloud_protected(self) -> str:
        """Why the cloud launches nothing until an admin says so, as of the newest tick; empty: it may."""
        return self._cloud_state.protected

    @property
    def cloud_troubles(self) -> tuple[str, ...]:
        """What an admin must put right in the cloud, as of the newest tick."""
        return self._cloud_state.troubles

    @property
    def cloud_stops(self) -> tuple[CloudRun, ...]:
        """Runs in the cloud whose job was stopped or is being stopped, as of the newest tick."""
        return tuple(run for run in self._cloud_state.runs if run.stopped)

    def _act(self, plan: Plan, state: ClusterState, cloud: CloudState | None) -> tuple[Outcome, ...]:
        runs = cloud.runs if cloud is not None else ()
        asked = self._cloud.asks() if self._cloud is not None else ()
        known = [job for job in concerned(plan, state.jobs) if not self._has_come_since(job)]
        wanted = (*asked, *actions(plan, known, {run.job for run in runs}))
        if self._agents is not None:
            self._agents.share(plan.shared, wanted)
        outcomes = self._cluster.apply(wanted)
        why = {run.job: f"it comes back from the cloud: {run.stopped}" for run in runs if run.stopped}
        back = {action.job for action in asked if isinstance(action, Hold)}
        outcomes = tuple(
            dataclasses.replace(each, stop=Stop(StopCode.RECALL, why.get(each.action.job, BACK)))
            if each.action.job in back and each.stop is None
            else each
            for each in outcomes
        )
        if self._cloud is not None:
            outcomes += self._order(self._cloud, cloud_actions(plan, known, runs), plan, state.jobs)
        return outcomes

    def _order(
        self, cloud: Burst, wanted: Sequence[CloudAction], plan: Plan, jobs: Sequence[Job]
    ) -> tuple[Outcome, ...]:
        """Place orders one by one, because each is in the ledger before the next one is checked against the budgets."""
        accounts = {job.id: job.account for job in jobs}
        outcomes: tuple[Outcome, ...] = ()
        for action in wanted:
            if isinstance(action, BurstJob):
                account = accounts[action.job]
                lines = self._rules.dollars(account, self._clock.now_s())
                if exceeded := within(lines, {action.job: (account, plan.bursts[action.job])}):
                    text = f"{exceeded[0]} does not allow {dollars(action.usd)} any more"
                    outcomes += (Outcome(action, Progress.FAILED, text),)
                    continue
            outcomes += tuple(cloud.apply((action,)))
        return outcomes

    def _decide(self, state: ClusterState, cloud: CloudState | None, now_s: float, observe_seconds: float) -> None:
        """Decide a round and save it, unless only the time has changed since the last one. Raises RoundFailed."""
        if self._next is not None:
            (self._policy, self._choice), self._next, self._decided = self._next, None, None
        snapshot = self._snapshot(state, cloud, now_s)
        if self._only_time_has_changed(snapshot):
            return
        self._log_doubts(snapshot)
        started = time.perf_counter()
        snapshot, plan, noted = self._accepted(snapshot, self._policy.decide(snapshot))
        if wrong := broken(snapshot, plan):
            raise RoundFailed(
                f"policy {self._choice} made an invalid plan: {'; '.join(wrong)}; please report this as a bug"
            )
        seconds = {"observe": observe_seconds, "decide": time.perf_counter() - started}
        record = RoundRecord(snapshot, self._choice, plan, seconds, noted, self._outcomes.stopping(state))
        self._store.save_round(record)
        self._outcomes.decided(plan, record.stopping)
        self._round, self._plan, self._decided = snapshot.round, plan, snapshot
        self._moves = charged(snapshot, plan)
        self._submitted_s = {job.id: job.submit_s for job in snapshot.jobs}
        if log.isEnabledFor(logging.INFO):
            log.info(
                "round",
                extra={
                    "round": snapshot.round,
                    "jobs": len(snapshot.jobs),
                    "placed": len(plan.assignments),
                    "waiting": len(plan.waiting),
                    "decide_s": round(seconds["decide"], 3),
                }
                | ({"status": plan.solve.status.value, "gap": round(plan.solve.gap, 6)} if plan.solve else {}),
            )
        with suppress(_ListenerFailed):
            self._tell(lambda listener: listener.decided(record))

    def _log_doubts(self, snapshot: Snapshot) -> None:
        """Log each claim of a job that does not hold, once."""
        before = self._decided.facts if self._decided is not None else {}
        for job in snapshot.jobs:
            for doubt in snapshot.facts[job.id].doubts:
                if job.id not in before or doubt not in before[job.id].doubts:
                    log.warning("a claim does not hold", extra={"job": job.id, "user": job.user, "text": doubt})

    def _accepted(self, snapshot: Snapshot, plan: Plan) -> tuple[Snapshot, Plan, GateRecord]:
        """The plan if the gate lets it pass, or else one in which every running job keeps what it has; and its snapshot."""
        if self.gate is None:
            return snapshot, plan, GateRecord()
        refused = self.gate.judge(snapshot, plan)
        stops = self.gate.stops(snapshot, plan) if refused else {}
        if refused:
            log.error("plan refused", extra={"round": snapshot.round, "text": "; ".join(refused)})
            snapshot = dataclasses.replace(snapshot, kept=self.gate.kept(refused))
            plan = self._policy.decide(snapshot)
        else:
            plan = self.gate.approved(snapshot, plan)
        self.gate.accepted(snapshot, plan)
        return snapshot, plan, self.gate.note(refused, stops)

    def _snapshot(self, state: ClusterState, cloud: CloudState | None, now_s: float) -> Snapshot:
        """All that the policy may know, with the site's rules applied."""
        types = {node.gpu_type for node in state.nodes}
        if cloud is not None:
            types |= {offer.gpu_type for offer in cloud.offers}
        known = self._models.facts(state.jobs, types)
        jobs = tuple(
            job
            if job.phase is Phase.RUNNING or (target := self._target(job)) == job.target
            else dataclasses.replace(job, target=target)
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
            facts={
                job: believed(facts.with_attained(attained))
                if (attained := self._gpu_seconds.attained.get(job))
                else facts
                for job, facts in known.items()
            },
            refused=state.refused,
            limits=state.limits,
            ended_gpu_s={job: attained for job, attained in self._gpu_seconds.attained.items() if job not in known},
            cloud=cloud,
            sharing=sharing,
            partitions=state.partitions,
            idle_since_s=self._idle_since_s,
            unseen=state.unseen,
            moves=None if (share := self._share_of_moves) is None else MoveBudget(share, self._moves),
            no_gain="" if self.gate is None else self.gate.lost.text,
        )
        snapshot = self._rules.on(snapshot)
        for annotator in self._annotators:
            snapshot = annotator.on(snapshot)
        return snapshot

    @property
    def _share_of_moves(self) -> float | None:
        return self._move_share if self.gate is None else self.gate.settings.move_share

    def _only_time_has_changed(self, snapshot: Snapshot) -> bool:
        last = self._decided
        if last is None or not 0 <= snapshot.time_s - last.time_s < self._rest_s:
            return False
        if snapshot.sharing is not None:
            return False  # the agents measure something new in every time slice
        same = {name: getattr(last, name) for name in ("round", "time_s", "facts", "ended_gpu_s")}
        return (
            dataclasses.replace(snapshot, **same) == last
            and snapshot.facts.keys() == last.facts.keys()
            and all(facts.differs_by_time_only(last.facts[job]) for job, facts in snapshot.facts.items())
        )

    def _target(self, job: Job) -> Placement | None:
        assignment = self._plan.assignments.get(job.id) if self._plan else None
        return assignment.placement if assignment and not self._has_come_since(job) else None

    def _has_come_since(self, job: Job) -> bool:
        """Whether the plan means another job that had this job's id."""
        return is_another(job, self._submitted_s.get(job.id))


def _starts_under_way(outcomes: Sequence[Outcome]) -> dict[JobId, Placement]:
    """Job -> its placement, of jobs that were sent to the cluster and do not run yet."""
    under_way = (outcome.action for outcome in outcomes if outcome.progress is Progress.UNDER_WAY)
    return {action.job: action.placement for action in under_way if isinstance(action, Start)}
