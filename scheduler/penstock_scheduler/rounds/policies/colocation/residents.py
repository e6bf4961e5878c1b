"""The resident jobs of one round, the jobs that join them, their roles and classes, and what a join must satisfy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_scheduler.model import (
    Assignment,
    Configuration,
    GpuClass,
    Job,
    JobId,
    Limit,
    Pack,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    SharedGpus,
    SharingState,
    Snapshot,
)
from penstock_scheduler.rounds.free_gpus import Allowance, Amounts, is_open
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva import colocation
from penstock_scheduler.rounds.sharing.packing import Memory

MAY_JOIN = (ReasonCode.WAITING_CAPACITY, ReasonCode.WAITING_FRAGMENTS)
"""Reasons to wait that joining a resident job resolves."""


def gpu_class(job: Job, default: GpuClass) -> GpuClass:
    """The job's class, or the site's default if the job spec names none."""
    return default if job.spec.gpu_class is None else job.spec.gpu_class


def joining_jobs(group: SharedGpus) -> tuple[JobId, ...]:
    """The joining jobs of a group that a stage made: all but the first, which is resident."""
    return group.jobs[1:]


def in_transit(snapshot: Snapshot) -> dict[JobId, SharedGpus]:
    """Jobs that an earlier round sent to a resident job and that have not arrived -> the GPUs that they are to
    share."""
    moving = {job.id: job.target.nodes for job in snapshot.jobs if common.in_flight(job) and job.target is not None}
    groups = snapshot.sharing.groups if snapshot.sharing is not None else ()
    return {job: group for group in groups for job in joining_jobs(group) if moving.get(job) == (group.node,)}


def waiting(snapshot: Snapshot, plan: Plan) -> list[Job]:
    """Jobs that wait for GPUs and are not in transit, by priority and then by age."""
    moving = in_transit(snapshot)
    waits = {job for job, reason in plan.waiting.items() if reason.code in MAY_JOIN and job not in moving}
    jobs = [job for job in snapshot.jobs if job.id in waits]
    return sorted(jobs, key=lambda job: (-job.sharing_priority, job.in_order))


def residents_only(snapshot: Snapshot) -> Snapshot:
    """The snapshot as the policy in front of a stage sees it: joining jobs hold no GPUs, and jobs in transit are left
    out."""
    if snapshot.sharing is None:
        return snapshot
    joining = {job for group in snapshot.sharing.groups for job in joining_jobs(group)}
    if not joining:
        return snapshot
    moving = in_transit(snapshot)
    jobs = tuple(
        dataclasses.replace(job, phase=Phase.QUEUED, allocation=None, target=None) if job.id in joining else job
        for job in snapshot.jobs
        if job.id not in moving
    )
    return dataclasses.replace(snapshot, jobs=jobs)


LEAST_TOTAL = 1.0
"""A pack is undone if its jobs' relative throughputs add up to no more than this, which is what time slices give."""


@dataclass(slots=True)
class Resident:
    """A job with GPUs of its own on one node, and the jobs that join it there."""

    job: Job
    where: Placement
    joined: dict[JobId, int]
    """Joining job -> number of its GPUs."""
    time_sliced: bool = False
    guaranteed: bool = False
    memory_mb: int = 0
    """Memory limit of each joining job, MB; 0: no limit."""

    @property
    def node(self) -> str:
        """The node of its GPUs."""
        return self.where.nodes[0]

    @property
    def free_gpus(self) -> int:
        """Number of its GPUs that no job has joined."""
        return self.where.gpus - sum(self.joined.values())

    @property
    def running_in_place(self) -> bool:
        """Whether the job already runs where the plan wants it. Only then is it known how fast it trains there."""
        held = self.job.allocation
        return self.job.phase is Phase.RUNNING and held is not None and self.where.suits(held)


class Residents:
    """The resident jobs of one round. The steps of a stage add joining jobs to them.

    Args:
        snapshot: the round's snapshot, joining jobs included.
        state: the snapshot's sharing state.
        plan: the plan of the policy in front.
        slice_s: time slice, or control period, of the groups, s.
    """

    def __init__(self, snapshot: Snapshot, state: SharingState, plan: Plan, slice_s: float) -> None:
        self.snapshot, self.state, self.assignments = snapshot, state, plan.assignments
        self.slice_s = slice_s
        self.jobs = {job.id: job for job in snapshot.jobs}
        self.placed: dict[JobId, Assignment] = {}
        """Assignments of the joining jobs."""
        self._plan = plan
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._known = colocation(state, {node.gpu_type for node in snapshot.nodes})
        self._memory = Memory(state)
        self._total = {frozenset(seen.jobs): sum(seen.speeds) if min(seen.speeds) > 0 else 0.0 for seen in state.seen}
        self._allowance = Allowance(snapshot.limits)
        self._amounts = Amounts(snapshot.nodes)
        self._turned_away: dict[JobId, Reason] = {}
        """Jobs in transit for which their resident job no longer has room."""
        self.residents: dict[JobId, Resident] = {}
        already = plan.sharing()
        for job_id, assignment in plan.assignments.items():
            job, where = self.jobs[job_id], assignment.placement
            self._allowance.take(job, where.gpus, where.gpu_type)
            self._amounts.take(job.request, where)
            node = self._nodes.get(where.nodes[0])
            if len(where.shares) == 1 and job_id not in already and node is not None and node.may_start:
                self.residents[job_id] = Resident(job, where, {})
        self.group_of = {
            job: group for group in state.groups for job in joining_jobs(group) if group.jobs[0] in self.residents
        }
        """Joining job -> the group that it shares GPUs in now."""
        self._resident_of = {job: group.jobs[0] for job, group in self.group_of.items()}

    # What a join must satisfy.

    def gpus(self, job: Job, resident: Resident) -> int | None:
        """Number of GPUs that a job would have beside a resident job; None: it cannot join it."""
        node, gpus = self._nodes[resident.node], job.spec.min_gpus
        option = Configuration(1, gpus, resident.where.gpu_type)
        fits = (
            gpus <= resident.where.gpus
            and common.allowed(job, option)
            and is_open(node, job)
            and job.movable
            and self._allowance.refuses(job, gpus, resident.where.gpu_type) is None
            and (self.is_with(job, resident) or self._amounts.has(node.name, job.request, gpus))
        )
        rate = common.rate(self.snapshot.facts[job.id].model, option) if fits else 0.0
        return gpus if rate > 0 and math.isfinite(rate) else None

    def is_with(self, job: Job, resident: Resident) -> bool:
        """Whether the job shares the resident job's GPUs now. Moving it elsewhere would cost a restart."""
        return self._resident_of.get(job.id) == resident.job.id

    def present_first(self, job: Job, residents: Iterable[Resident]) -> list[Resident]:
        """The resident jobs in their order, but the one that the job is with now comes first."""
        return sorted(residents, key=lambda resident: not self.is_with(job, resident))

    def expected_total(self, job: Job, resident: Resident) -> float | None:
        """Sum of both jobs' expected throughputs, relative to running alone; None: unknown, or too little to pack
        them."""
        seen = self._total.get(frozenset((resident.job.id, job.id)))
        if seen is not None and seen <= LEAST_TOTAL:
            return None
        mine, theirs = self.state.use(job.id), self.state.use(resident.job.id)
        if not (mine.profiled and theirs.profiled):
            return None
        total = self._known.total(resident.where.gpu_type, mine.kind, theirs.kind)
        return total if total is not None and total > LEAST_TOTAL else None

    def gain(self, job: Job, resident: Resident) -> float:
        """Throughput that packing the job with a resident job is expected to add; 0: do not pack them.

        Relative to the resident job alone. The pair that shares GPUs now counts as one job more, since a move costs a
        restart.
        """
        if (
            resident.job.sharing_priority != job.sharing_priority
            or (total := self.expected_total(job, resident)) is None
        ):
            return 0.0
        if self.gpus(job, resident) != resident.where.gpus or self.limits(resident, job.id) is None:
            return 0.0
        return total - 1 + self.is_with(job, resident)

    def limits(self, resident: Resident, *joining: JobId) -> tuple[Limit, ...] | None:
        """Memory limits of a resident job and the jobs that join it; None: they must not be packed."""
        if not resident.guaranteed:
            return self._memory.limits((resident.job.id, *joining), resident.where.gpu_type)
        return (Limit(), *(Limit(memory_mb=resident.memory_mb) for _ in joining)) if resident.memory_mb else ()

    def left_mb(self, job: Job, resident: Resident, least_mb: int, *, present: bool) -> int | None:
        """Memory that the resident job leaves to a joining job on each GPU, MB.

        Until the resident job's need is known, no job joins it, and one that is present already keeps `least_mb`.

        Args:
            job: the joining job.
            resident: the resident job.
            least_mb: least memory that a joining job needs.
            present: whether the joining job is there already.

        Returns:
            The memory; 0: the GPU's memory is not known; None: too little, or less than the job has used.
        """
        memory_mb = self.state.gpu_memory_mb.get(resident.where.gpu_type, 0)
        use = self.state.use(resident.job.id)
        if not use.profiled or (memory_mb and not use.memory_mb):
            left_mb = least_mb if present else None
        else:
            left_mb = memory_mb - use.memory_mb if memory_mb else 0
        if memory_mb == 0 or left_mb is None:
            return left_mb
        return left_mb if left_mb >= max(least_mb, self.state.use(job.id).memory_mb, 1) else None

    # Changes.

    def join(self, job: Job, resident: Resident, why: str) -> None:
        """Let a job join a resident job. `why` completes the sentence "shares 1 x 1 a100: ..."."""
        node, gpus = self._nodes[resident.node], job.spec.min_gpus
        where = common.on_one_node(job, node, gpus)
        resident.joined[job.id] = gpus
        self._allowance.take(job, gpus, where.gpu_type)
        self._amounts.take(job.request, where)
        code = ReasonCode.FIRST_SLICE if resident.time_sliced else ReasonCode.SHARES
        reason = Reason(code, f"shares {where.configuration}: {why}")
        if common.in_flight(job) and where == job.target:
            reason = Reason(ReasonCode.IN_FLIGHT, f"on its way to {where.configuration}, {why}")
        kinds = self.state.use(job.id).kind, self.state.use(resident.job.id).kind
        share = self._known.share(where.gpu_type, *kinds)
        part = 0.5 if resident.time_sliced or share is None else share
        goodput = common.rate(self.snapshot.facts[job.id].model, where.configuration) * part
        self.placed[job.id] = common.assign(job, where, reason, self.snapshot, goodput)

    def turn_away(self, job: Job, resident: JobId) -> None:
        """Let a job in transit wait, because the resident job no longer has room for it."""
        text = f"job {resident}, which it was sent to, no longer has room for it"
        self._turned_away[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))

    def plan(self) -> Plan:
        """The plan with the joining jobs."""
        assignments = dict(self._plan.assignments)
        groups = []
        for resident in self.residents.values():
            if resident.joined:
                groups.append(self._group(resident))
                names = " and ".join(f"job {joining}" for joining in resident.joined)
                before = assignments[resident.job.id]
                text = f"{before.reason.text}; {names} {'share' if len(resident.joined) > 1 else 'shares'} its GPUs"
                reason = dataclasses.replace(before.reason, text=text)
                assignments[resident.job.id] = dataclasses.replace(before, reason=reason)
        assignments |= self.placed
        order = [job.id for job in self.snapshot.jobs]
        waiting = self._plan.waiting | self._turned_away
        return dataclasses.replace(
            self._plan,
            assignments={job: assignments[job] for job in order if job in assignments},
            waiting={job: why for job, why in waiting.items() if job not in self.placed},
            shared=(*self._plan.shared, *groups),
        )

    def _group(self, resident: Resident) -> SharedGpus:
        gpus, its_priority = resident.where.gpus, resident.job.sharing_priority
        jobs = (resident.job.id, *resident.joined)
        if resident.time_sliced:
            packs = tuple(Pack((job,), gpus, self.jobs[job].sharing_priority) for job in jobs)
            return SharedGpus(resident.node, gpus, packs, self.slice_s)
        guaranteed = resident.job.id if resident.guaranteed else None
        pack = Pack(jobs, gpus, its_priority, guaranteed, self.limits(resident, *resident.joined) or ())
        return SharedGpus(resident.node, gpus, (pack,), self.slice_s)
