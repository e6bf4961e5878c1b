"""One decision of a queue: the jobs in the queue's order, and what each gets; see `queues`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

from penstock_profiles.estimators import AnyEstimator
from penstock_scheduler.model import (
    Assignment,
    Configuration,
    Job,
    JobId,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
)
from penstock_scheduler.rounds.free_gpus import FreeGpus, Timeline
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.never_fits import never_fits

SOONEST_END_S = 60.0
"""A job that has run longer than estimated is expected to end in this many seconds, Slurm's default `bf_resolution`."""


Backfill = Literal["none", "easy", "out-of-order"]
"""Which jobs may start behind one that does not fit: none, those that do not delay it, or all."""


class QueuePolicy(ABC):
    """What all queues share; see `queues`. From one round to the next, a queue only caches what has not changed."""

    name = ""
    preempts = False
    reservations = 1
    """With `easy`: the most jobs for which GPUs are reserved."""
    window_s = math.inf

    def __init__(self, backfill: Backfill) -> None:
        self._backfill = backfill
        self._requests = common.Requests()
        self._kept: dict[JobId, tuple[AnyEstimator, Assignment]] = {}
        self._free: FreeGpus | None = None

    def decide(self, snapshot: Snapshot) -> Plan:
        """Keep running jobs, and start the next ones."""
        self._free = FreeGpus(snapshot.nodes, snapshot.limits, self._free)
        requests = self._requests.of(snapshot)
        return QueueRound(self, snapshot, self._free, requests, self._backfill).plan(self._kept)

    @abstractmethod
    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """The sort key of a job; the smallest comes first."""

    def seconds(self, snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float:
        """Seconds for which the job will hold this configuration from now on; `inf`: unknown."""
        left_s = common.remaining_s(snapshot, job, option, goodput)
        return math.inf if left_s is None else max(left_s, SOONEST_END_S)


class QueueRound:
    """One decision of a queue."""

    def __init__(
        self,
        queue: QueuePolicy,
        snapshot: Snapshot,
        free: FreeGpus,
        requests: Mapping[JobId, common.Request],
        backfill: Backfill,
    ) -> None:
        self._queue = queue
        self._snapshot = snapshot
        self._requests = requests
        self._backfill = backfill
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._pins = common.pinned(snapshot)
        self._free = free
        self._given: dict[JobId, Placement] = {}
        self._why: dict[JobId, Reason] = {}
        self._waiting: dict[JobId, Reason] = {}
        self._timeline: Timeline | None = None
        self._reserved = 0
        for job_id, placement in self._pins.items():
            self._take(self._jobs[job_id], placement)
        for job in snapshot.jobs:
            if job.id not in self._pins and (held := job.running_on) is not None and self._free.may_stay(held):
                self._take(job, held)

    def plan(self, kept: dict[JobId, tuple[AnyEstimator, Assignment]]) -> Plan:
        """Serve the queue. `kept`: assignments of the last round, which are used again where nothing changed."""
        ranked = [
            (
                self._queue.rank(self._snapshot, job, self._requests[job.id]),
                job.id not in self._given,
                *job.in_order,
            )
            for job in self._snapshot.jobs
            if job.id not in self._pins
        ]
        order = [self._jobs[job_id] for *_, job_id in sorted(ranked)]
        first_without: Job | None = None
        for position, job in enumerate(order):
            if job.id in self._given:
                continue
            request, refused = self._free.allowance.within(job, self._requests[job.id])
            if not self._requests[job.id]:
                self._waiting[job.id] = never_fits(job, self._snapshot.nodes)
            elif refused:
                self._wait(job, refused)
            elif first_without is not None and self._backfill == "none":
                self._wait(job, f"job {first_without.id} is before it in the queue")
            elif first_without is not None and self._backfill == "easy":
                self._pass(job, request, first_without)
            elif (found := self._free.find(job, request)) is not None:
                first = (
                    "first in the queue" if first_without is None else f"job {first_without.id} before it does not fit"
                )
                self._start(job, found, f"starts on {found.configuration}: {first}")
            elif not (self._queue.preempts and self._make_room(job, request, order[position + 1 :])):
                first_without = first_without or job
                self._reserve(job, request)
        return Plan(self._snapshot.round, self._assignments(kept), self._waiting)

    def _make_room(self, job: Job, request: common.Request, behind: list[Job]) -> bool:
        """Start a job on GPUs of running jobs, beginning with the last in the order. False if they are too few."""
        trial, leaving = self._free.copy(), []
        types = {option.gpu_type for option in request}
        for other in reversed(behind):
            held = self._given.get(other.id)
            if held is None or held.gpu_type not in types:
                continue
            trial.give_back(other, held)
            leaving.append(other)
            if (found := trial.find(job, request)) is not None:
                self._free = trial
                self._start(job, found, f"starts on {found.configuration}: first in the queue")
                for former in reversed(leaving):
                    held = self._given.pop(former.id)
                    if self._free.may_stay(held, former.request):  # on nodes that the job did not need
                        self._take(former, held)
                    else:
                        self._wait(former, f"makes room for job {job.id}, which is before it in the queue")
                return True
        return False

    def _reserve(self, job: Job, request: common.Request) -> None:
        """Let the job wait. With `easy`, reserve GPUs for it at the earliest known time."""
        text = f"waits for {next(iter(request)).gpus} free GPUs"
        if self._backfill != "easy":
            return self._wait(job, text)
        now_s = self._snapshot.time_s
        if self._timeline is None:
            ends = [(now_s + self._seconds(self._jobs[other]), where) for other, where in self._given.items()]
            self._timeline = Timeline(self._free, now_s, ends)
        slot = self._timeline.earliest(job, list(request), lambda option: self._lasts(job, option))
        if slot is None:
            self._reserved = -1
            return self._wait(job, f"{text}; it is unknown when they will be free")
        begin_s, until_s, where = slot
        if begin_s > now_s + self._queue.window_s:
            return self._wait(job, text, begin_s)
        self._timeline.reserve(begin_s, until_s, where)
        self._reserved += 1
        return self._wait(job, f"{text}: {where.configuration} is reserved for it", begin_s)

    def _pass(self, job: Job, request: common.Request, first: Job) -> None:
        """Start a job before an earlier one, if that delays no job with reserved GPUs."""
        if self._timeline is None or self._reserved < 0:
            return self._wait(job, f"job {first.id} is before it, and it is unknown when that job can start")
        slot = self._timeline.earliest(job, list(request), lambda option: self._lasts(job, option), now=True)
        if slot is not None:
            begin_s, until_s, where = slot
            self._timeline.reserve(begin_s, until_s, where)
            return self._start(job, where, f"starts on {where.configuration}, in a gap before job {first.id}")
        if self._reserved < self._queue.reservations:
            return self._reserve(job, request)
        return self._wait(job, f"it would delay job {first.id}, which is before it in the queue")

    def _start(self, job: Job, where: Placement, text: str) -> None:
        self._take(job, where)
        self._why[job.id] = Reason(ReasonCode.CHOSEN, text)

    def _take(self, job: Job, where: Placement) -> None:
        self._given[job.id] = where
        self._waiting.pop(job.id, None)
        self._free.take(job, where)

    def _wait(self, job: Job, text: str, start_s: float | None = None) -> None:
        # A job that was stopped in this round has its reason already.
        self._waiting.setdefault(job.id, Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job), start_s))

    def _seconds(self, job: Job) -> float:
        """How long a job will hold its GPUs."""
        return self._lasts(job, self._given[job.id].configuration)

    def _lasts(self, job: Job, option: Configuration) -> float:
        goodput = self._requests[job.id].get(option)
        if goodput is None:
            goodput = common.rate(self._snapshot.facts[job.id].model, option)
        return self._queue.seconds(self._snapshot, job, option, goodput)

    def _assignments(self, kept: dict[JobId, tuple[AnyEstimator, Assignment]]) -> dict[JobId, Assignment]:
        assignments: dict[JobId, Assignment] = {}
        for job in self._snapshot.jobs:
            if (where := self._given.get(job.id)) is None:
                continue
            model, last = self._snapshot.facts[job.id].model, kept.get(job.id)
            if job.id in self._pins:
                assignments[job.id] = common.pinned_assignment(job, where, self._snapshot)
            elif job.id in self._why:
                goodput = self._requests[job.id].get(where.configuration)
                assignments[job.id] = common.assign(job, where, self._why[job.id], self._snapshot, goodput)
            elif last is not None and last[0] is model and last[1].placement == where:
                assignments[job.id] = last[1]
            else:
                reason = Reason(ReasonCode.KEPT, f"keeps {where.configuration}")
                assignments[job.id] = common.assign(job, where, reason, self._snapshot)
        kept.clear()
        kept |= {
            job_id: (self._snapshot.facts[job_id].model, assignment)
            for job_id, assignment in assignments.items()
            if assignment.reason.code is ReasonCode.KEPT
        }
        return assignments
