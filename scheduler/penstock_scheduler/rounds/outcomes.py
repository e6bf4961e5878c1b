"""Writes the outcome of each action once, to the log and to the store's history."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from penstock_scheduler.api.ports import Store
from penstock_scheduler.model import (
    BurstJob,
    ClusterState,
    JobId,
    Outcome,
    Phase,
    Placement,
    Plan,
    Progress,
    Start,
    Stop,
)
from penstock_scheduler.model.records import RoundRecord

ABSENT_S = 600.0
"""For how long the reason of a stop is kept while its job is out of sight."""

log = logging.getLogger(__name__)


class OutcomeLog:
    """Logs and stores each outcome once, although every tick repeats it until the action is done.

    A job may take minutes to leave. Later rounds send it elsewhere without another reason, so the reason of the round that
    stopped it is carried along, from one round's record to the next one's.

    Args:
        last: the newest saved round; None: there is none.
    """

    def __init__(self, store: Store, last: RoundRecord | None = None) -> None:
        self._store = store
        self._told: dict[tuple[JobId, str], Outcome] = {}
        """(job, kind of action) -> newest outcome. The cluster and the cloud may both act for one job."""
        self._stopping: dict[JobId, Stop] = dict(last.stopping) if last is not None else {}
        """Stops under way that rounds before the newest one decided."""
        self._decided: Mapping[JobId, Stop] = last.plan.stops if last is not None else {}
        """The stops of the newest round."""
        self._absent_since_s: dict[JobId, float] = {}
        """Jobs out of sight with a stop under way."""
        self._own: dict[JobId, Stop] = {}
        """Stops of the newest tick that no round decided."""

    def stopping(self, state: ClusterState) -> dict[JobId, Stop]:
        """Why runs are stopped that rounds so far have stopped and that have not left their GPUs, as far as this state shows.

        A job that is out of sight may still be leaving.
        """
        elsewhere = {job.id for job in state.jobs if job.phase is not Phase.STOPPING}
        elsewhere |= {each.job.id for each in state.waiting}
        return {job: stop for job, stop in {**self._stopping, **self._decided}.items() if job not in elsewhere}

    def decided(self, plan: Plan, stopping: Mapping[JobId, Stop]) -> None:
        """A round was saved, with what `stopping` returned for its state. To be called before its actions."""
        self._stopping, self._decided = dict(stopping), plan.stops

    def record(self, plan: Plan, state: ClusterState, outcomes: Sequence[Outcome], now_s: float) -> dict[JobId, Stop]:
        """Log and store what is new among the outcomes of a tick. Returns the new stops that no round decided.

        An action that was under way, and that its job no longer needs, is done.

        Args:
            plan: the plan that the actions belong to.
            state: the cluster before the actions of this tick.
            outcomes: what became of these actions.
            now_s: the time.

        Raises:
            StoreError: the history cannot be written.
        """
        busy = {outcome.action.job for outcome in outcomes}
        news = [
            outcome for outcome in (*self._done(state, busy), *outcomes) if self._told.get(_key(outcome)) != outcome
        ]
        self._told = {_key(outcome): outcome for outcome in outcomes}
        if not news:
            self._own = {job: stop for job, stop in self._own.items() if job in busy}
            return {}
        self._carry(self.stopping(state), state, now_s)
        self._decided = plan.stops
        stops = {**self._stopping, **plan.stops}
        news = [
            each
            if isinstance(each.action, Start | BurstJob)
            else replace(each, stop=stops.get(each.action.job) or each.stop)
            for each in news
        ]
        self._store.add_outcomes(now_s, news)
        held = {job.id: job.allocation for job in state.jobs}
        for outcome in news:
            _log(outcome, plan, held.get(outcome.action.job))
        before, self._own = (
            self._own,
            {each.action.job: each.stop for each in outcomes if each.stop is not None and each.action.job not in stops},
        )
        return {job: stop for job, stop in self._own.items() if before.get(job) != stop}

    def _done(self, state: ClusterState, busy: Set[JobId]) -> Iterator[Outcome]:
        """The actions under way that their jobs no longer need."""
        awaited = {job for job, _ in self._told} - busy
        arrived = {job.id for job in state.jobs if job.id in awaited and job.phase in (Phase.RUNNING, Phase.QUEUED)}
        for (job, _), told in self._told.items():
            if job in arrived and told.progress is Progress.UNDER_WAY:
                yield Outcome(told.action, Progress.DONE)

    def _carry(self, stopping: Mapping[JobId, Stop], state: ClusterState, now_s: float) -> None:
        """Keep these stops, but for jobs that have been out of sight for long."""
        there = {job.id for job in state.jobs}
        self._absent_since_s = {job: self._absent_since_s.get(job, now_s) for job in stopping.keys() - there}
        self._stopping = {
            job: stop for job, stop in stopping.items() if now_s - self._absent_since_s.get(job, now_s) < ABSENT_S
        }


def _key(outcome: Outcome) -> tuple[JobId, str]:
    return outcome.action.job, outcome.action.kind


def _log(outcome: Outcome, plan: Plan, held: Placement | None) -> None:
    level = logging.WARNING if outcome.progress is Progress.FAILED else logging.INFO
    if not log.isEnabledFor(level):
        return
    action = outcome.action
    extra = {
        "round": action.round,
        "job": action.job,
        "action": action.kind,
        "placement": str(getattr(action, "placement", "none")),
        "cause": _cause(plan, action.job, held),
        "progress": outcome.progress.value,
        "text": outcome.text,
        "stop": str(outcome.stop or ""),
    }
    log.log(level, "action", extra=extra)


def _cause(plan: Plan, job: JobId, held: Placement | None) -> str:
    """Why there is anything to do: what the job holds, and the plan's reason for something else."""
    given = plan.assignments.get(job)
    reason = plan.waiting.get(job) if given is None else given.reason
    return f"holds {held or 'nothing'}: {reason.text if reason is not None else 'the plan has changed'}"
