"""Queues: each job gets exactly what it asks for, in some order. They are baselines for comparison, and what sites use today.

1. **Sort** the jobs by the policy's order.
2. **Start** each waiting job on its *request*: the most GPUs that it asks for and that exist, of its first GPU type that has
   enough free GPUs.
3. **Stop at the first job that does not fit.** All jobs behind it wait, unless backfill lets them start.

The orders:

- `fifo`: by submission.
- `srtf`: shortest remaining time first, by model and remaining work, or else by the time limit. Unknown times come last.
- `las`: least attained service first, in GPU-seconds, after Tiresias (Gu et al., NSDI '19). It needs no durations.
- `ftf`: finish-time fairness, after Themis (Mahajan et al., NSDI '20): the largest `rho` first. A job's fair share is the
  cluster divided by the number of jobs now (in Themis: by their average number). A job that asks for more than its share
  would be slowed down in proportion.
- `slurm-backfill`: Slurm's scheduler with its backfill plugin, for comparison; see `SlurmBackfill`.

`srtf`, `las` and `ftf` preempt: in each round, a job that does not fit takes GPUs from the jobs furthest behind it that may be
moved. A job is stopped only if another job gets its GPUs. The orders do not weigh the cost of a restart (`restart_cost_s`).
So `las` and `ftf` compare jobs in steps (`step_gpu_s`, `step_rho`), and small differences stop no job.

*EASY backfill* (Lifka, JSSPP '95) reserves GPUs for the first job that does not fit, at the earliest time at which enough GPUs
will be free. Jobs behind it may start if those GPUs are still free at that time. A job of unknown length takes no GPU that is
reserved for later. If the time is unknown, no job passes the first one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from penstock_profiles.estimators import AnyEstimator
from penstock_scheduler.free_gpus import Fit, FreeGpus, Timeline
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
from penstock_scheduler.policies import common

SOONEST_END_S = 60.0
"""A job that has run longer than estimated is expected to end in this many seconds, Slurm's default `bf_resolution`."""

SLURM_UNLIMITED_S = 365 * 86_400.0
"""Time limit that Slurm's backfill plugin assumes for a job that has none, seconds."""


class QueueSettings(BaseModel):
    """Sections `[policy.fifo]` and `[policy.srtf]` of the settings file. Other sections extend it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    backfill: Literal["none", "easy"] = Field(
        default="none", description="easy: later jobs start early if they do not delay the first job that waits."
    )
    fit: Fit = Field(default="best", description="Node for part of a node: the first with room, or the fullest.")


class LasSettings(QueueSettings):
    """Section `[policy.las]`."""

    step_gpu_s: NonNegativeFloat = Field(
        default=3600.0, description="Step in which GPU-seconds are compared; 0: exactly."
    )


class FtfSettings(QueueSettings):
    """Section `[policy.ftf]`."""

    step_rho: NonNegativeFloat = Field(default=0.1, description="Step in which rho is compared; 0: exactly.")


class SlurmBackfillSettings(BaseModel):
    """Section `[policy.slurm-backfill]`; the defaults are those of Slurm's SchedulerParameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fit: Fit = Field(default="best", description="Node for part of a node: the first with room, or the fullest.")
    max_jobs: PositiveInt = Field(default=500, description="Most waiting jobs with reserved GPUs: bf_max_job_test.")
    window_s: PositiveFloat = Field(default=86_400.0, description="How far ahead to plan, seconds: bf_window.")
    default_time_limit_s: PositiveFloat | None = Field(
        default=None,
        description="Time limit of jobs that have none: the partition's DefaultTime. null: a year, as in Slurm.",
    )


class _Queue(ABC):
    """What all queues share; see the module. From one round to the next, a queue only caches what has not changed."""

    name = ""
    preempts = False
    reservations = 1
    """With backfill: the most jobs for which GPUs are reserved."""
    window_s = math.inf

    def __init__(self, fit: Fit, *, backfill: bool) -> None:
        self._fit: Fit = fit
        self._backfill = backfill
        self._requests = common.Requests()
        self._kept: dict[JobId, tuple[AnyEstimator, Assignment]] = {}
        self._free: FreeGpus | None = None

    def decide(self, snapshot: Snapshot) -> Plan:
        """Keep running jobs, and start the next ones."""
        self._free = FreeGpus(snapshot.nodes, snapshot.limits, self._fit, self._free)
        requests = self._requests.of(snapshot)
        return _Round(self, snapshot, self._free, requests, self._backfill).plan(self._kept)

    @abstractmethod
    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """The sort key of a job; the smallest comes first."""

    def seconds(self, snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float:
        """Seconds for which the job will hold this configuration from now on; `inf`: unknown."""
        left_s = common.remaining_s(snapshot, job, option, goodput)
        return math.inf if left_s is None else max(left_s, SOONEST_END_S)


class Fifo(_Queue):
    """First in, first out; running jobs are not moved."""

    name = "fifo"

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings.fit, backfill=settings.backfill == "easy")
        self.front_only = settings.backfill == "none"
        """Whether only the free GPUs and the front of the queue, by (submission, id), matter. Running jobs stay, and all
        jobs behind the first one that does not fit wait, so a snapshot may leave both out."""

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """The same for all jobs, so age decides."""
        return 0.0


class Srtf(_Queue):
    """Shortest remaining time first."""

    name = "srtf"
    preempts = True

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings.fit, backfill=settings.backfill == "easy")

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """Remaining seconds where the job runs, or, if it does not run, on its preferred configuration."""
        left_s = common.remaining_s(snapshot, job, *_where(job, request))
        return math.inf if left_s is None else left_s


class Las(_Queue):
    """Least attained service first."""

    name = "las"
    preempts = True

    def __init__(self, settings: LasSettings) -> None:
        super().__init__(settings.fit, backfill=settings.backfill == "easy")
        self._step_gpu_s = settings.step_gpu_s

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """GPU-seconds so far."""
        return _in_steps(sum(snapshot.facts[job.id].attained_gpu_s.values()), self._step_gpu_s)


class Ftf(_Queue):
    """Least fairly treated first, by finish-time fairness."""

    name = "ftf"
    preempts = True

    def __init__(self, settings: FtfSettings) -> None:
        super().__init__(settings.fit, backfill=settings.backfill == "easy")
        self._step_rho = settings.step_rho

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """Minus rho, see `rho`."""
        return _in_steps(-rho(snapshot, job, *_where(job, request)), self._step_rho)


def rho(snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float:
    """Finish-time fairness of Themis: time from submission to end here, relative to that alone on its fair share, > 0.

    If the remaining time is unknown, the job is expected to run for as long again as it has run. `inf` if it has not run.
    """
    ran_s = common.ran_s(snapshot, job, option.gpus)
    left_s = common.remaining_s(snapshot, job, option, goodput)
    if left_s is None:
        left_s = ran_s
    share = sum(node.gpus_for_us for node in snapshot.nodes) / len(snapshot.jobs)
    alone_s = (ran_s + left_s) * max(option.gpus / share, 1.0) if share > 0 else 0.0
    return (snapshot.time_s - job.submit_s + left_s) / alone_s if alone_s > 0 else math.inf


class SlurmBackfill(_Queue):
    """FIFO with conservative backfill and fixed requests, as Slurm schedules with its defaults.

    The oldest job has the highest priority. For each of the first `max_jobs` waiting jobs, GPUs are reserved at the earliest
    time at which, by the time limits, the running jobs and the jobs before it leave enough free. A job for which that time is
    now starts. (EASY backfill reserves GPUs for one job only.) No GPUs are reserved for a job that would start after
    `window_s`. So, as in Slurm, a large job can wait for long among jobs without time limits. Slurm's other priority
    factors, its nice values and its preemption are not modelled.
    """

    name = "slurm-backfill"

    def __init__(self, settings: SlurmBackfillSettings) -> None:
        super().__init__(settings.fit, backfill=True)
        self.reservations = settings.max_jobs
        self.window_s = settings.window_s
        self._unlimited_s = settings.default_time_limit_s or SLURM_UNLIMITED_S

    def rank(self, snapshot: Snapshot, job: Job, request: common.Request) -> float:
        """The same for all jobs, so age decides."""
        return 0.0

    def seconds(self, snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float:
        """The remaining part of its time limit."""
        limit_s = job.time_limit_s if job.time_limit_s is not None else self._unlimited_s
        return max(limit_s - common.ran_s(snapshot, job, option.gpus), SOONEST_END_S)


class _Round:
    """One decision of a queue."""

    def __init__(
        self,
        queue: _Queue,
        snapshot: Snapshot,
        free: FreeGpus,
        requests: Mapping[JobId, common.Request],
        backfill: bool,
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
                job.submit_s,
                job.id,
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
                self._waiting[job.id] = common.never_fits(job, self._snapshot.nodes)
            elif refused:
                self._wait(job, refused)
            elif first_without is not None and not self._backfill:
                self._wait(job, f"job {first_without.id} is before it in the queue")
            elif first_without is not None:
                self._pass(job, request, first_without)
            elif (found := self._free.find(job, request)) is not None:
                self._start(job, found, f"starts on {found.configuration}: first in the queue")
            elif not (self._queue.preempts and self._make_room(job, request, order[position + 1 :])):
                first_without = job
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
                    if self._free.may_stay(held):  # on nodes that the job did not need
                        self._take(former, held)
                    else:
                        self._wait(former, f"makes room for job {job.id}, which is before it in the queue")
                return True
        return False

    def _reserve(self, job: Job, request: common.Request) -> None:
        """Let the job wait. With backfill, reserve GPUs for it at the earliest known time."""
        text = f"waits for {next(iter(request)).gpus} free GPUs"
        if not self._backfill:
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


def _where(job: Job, request: common.Request) -> tuple[Configuration, float]:
    """The configuration on which a job runs, if its request has it, or else the preferred one; and the goodput there."""
    held = job.running_on
    if held is not None and held.configuration in request:
        return held.configuration, request[held.configuration]
    return next(iter(request.items()), (Configuration(1, job.spec.max_gpus, ""), 0.0))


def _in_steps(value: float, step: float) -> float:
    return math.floor(value / step) * step if step > 0 and math.isfinite(value) else value
