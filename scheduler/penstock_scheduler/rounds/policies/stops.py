"""Which running jobs a plan stops, and why. No reason, no stop: `staying` keeps a job that a plan stops for no reason.

A plan *stops* a job if the job runs in the snapshot, and the plan gives it nothing, another number of GPUs or another place, or
recalls it from the cloud. A policy puts the reasons that only it knows into `Plan.stops`. The other reasons follow from the
snapshot and the plan: `with_reasons` finds the first of these that applies.

1. A node asks the job to leave: a drain or a reservation.
2. A budget is used up; the trials of its search are ranked lower; it is measured on another type.
3. Its job spec, or the rules of its partition, no longer allow what it has.
4. It leaves GPUs that it shares with other jobs.
5. It trains faster on what it gets, enough to make up for the restart soon.
6. It holds more than a limit allows.
7. Another job gets its GPUs: on one of its nodes, or else of its GPU type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from penstock_profiles.matrix import goodputs
from penstock_scheduler.model import (
    GpuLimit,
    Job,
    JobId,
    Node,
    Phase,
    Placement,
    Plan,
    ReasonCode,
    Snapshot,
    Stop,
    StopCode,
)
from penstock_scheduler.people.units import times
from penstock_scheduler.rounds.policies import common

BY_REASON = {
    ReasonCode.GPU_BUDGET: StopCode.LIMIT,
    ReasonCode.STOPPED_BY_GROUP: StopCode.TRIALS,
    ReasonCode.MEASURING: StopCode.MEASURING,
}
"""Reasons of a plan that are also reasons to stop a job."""

LEAST_GAIN = 0.05
"""Part of its speed that a job gains at least where it is moved for its own sake. Models of speed are not more accurate."""

PAYS_WITHIN_S = 3600.0
"""A job is moved for its own sake only if it makes up for the restart in this time."""


def least_gain(restart_cost_s: float) -> float:
    """The factor by which a move for its own sake must make a job faster: at least 1 + `LEAST_GAIN`.

    `restart_cost_s` has the time that the job's new nodes take to boot, too.
    """
    return 1 + max(LEAST_GAIN, restart_cost_s / PAYS_WITHIN_S)


def stopped(snapshot: Snapshot, plan: Plan) -> tuple[Job, ...]:
    """The running jobs that this plan stops, in the order of the snapshot."""
    away = {run.job: run for run in snapshot.cloud.runs} if snapshot.cloud is not None else {}
    found = []
    for job in snapshot.jobs:
        if job.phase is not Phase.RUNNING and job.id not in away:
            continue
        held, given = job.running_on, plan.assignments.get(job.id)
        if job.id in away:
            if job.id in plan.recalls and not away[job.id].ending:
                found.append(job)
        elif held is not None and (job.id in plan.waiting if given is None else not given.placement.suits(held)):
            found.append(job)
    return tuple(found)


def with_reasons(snapshot: Snapshot, plan: Plan, jobs: Sequence[Job] | None = None) -> Plan:
    """The plan with a reason for each stop as far as there is one, and with no other reasons. `jobs`: `stopped`, if known."""
    if jobs is None:
        jobs = stopped(snapshot, plan)
    if not jobs and not plan.stops:
        return plan
    finder = _Reasons(snapshot, plan, jobs)
    found = {job.id: plan.stops.get(job.id) or finder.of(job) for job in jobs}
    return dataclasses.replace(plan, stops={job: stop for job, stop in found.items() if stop is not None})


class _Reasons:
    """Finds the reasons for the stops of one plan."""

    def __init__(self, snapshot: Snapshot, plan: Plan, jobs: Sequence[Job]) -> None:
        self._snapshot = snapshot
        self._plan = plan
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._gains: dict[str, list[tuple[bool, JobId]]] = {}
        """Node -> jobs that get more of its GPUs; first those that start."""
        self._type_gains: dict[str, list[tuple[bool, JobId]]] = {}
        """GPU type -> jobs that get more GPUs of it."""
        self._over = [limit for limit in snapshot.limits if _held(snapshot.jobs, limit) > limit.gpus]
        self._sharing = {
            job: group for group in (snapshot.sharing.groups if snapshot.sharing else ()) for job in group.jobs
        }
        for job in snapshot.jobs:
            self._count(job)
        self._before = _rates(snapshot, jobs)
        """Goodput of each of `jobs` where it runs; 0 if that is not a number."""

    def _count(self, job: Job) -> None:
        given = self._plan.assignments.get(job.id)
        held = job.allocation if job.phase is not Phase.QUEUED else None
        if given is None or given.placement is held:
            return
        before = {share.node: share.gpus for share in held.shares} if held is not None else {}
        entry = (held is not None, job.id)
        for share in given.placement.shares:
            if share.gpus > before.get(share.node, 0):
                self._gains.setdefault(share.node, []).append(entry)
        gpu_type = given.placement.gpu_type
        if given.placement.gpus > (held.gpus if held is not None and held.gpu_type == gpu_type else 0):
            self._type_gains.setdefault(gpu_type, []).append(entry)

    def of(self, job: Job) -> Stop | None:
        """Why the plan stops this job; None: nothing tells."""
        if job.id in self._plan.recalls:
            return Stop(StopCode.RECALL, self._plan.recalls[job.id].text)
        held = job.running_on
        assert held is not None, "a stopped job runs"
        return (
            self._asked_to_leave(job, held)
            or self._by_reason(job)
            or self._not_allowed(job, held)
            or self._leaves_sharing(job, held)
            or self._gain(job, held)
            or self._over_limit(job, held)
            or self._preempted(job, held)
        )

    def _asked_to_leave(self, job: Job, held: Placement) -> Stop | None:
        for node in self._there(held):
            if (request := node.leave_request(job.reservation)) is not None:
                code = StopCode(request.cause.value)
                who = f" ({request.text})" if request.text else ""
                return Stop(code, f"node {node.name} asks its jobs to leave: {code.value}{who}", by_s=request.by_s)
        return None

    def _by_reason(self, job: Job) -> Stop | None:
        given = self._plan.assignments.get(job.id)
        reason = self._plan.waiting[job.id] if given is None else given.reason
        code = BY_REASON.get(reason.code)
        return None if code is None else Stop(code, reason.text)

    def _not_allowed(self, job: Job, held: Placement) -> Stop | None:
        if common.allowed(job, held.configuration):
            return None
        return Stop(StopCode.ASKED, f"its job spec, or a rule of its partition, no longer allows {held.configuration}")

    def _leaves_sharing(self, job: Job, held: Placement) -> Stop | None:
        group = self._sharing.get(job.id)
        if group is None:
            return None
        text = f"it leaves the GPUs that it shares on node {held.nodes[0]}"
        now = self._plan.sharing()
        joined = (other for each in group.jobs if each in now for other in now[each].jobs if other not in group.jobs)
        if job.id in self._plan.assignments or (other := min(joined, default=None)) is None:
            return Stop(StopCode.SHARING, text)
        before = self._before[job.id]
        return Stop(StopCode.PREEMPTED, f"{text}, and job {other} shares them instead", before, 0.0, other)

    def _gain(self, job: Job, held: Placement) -> Stop | None:
        given = self._plan.assignments.get(job.id)
        before = self._before[job.id]
        if given is None or not given.goodput > before:
            return None
        boot_s = max((node.boot_s for node in self._there(given.placement)), default=0.0)
        if given.goodput < before * least_gain(self._snapshot.facts[job.id].restart_cost_s + boot_s):
            return None
        faster = f"about {times(given.goodput / before)} as fast" if before > 0 else "it makes progress there"
        text = f"from {held.configuration} to {given.configuration}: {faster}"
        return Stop(StopCode.GAIN, text, before, given.goodput)

    def _over_limit(self, job: Job, held: Placement) -> Stop | None:
        limit = next((each for each in self._over if each.covers(job) and each.counts(held.gpu_type)), None)
        return None if limit is None else Stop(StopCode.LIMIT, f"{limit} does not allow the GPUs that it has")

    def _preempted(self, job: Job, held: Placement) -> Stop | None:
        before = self._before[job.id]
        given = self._plan.assignments.get(job.id)
        after = given.goodput if given is not None else 0.0
        for name in held.nodes:
            if (other := _first(self._gains.get(name, ()), job.id)) is not None:
                return Stop(StopCode.PREEMPTED, f"makes room for job {other} on node {name}", before, after, other)
        for node in self._there(held):
            if node.set_aside_for:
                text = f"makes room for job {node.set_aside_for}, which Penstock does not manage"
                return Stop(StopCode.PREEMPTED, f"{text}, on node {node.name}", before, after)
        if (other := _first(self._type_gains.get(held.gpu_type, ()), job.id)) is not None:
            text = f"makes room for job {other}, which gets more {held.gpu_type} GPUs"
            return Stop(StopCode.PREEMPTED, text, before, after, other)
        return None

    def _there(self, held: Placement) -> list[Node]:
        return [self._nodes[name] for name in held.nodes if name in self._nodes]


def _rates(snapshot: Snapshot, jobs: Sequence[Job]) -> dict[JobId, float]:
    """Goodput of these jobs where they run, all in one pass: a round may stop thousands."""
    on = [(job.id, held.configuration) for job in jobs if (held := job.running_on) is not None]
    goodput_J = goodputs([snapshot.facts[job].model for job, _ in on], common.columns([each for _, each in on]))
    return {job: each if math.isfinite(each) else 0.0 for (job, _), each in zip(on, goodput_J.tolist(), strict=True)}


def _first(gains: Iterable[tuple[bool, JobId]], but: JobId) -> JobId | None:
    """The first of these jobs, those that start before those that run already."""
    return min((entry for entry in gains if entry[1] != but), default=(False, None))[1]


def _held(jobs: Iterable[Job], limit: GpuLimit) -> int:
    """GPUs that running jobs hold and that count against the limit."""
    running = ((job, held) for job in jobs if (held := job.running_on) is not None)
    return sum(held.gpus for job, held in running if limit.covers(job) and limit.counts(held.gpu_type))
