"""AntMan: guaranteed jobs get GPUs of their own; opportunistic jobs use what guaranteed jobs leave.

After *AntMan: Dynamic scaling on GPU clusters for deep learning* (Xiao et al., OSDI '20). Each round performs these
steps:

1. **Running guaranteed jobs stay.**
2. **Waiting guaranteed jobs get whole GPUs**, first come first served, within the quota of their account. They get the
   nodes that they fill best; a job on several nodes gets nodes of one switch where possible. GPUs that no job holds go
   first, then GPUs that only opportunistic jobs hold.
3. **Opportunistic jobs get free GPUs.** Running ones keep theirs if no guaranteed job takes them.
4. **The other opportunistic jobs join resident jobs** (`colocation`): a guaranteed job on the least loaded GPUs, or
   another opportunistic job where both together train more than in time slices. A joining job moves to free GPUs once
   it has stayed where it is for `interval_s`.

A job without a `gpu_class` has the site's `default_class`. The cluster chooses which GPUs of a node a job gets: on
Slurm, the best connected ones of a GPU reservation (docs/admin/agent.md), and Slurm's own choice for jobs that hold
GPUs in Slurm.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import ClassVar

from pydantic import Field, NonNegativeInt

from penstock_scheduler.model import (
    Assignment,
    GpuClass,
    GpuLimit,
    Job,
    JobId,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
)
from penstock_scheduler.rounds.free_gpus import Allowance, FreeGpus
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.colocation import (
    AntmanShareSettings,
    gpu_class,
    joining_jobs,
    with_opportunistic_jobs,
)
from penstock_scheduler.rounds.policies.never_fits import never_fits


class AntmanSettings(AntmanShareSettings):
    """Section `[policy.antman]` of the settings file."""

    quotas: Mapping[str, NonNegativeInt] = Field(
        default={},
        description="Most GPUs that the guaranteed jobs of an account may hold together. Other accounts have no quota.",
    )

    interval_s: ClassVar[float] = 600.0
    """Shortest time between a job's last move and its move to free GPUs, s: as for `gandiva`'s migrations."""


class Antman:
    """Guaranteed jobs first. Opportunistic jobs use what is left, and may join other jobs on their GPUs."""

    name = "antman"
    shares = True

    def __init__(self, settings: AntmanSettings) -> None:
        self._settings = settings
        self._requests = common.Requests()

    def decide(self, snapshot: Snapshot) -> Plan:
        """Decide one round."""
        plan = _Round(self._settings, snapshot, self._requests.of(snapshot)).plan()
        return (
            plan
            if snapshot.sharing is None
            else with_opportunistic_jobs(snapshot, snapshot.sharing, plan, self._settings)
        )


class _Round:
    def __init__(self, settings: AntmanSettings, snapshot: Snapshot, requests: Mapping[JobId, common.Request]) -> None:
        self._settings, self._snapshot, self._requests = settings, snapshot, requests
        self._classes = {job.id: gpu_class(job, settings.default_class) for job in snapshot.jobs}
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._quota = Allowance([GpuLimit("account", name, gpus) for name, gpus in settings.quotas.items()])
        self._free = FreeGpus.of(snapshot)
        self._allocated: dict[JobId, Placement] = {}
        self._why: dict[JobId, Reason] = {}
        self._waiting: dict[JobId, Reason] = {}
        groups = snapshot.sharing.groups if snapshot.sharing is not None else ()
        self._joining = {job for group in groups for job in joining_jobs(group)}
        self._in_transit: dict[JobId, Placement] = {}
        """Where joining jobs in transit go. They share GPUs there, unless those GPUs are free now."""

    def plan(self) -> Plan:
        pinned = common.pinned(self._snapshot)
        pins = {job: where for job, where in pinned.items() if job not in self._joining}
        self._in_transit = {job: where for job, where in pinned.items() if job in self._joining}
        for job_id, where in pins.items():
            self._take(self._jobs[job_id], where)
        order = sorted(self._snapshot.jobs, key=lambda job: job.in_order)
        guaranteed = [job for job in order if self._classes[job.id] is GpuClass.GUARANTEED]
        others = [job for job in order if self._classes[job.id] is GpuClass.OPPORTUNISTIC]
        for job, held in self._staying(guaranteed, pins, self._free):
            self._take(job, held)
        untouched = self._free.copy()
        for job, held in self._staying(others, pins, untouched):
            untouched.take(job, held)
        self._serve(guaranteed, untouched)
        for job, held in self._staying(others, self._allocated, self._free):
            self._take(job, held)
        self._serve_others(others)
        assignments = {job.id: self._assignment(job, pins) for job in self._snapshot.jobs if job.id in self._allocated}
        return Plan(self._snapshot.round, assignments, self._waiting)

    def _staying(
        self, jobs: Iterable[Job], placed: Container[JobId], free: FreeGpus
    ) -> Iterator[tuple[Job, Placement]]:
        """The jobs that can stay where they are, and where. The caller takes these GPUs off `free` one by one."""
        for job in jobs:
            if job.id not in placed and (held := self._held(job)) is not None and free.may_stay(held):
                yield job, held

    def _held(self, job: Job) -> Placement | None:
        """GPUs that a job holds alone or as the resident job."""
        return None if job.id in self._joining else job.running_on

    def _serve(self, guaranteed: list[Job], untouched: FreeGpus) -> None:
        """Give GPUs to waiting guaranteed jobs, in order. Once a job finds no GPUs, all jobs after it wait."""
        first_without: Job | None = None
        for job in guaranteed:
            if job.id in self._allocated or not self._asks(job):
                continue
            request = self._within_limits(job)
            request = {option: value for option, value in request.items() if self._quota_allows(job, option.gpus)}
            if not request:
                if job.id not in self._waiting:
                    text = f"the quota of account {job.account or 'none'} for guaranteed jobs is used up"
                    self._wait(job, text)
            elif first_without is not None:
                self._wait(job, f"job {first_without.id} is before it in the queue")
            else:
                where = untouched.find_nodes(job, request) or self._free.find(job, request)
                if where is None:
                    first_without = job
                    self._wait(job, f"waits for {next(iter(request)).gpus} GPUs that no guaranteed job uses")
                else:
                    self._start(job, where, "guaranteed")
                    untouched.take_nodes(where, job.request)

    def _serve_others(self, others: list[Job]) -> None:
        for job in others:
            if job.id in self._allocated or not self._asks(job):
                continue
            request = self._within_limits(job)
            if job.id in self._waiting:
                continue
            where = self._in_transit.get(job.id)
            if where is None or where.configuration not in request or not self._free.may_stay(where):
                where = self._free.find(job, request)
            if where is None or not self._may_move(job, where):
                self._wait(job, "no GPUs are left for it now")
            else:
                self._start(job, where, "on GPUs that no guaranteed job needs")

    def _asks(self, job: Job) -> bool:
        """Whether the cluster has anything that the job can use."""
        if not self._requests[job.id]:
            self._waiting[job.id] = never_fits(job, self._snapshot.nodes)
        return bool(self._requests[job.id])

    def _within_limits(self, job: Job) -> common.Request:
        allowed, refused = self._free.allowance.within(job, self._requests[job.id])
        if refused:
            self._wait(job, refused)
        return allowed

    def _quota_allows(self, job: Job, gpus: int) -> bool:
        return self._quota.refuses(job, gpus, "") is None

    def _may_move(self, job: Job, where: Placement) -> bool:
        """Whether a joining job may get GPUs of its own: always if it need not move for them, never while in transit."""
        if job.id not in self._joining:
            return True
        if common.in_flight(job):
            return job.target is None or where.suits(job.target)
        if job.allocation is None or where.suits(job.allocation):
            return True
        return common.rested(self._snapshot, job.id, self._settings.interval_s)

    def _take(self, job: Job, where: Placement) -> None:
        self._allocated[job.id] = where
        self._free.take(job, where)
        if self._classes[job.id] is GpuClass.GUARANTEED:
            self._quota.take(job, where.gpus, where.gpu_type)

    def _start(self, job: Job, where: Placement, why: str) -> None:
        self._take(job, where)
        self._why[job.id] = common.given(job, where, why)

    def _wait(self, job: Job, text: str) -> None:
        reason = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))
        self._waiting.setdefault(job.id, reason)

    def _assignment(self, job: Job, pins: Mapping[JobId, Placement]) -> Assignment:
        where = self._allocated[job.id]
        if job.id in pins:
            return common.pinned_assignment(job, where, self._snapshot)
        reason = self._why.get(job.id, Reason(ReasonCode.KEPT, f"keeps {where.configuration}"))
        return common.assign(job, where, reason, self._snapshot)
