"""Plays what may happen next, with the policy that decides.

A future begins with a recorded round. From there on the policy decides again and again, and jobs do as much work as their models
say. What nobody knows is drawn at random: how much work jobs have left, and which jobs will be submitted. Jobs start where a plan
puts them as soon as the GPUs are free; a start, or a move, costs the restart cost that the round has of the job.

What does not change in a future: the nodes, what plain jobs hold, limits and budgets. The cloud and shared GPUs are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock_scheduler.api.ports import Policy
from penstock_scheduler.model import Job, JobFacts, JobId, Phase, Placement, Plan, Snapshot
from penstock_scheduler.people.errors import RoundFailed
from penstock_scheduler.rounds.policies.common import rate
from penstock_scheduler.simulator.estimates.past import Past, PastJob

HORIZON_S = 3 * 86_400.0
"""How far a future goes."""

GAP_S = 30.0
"""Least time between two rounds of a future, for policies that decide periodically."""

SOON = 0.01
"""The same as a share of the time since its beginning: what happens in a day need not be known to the minute. It is small,
because GPUs that become free in between stay idle until the round."""

QUIET = 0.1
"""Most time between two rounds in which no job comes or ends, as the same share."""

OFF = 0.2
"""Standard deviation of the logarithm of the factor by which a job's known remaining work, or its speed, is off."""

DAY_S = 86_400.0


@dataclass(slots=True)
class Played:
    """What happens to a job in a future. Times are in s since 1970; infinite: after the end of the future."""

    start_s: float = math.inf
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Future:
    """What happens to each job of a round, as far as it was played."""

    jobs: dict[JobId, Played]
    until_s: float
    """Until when it was played: s since 1970, infinite if all that was asked for happens in it."""


@dataclass(slots=True)
class _Job:
    """A job in a future."""

    job: Job
    facts: JobFacts
    left: float
    """Work left: in the unit of its goodput times seconds or, if `by_gpus`, in GPU-seconds."""
    by_gpus: bool
    off: float = 1.0
    """What is left, relative to what the policy believes."""
    attained: dict[str, float] | None = None
    held: Placement | None = None
    since_s: float = 0.0
    """Since when it holds these."""
    ready_s: float = 0.0
    rate: float = 0.0
    end_s: float = math.inf

    def shown(self, now_s: float) -> tuple[Job, JobFacts]:
        """As a round sees it."""
        if self.held is None:
            return self.job, self.facts
        phase = Phase.STARTING if now_s < self.ready_s else Phase.RUNNING
        if self.job.phase is not phase:
            self.job = replace(self.job, phase=phase, target=self.held if phase is Phase.STARTING else None)
        attained = dict(self.attained or {})
        gpu_type = self.held.gpu_type
        attained[gpu_type] = attained.get(gpu_type, 0.0) + self.held.gpus * (now_s - self.since_s)
        facts = self.facts.with_attained(attained)
        if facts.remaining_work is not None:
            believed = max(self.left - self.rate * max(now_s - self.ready_s, 0.0), 0.0) / self.off
            facts = replace(facts, remaining_work=believed)
        return self.job, facts

    def leave(self, now_s: float) -> None:
        """Give its GPUs back. A job that does not save loses the work of this run."""
        assert self.held is not None, "it holds some"
        done = self.rate * max(now_s - self.ready_s, 0.0)
        if self.facts.saves:
            self.left = max(self.left - done, 0.0)
        attained = dict(self.attained or {})
        gpu_type = self.held.gpu_type
        attained[gpu_type] = attained.get(gpu_type, 0.0) + self.held.gpus * (now_s - self.since_s)
        self.attained = attained
        known = None if self.facts.remaining_work is None else self.left / self.off
        self.facts = replace(self.facts.with_attained(attained), remaining_work=known)
        self.held, self.end_s = None, math.inf
        self.job = replace(self.job, phase=Phase.QUEUED, allocation=None, target=None, restarts=self.job.restarts + 1)

    def take(self, where: Placement, now_s: float, pause_s: float) -> None:
        """Take GPUs. `pause_s`: until it works there."""
        self.held, self.since_s, self.ready_s = where, now_s, now_s + pause_s
        speed = float(where.gpus) if self.by_gpus else rate(self.facts.model, where.configuration)
        self.rate = speed if math.isfinite(speed) else 0.0
        self.end_s = self.ready_s + self.left / self.rate if self.rate > 0 else math.inf
        phase = Phase.STARTING if pause_s > 0 else Phase.RUNNING
        target = where if pause_s > 0 else None
        self.job = replace(self.job, phase=phase, allocation=where, target=target)


Facts = Callable[[Sequence[Job]], Mapping[JobId, JobFacts]]
"""What is known of jobs that were never seen in a round."""


def play(
    snapshot: Snapshot,
    plan: Plan,
    policy: Policy,
    past: Past,
    facts: Facts,
    draw: np.random.Generator,
    *,
    by_events: bool = False,
    horizon_s: float = HORIZON_S,
    expired: Callable[[], bool] = lambda: False,
    until_start: JobId | None = None,
) -> Future:
    """Play one future.

    Args:
        snapshot: of a round.
        plan: of the same round.
        policy: decides the rounds to come.
        past: for the lengths of jobs, and for the jobs that will come.
        facts: for the jobs that will come.
        draw: for what nobody knows.
        by_events: whether the policy decides the same as long as no job comes or ends.
        horizon_s: where the future ends.
        expired: whether to end the future now.
        until_start: end the future when this job starts; None: when all jobs of the round have ended.
    """
    snapshot = replace(snapshot, cloud=None, sharing=None, kept=None, incumbent={})
    begin_s = snapshot.time_s
    live = {job.id: _present(job, snapshot.facts[job.id], past, draw) for job in snapshot.jobs}
    played = {job: Played() for job in live}
    wanted = set(live)
    coming = _coming(past, snapshot, facts, draw, horizon_s)
    now_s, number = begin_s, snapshot.round
    while True:
        _apply(plan, live, now_s, played)
        if until_start is not None and math.isfinite(played[until_start].start_s):
            return Future(played, math.inf)
        played_s = now_s - begin_s
        next_s = min((each.end_s for each in live.values()), default=math.inf)
        if coming:
            next_s = min(next_s, coming[-1].job.submit_s)
        if not by_events:
            next_s = min(next_s, now_s + max(GAP_S, QUIET * played_s))
        before_s, now_s = now_s, max(next_s, now_s + max(0.0 if by_events else GAP_S, SOON * played_s))
        if expired():
            return Future(played, before_s)
        if now_s - begin_s > horizon_s:
            return Future(played, begin_s + horizon_s)
        wanted.difference_update(_take_ended(live, now_s, played))
        if not wanted:
            return Future(played, math.inf)
        while coming and coming[-1].job.submit_s <= now_s:
            new = coming.pop()
            live[new.job.id] = new
        number += 1
        shown = [each.shown(now_s) for each in live.values()]
        snapshot = replace(
            snapshot,
            round=number,
            time_s=now_s,
            jobs=tuple(job for job, _ in shown),
            facts={job.id: known for job, known in shown},
        )
        try:
            plan = policy.decide(snapshot)
        except RoundFailed:
            return Future(played, now_s)


def _take_ended(live: dict[JobId, _Job], now_s: float, played: Mapping[JobId, Played]) -> list[JobId]:
    """Take the jobs that have ended by now out of `live`."""
    ended = [job_id for job_id, each in live.items() if each.end_s <= now_s]
    for job_id in ended:
        end_s = live.pop(job_id).end_s
        if job_id in played:
            played[job_id].end_s = end_s
    return ended


def _present(job: Job, facts: JobFacts, past: Past, draw: np.random.Generator) -> _Job:
    """A job of the round, with what it may have left."""
    attained = facts.attained_gpu_s
    if facts.remaining_work is not None:
        off = math.exp(OFF * draw.standard_normal())
        found = _Job(job, facts, facts.remaining_work * off, by_gpus=False, off=off, attained=attained)
    elif facts.likely_work:
        left = float(draw.choice(np.asarray(facts.likely_work)))
        found = _Job(job, facts, left, by_gpus=False, attained=attained)
    else:
        left = _left_gpu_s(job, sum(attained.values()), past, draw)
        found = _Job(job, facts, left, by_gpus=True, attained=attained)
    if job.allocation is not None and job.phase is not Phase.QUEUED:
        starting = job.phase is Phase.STARTING
        found.take(job.allocation, past.now_s, facts.restart_cost_s if starting else 0.0)
    return found


def _left_gpu_s(job: Job, attained_gpu_s: float, past: Past, draw: np.random.Generator) -> float:
    """GPU-seconds that a job of unknown work may still need, within its time limit."""
    age_s = attained_gpu_s / job.spec.max_gpus
    length_s = past.length_s(job, age_s, draw)
    if job.time_limit_s is not None:
        length_s = min(length_s, max(job.time_limit_s, age_s))
    return max(length_s - age_s, 1.0) * job.spec.max_gpus


def _coming(past: Past, snapshot: Snapshot, facts: Facts, draw: np.random.Generator, horizon_s: float) -> list[_Job]:
    """Jobs that may be submitted, the last first: those that came since some earlier time, as if that time were now.

    The earlier time is a whole number of days ago, because sites have nights and weekends, give or take an hour.
    """
    if not past.submitted:
        return []
    known_s = snapshot.time_s - past.submitted[0].job.submit_s
    days = max(int(known_s // DAY_S), 0)  # a clock that was set back makes jobs younger than now
    back_s = float(draw.integers(1, days + 1)) * DAY_S if days else known_s
    back_s = min(max(back_s + float(draw.uniform(-3600.0, 3600.0)), 3600.0), max(known_s, 3600.0))
    found: list[_Job] = []
    again = 0
    copies = [each for each in past.submitted if snapshot.time_s - back_s <= each.job.submit_s < snapshot.time_s]
    while copies and again * back_s < horizon_s:
        jobs = [_copy(each, (again + 1) * back_s, f"{each.job.id}+{again}") for each in copies]
        known = facts(jobs)
        for each, job in zip(copies, jobs, strict=True):
            if job.submit_s - snapshot.time_s > horizon_s:
                break
            gpu_s = each.gpu_seconds
            if each.end_s is None:
                gpu_s += _left_gpu_s(each.job, gpu_s, past, draw)
            found.append(_Job(job, known[job.id], max(gpu_s, 1.0), by_gpus=True))
        again += 1
    return found[::-1]


def _copy(past: PastJob, later_s: float, name: str) -> Job:
    return replace(
        past.job,
        id=name,
        phase=Phase.QUEUED,
        allocation=None,
        target=None,
        restarts=0,
        submit_s=past.job.submit_s + later_s,
    )


def _apply(plan: Plan, live: Mapping[JobId, _Job], now_s: float, played: Mapping[JobId, Played]) -> None:
    """Let jobs leave and start as the plan says."""
    moving: list[tuple[_Job, Placement | None]] = []
    for job_id, each in live.items():
        assignment = plan.assignments.get(job_id)
        where = None if assignment is None else assignment.placement
        if each.held is not None and (where is None or not where.suits(each.held)):
            each.leave(now_s)
            moving.append((each, where))
        elif each.held is None and where is not None:
            moving.append((each, where))
    for each, where in moving:
        if where is not None:
            # Earlier jobs had their GPUs while they started, so that a length from the past includes one start.
            first = each.by_gpus and not each.attained
            each.take(where, now_s, 0.0 if first else each.facts.restart_cost_s)
            if (its := played.get(each.job.id)) is not None:
                its.start_s = min(its.start_s, now_s)
