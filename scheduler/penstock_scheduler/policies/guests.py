"""Stages that let waiting jobs share GPUs which a policy has given to others: `sia+gandiva-share`, `sia+antman-share`.

The policy in front gives GPUs to *hosts*, and does not see *guests*: to it they wait. A guest is there for idle fractions of its
host's GPUs. Its host keeps its placement, and the guest goes as soon as the policy wants these GPUs for somebody else, or gives
the guest GPUs of its own. A guest on its way to its host goes on to it, as long as the host is there and has room for it. For
`pack_interval_s` after its last move it is taken to no other host, unless it must leave.

- `gandiva-share`: guests and hosts of as many GPUs are packed where that promises more than turns (`sharing.packing`), so that
  all of them together train most, and as long as each slice shows that it does. Who has never run gets one slice at once, in
  turns with a host that may be moved and whose priority is no higher: early feedback for its user, and a profile, by which it
  may be packed.
- `antman-share`: jobs of class opportunistic are guests of guaranteed hosts, on the least loaded GPUs. Each GPU has one guest at
  most, whose memory is limited to what the host leaves; none that is known not to hear its node. The node moves the guests'
  compute so that the host keeps its speed (`sharing.control`). Opportunistic hosts and guests are packed as above.

The policy `antman` places its opportunistic jobs by this, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

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
from penstock_scheduler.policies import common
from penstock_scheduler.policies.gandiva import colocation, priority
from penstock_scheduler.policies.room import Allowance
from penstock_scheduler.sharing.packing import Memory

WAITS = (ReasonCode.WAITING_CAPACITY, ReasonCode.WAITING_FRAGMENTS)
"""Why a job may wait that a place beside another one would help."""

PackInterval = Annotated[
    float,
    Field(
        ge=0,
        description="Least time between a guest's last move and its next one to another host, unless it must leave, seconds.",
    ),
]


class GandivaShareSettings(BaseModel):
    """Section `[policy.gandiva-share]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    slice_s: float = Field(default=60.0, gt=0, description="Length of a turn, seconds.")
    least_total: float = Field(
        default=1.0, ge=1, description="Packs whose relative throughputs add up to no more than this are undone."
    )
    first_slices: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Most part of the hosts that give up a slice at once to jobs that never ran.",
    )
    pack_interval_s: PackInterval = 120.0


class AntmanShareSettings(BaseModel):
    """Section `[policy.antman-share]` of the settings file, and a part of `[policy.antman]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    control_s: float = Field(default=10.0, gt=0, description="Control period, seconds.")
    default_class: GpuClass = Field(default=GpuClass.GUARANTEED, description="Of jobs that do not say their gpu_class.")
    least_memory_mb: int = Field(
        default=1024,
        ge=0,
        description="Least memory that a guest needs; what it keeps until it is known what its host needs.",
    )
    least_total: float = Field(
        default=1.0, ge=1, description="Packs of opportunistic jobs that add up to no more than this are undone."
    )
    pack_interval_s: PackInterval = 120.0


class GandivaShare:
    """The stage; see the module."""

    name = "gandiva-share"
    shares = True

    def __init__(self, settings: GandivaShareSettings) -> None:
        self._settings = settings

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """The plan with guests."""
        if snapshot.sharing is None:
            return plan
        chosen = self._settings
        guests = Guests(snapshot, snapshot.sharing, plan, chosen.least_total, chosen.slice_s)
        guests.keep_on_their_way()
        guests.keep_newcomers(waiting(snapshot, plan), chosen.pack_interval_s)
        guests.pack(waiting(snapshot, plan))
        guests.first_slices(waiting(snapshot, plan), chosen.first_slices)
        return guests.plan()


class AntmanShare:
    """The stage; see the module."""

    name = "antman-share"
    shares = True

    def __init__(self, settings: AntmanShareSettings) -> None:
        self._settings = settings

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """The plan with opportunistic guests."""
        if snapshot.sharing is None:
            return plan
        return with_opportunists(snapshot, snapshot.sharing, plan, self._settings)


def with_opportunists(snapshot: Snapshot, state: SharingState, plan: Plan, settings: AntmanShareSettings) -> Plan:
    """A plan with the opportunistic jobs that wait as guests of others."""
    classes = {job.id: gpu_class(job, settings.default_class) for job in snapshot.jobs}
    some = [job for job in waiting(snapshot, plan) if classes[job.id] is GpuClass.OPPORTUNISTIC]
    guests = Guests(snapshot, state, plan, settings.least_total, settings.control_s)
    promised = {job for job, its in classes.items() if its is GpuClass.GUARANTEED}
    guests.keep_on_their_way(settings.least_memory_mb)
    guests.keep_newcomers(some, settings.pack_interval_s, settings.least_memory_mb)
    guests.fill(some, promised, settings.least_memory_mb)
    guests.pack(some, promised)
    return guests.plan()


def gpu_class(job: Job, default: GpuClass) -> GpuClass:
    """Whose needs come first."""
    return default if job.spec.gpu_class is None else job.spec.gpu_class


def waiting(snapshot: Snapshot, plan: Plan) -> list[Job]:
    """Jobs that wait for room, those that have waited longest first; no guests on their way to a host."""
    going = on_their_way(snapshot)
    waits = {job for job, reason in plan.waiting.items() if reason.code in WAITS and job not in going}
    jobs = [job for job in snapshot.jobs if job.id in waits]
    return sorted(jobs, key=lambda job: (-priority(job), job.submit_s, job.id))


def hosts_only(snapshot: Snapshot) -> Snapshot:
    """The snapshot as the policy in front of such a stage sees it: guests hold nothing, and those on their way are not there."""
    if snapshot.sharing is None:
        return snapshot
    guests = {job for group in snapshot.sharing.groups for job in guests_of(group)}
    if not guests:
        return snapshot
    going = on_their_way(snapshot)
    jobs = tuple(
        dataclasses.replace(job, phase=Phase.QUEUED, allocation=None, target=None) if job.id in guests else job
        for job in snapshot.jobs
        if job.id not in going
    )
    return dataclasses.replace(snapshot, jobs=jobs)


def on_their_way(snapshot: Snapshot) -> dict[JobId, SharedGpus]:
    """Guests that an earlier round has sent to a host -> the GPUs which they are to share."""
    flying = {job.id: job.target.nodes for job in snapshot.jobs if common.in_flight(job) and job.target is not None}
    groups = snapshot.sharing.groups if snapshot.sharing is not None else ()
    return {job: group for group in groups for job in guests_of(group) if flying.get(job) == (group.node,)}


def guests_of(group: SharedGpus) -> tuple[JobId, ...]:
    """Who is a guest in a group of such a stage: all but the first."""
    return group.jobs[1:]


@dataclass(slots=True)
class _Host:
    job: Job
    where: Placement
    guests: dict[JobId, int]
    """Guest -> its GPUs."""
    turns: bool = False
    guaranteed: bool = False
    memory_mb: int = 0
    """Limit of its guests, each; 0: none."""

    @property
    def node(self) -> str:
        return self.where.nodes[0]


class Guests:
    """Finds guests their hosts.

    Args:
        snapshot: with the guests as they are.
        state: its sharing.
        plan: of the policy in front.
        least_total: a pack is kept only above this.
        slice_s: of the groups.
    """

    def __init__(self, snapshot: Snapshot, state: SharingState, plan: Plan, least_total: float, slice_s: float) -> None:
        self._snapshot, self._state, self._plan = snapshot, state, plan
        self._least_total, self._slice_s = least_total, slice_s
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._known = colocation(state, {node.gpu_type for node in snapshot.nodes})
        self._memory = Memory(state)
        self._total = {frozenset(seen.jobs): sum(seen.speeds) if min(seen.speeds) > 0 else 0.0 for seen in state.seen}
        self._allowance = Allowance(snapshot.limits)
        self._hosts: dict[JobId, _Host] = {}
        self._placed: dict[JobId, Assignment] = {}
        self._back: dict[JobId, Reason] = {}
        """Guests on their way that their host has no room for any more."""
        already = plan.sharing()
        for job_id, assignment in plan.assignments.items():
            job, where = self._jobs[job_id], assignment.placement
            self._allowance.take(job, where.gpus, where.gpu_type)
            node = self._nodes.get(where.nodes[0])
            if len(where.shares) == 1 and job_id not in already and node is not None and node.usable:
                self._hosts[job_id] = _Host(job, where, {})
        self._group_of = {
            guest: group for group in state.groups for guest in guests_of(group) if group.jobs[0] in self._hosts
        }
        self._host_of = {guest: group.jobs[0] for guest, group in self._group_of.items()}

    def _stays(self, host: _Host) -> bool:
        """Whether the host trains where it is to be: only then is it known how it does."""
        held = host.job.allocation
        return host.job.phase is Phase.RUNNING and held is not None and host.where.suits(held)

    def _gpus(self, job: Job, host: _Host) -> int | None:
        """GPUs that a job can have beside a host; None: it cannot be there."""
        node, gpus = self._nodes[host.node], job.spec.min_gpus
        option = Configuration(1, gpus, host.where.gpu_type)
        fits = (
            gpus <= host.where.gpus
            and common.allowed(job, option)
            and common.is_open(node, job)
            and common.movable(job)
            and self._allowance.refuses(job, gpus, host.where.gpu_type) is None
        )
        rate = common.rate(self._snapshot.models[job.id], option) if fits else 0.0
        return gpus if rate > 0 and math.isfinite(rate) else None

    def _ordered(self, job: Job, hosts: Iterable[_Host]) -> list[_Host]:
        """The host that it has now first: a move costs a restart."""
        return sorted(hosts, key=lambda host: host.job.id != self._host_of.get(job.id))

    # Guests that have a host.

    def keep_on_their_way(self, least_memory_mb: int = 0) -> None:
        """Let guests that are on their way to a host share its GPUs as was planned; who cannot waits."""
        for job_id, group in on_their_way(self._snapshot).items():
            if job_id in self._plan.assignments:
                continue
            job, host = self._jobs[job_id], self._hosts.get(group.jobs[0])
            if host is not None and self._joins(job, host, group, job.target, least_memory_mb):
                self._invite(job, host, f"beside job {host.job.id}")
            else:
                text = f"job {group.jobs[0]}, which it was sent to, has no room for it any more"
                self._back[job_id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))

    def keep_newcomers(self, jobs: Iterable[Job], interval_s: float, least_memory_mb: int = 0) -> None:
        """Let guests that were moved less than `interval_s` ago stay where they are, unless they must leave."""
        for job in jobs:
            group = self._group_of.get(job.id)
            if group is None or common.rested(self._snapshot, job.id, interval_s):
                continue
            host = self._hosts[group.jobs[0]]
            if self._goes_on(job, host, group) and self._joins(job, host, group, job.allocation, least_memory_mb):
                self._invite(job, host, f"stays beside job {host.job.id}")

    def _goes_on(self, job: Job, host: _Host, group: SharedGpus) -> bool:
        """Whether what brought a guest to its host still holds: a promise to the host, its first slice, or a pack that pays."""
        if any(pack.guaranteed for pack in group.packs):
            return True
        if group.turns:
            return self._stays(host) and self._state.use(job.id).ran_s < self._slice_s
        return self._stays(host) and self._promise(job, host) is not None

    def _joins(self, job: Job, host: _Host, group: SharedGpus, where: Placement | None, least_memory_mb: int) -> bool:
        """Whether a guest that has, or is to have, `where` can share it in the way of the group; if so, it is the host's way."""
        gpus = self._gpus(job, host)
        if gpus is None or where is None or (gpus, (host.node,)) != (where.gpus, where.nodes):
            return False
        if any(pack.guaranteed for pack in group.packs):
            left_mb = self._left_mb(job, host, least_memory_mb, mine=True)
            if left_mb is None or sum(host.guests.values()) + gpus > host.where.gpus:
                return False
            host.guaranteed, host.memory_mb = True, left_mb
            return True
        if host.guests:
            return False
        if group.turns:
            host.turns = common.movable(host.job)
            return host.turns
        return gpus == host.where.gpus and self._limits(host, job.id) is not None

    # Packs.

    def pack(self, jobs: Sequence[Job], promised: Iterable[JobId] = ()) -> None:
        """Pack jobs with hosts of as many GPUs so that all of them together are expected to train most.

        Who has a host is counted as one job more there: a move costs a restart.
        """
        barred = set(promised)
        while self._pack(jobs, [host for _, host in sorted(self._hosts.items()) if host.job.id not in barred]):
            pass

    def _pack(self, jobs: Sequence[Job], hosts: Sequence[_Host]) -> bool:
        """Pack once; returns whether somebody was then refused for the sake of a limit, so that others may have the place."""
        jobs = [job for job in jobs if job.id not in self._placed and self._state.use(job.id).profiled]
        hosts = [host for host in hosts if not host.guests and self._stays(host)]
        gain_JH = np.array([[self._gain(job, host) for host in hosts] for job in jobs])
        if not gain_JH.any():
            return False
        from scipy.optimize import linear_sum_assignment  # takes a second to load

        first_J = 1 - 1e-6 * np.arange(len(jobs)) / len(jobs)  # of equals, who has waited longest
        refused = False
        for row, column in zip(*linear_sum_assignment(first_J[:, None] * gain_JH, maximize=True), strict=True):
            job, host = jobs[row], hosts[column]
            if gain_JH[row, column] == 0:
                continue
            if self._gpus(job, host) is None:
                refused = True
            else:
                self._invite(job, host, f"packed with job {host.job.id}: together they train more than in turns")
        return refused

    def _gain(self, job: Job, host: _Host) -> float:
        """By how much a host and its guest are expected to train more than the host alone; 0: they are not to be packed."""
        if priority(host.job) != priority(job) or (total := self._promise(job, host)) is None:
            return 0.0
        if self._gpus(job, host) != host.where.gpus or self._limits(host, job.id) is None:
            return 0.0
        return total - 1 + (host.job.id == self._host_of.get(job.id))

    def _promise(self, job: Job, host: _Host) -> float | None:
        """What both are expected to train together, relative to alone; None: not enough."""
        seen = self._total.get(frozenset((host.job.id, job.id)))
        if seen is not None and seen <= self._least_total:
            return None
        mine, theirs = self._state.use(job.id), self._state.use(host.job.id)
        if not (mine.profiled and theirs.profiled):
            return None
        total = self._known.total(host.where.gpu_type, mine.kind, theirs.kind)
        return total if total is not None and total > self._least_total else None

    def _limits(self, host: _Host, *guests: JobId) -> tuple[Limit, ...] | None:
        """Limits of memory of a host and its guests; None: they are not to be packed."""
        if not host.guaranteed:
            return self._memory.limits((host.job.id, *guests), host.where.gpu_type)
        return (Limit(), *(Limit(memory_mb=host.memory_mb) for _ in guests)) if host.memory_mb else ()

    # First slices.

    def first_slices(self, jobs: Sequence[Job], part: float) -> None:
        """Let jobs that never ran take one slice each of somebody's GPUs."""
        left = math.ceil(part * len(self._hosts)) - sum(host.turns for host in self._hosts.values())
        for job in jobs:
            if left <= 0:
                return
            if job.id in self._placed or self._state.use(job.id).ran_s >= self._slice_s:
                continue
            able = [
                host
                for host in self._hosts.values()
                if not host.guests
                and self._stays(host)
                and common.movable(host.job)
                and priority(host.job) <= priority(job)
                and self._gpus(job, host) is not None
            ]
            able.sort(
                key=lambda host: (host.where.gpus, self._state.use(host.job.id).moved_s or -math.inf, host.job.id)
            )
            if able:
                host = self._ordered(job, able)[0]
                host.turns = True
                self._invite(job, host, f"a first slice of {self._slice_s:g} s on GPUs of job {host.job.id}")
                left -= 1

    # What guaranteed jobs leave.

    def fill(self, jobs: Sequence[Job], promised: Iterable[JobId], least_memory_mb: int) -> None:
        """Put jobs beside guaranteed ones, on the GPUs that are used least."""
        promised = set(promised)
        hosts = [
            each for each in self._hosts.values() if each.job.id in promised and (each.guaranteed or not each.guests)
        ]
        for job in jobs:
            # To one that does not answer no share can be given.
            if job.id in self._placed or self._state.use(job.id).answers is False:
                continue
            able = []
            for host in hosts:
                gpus = self._gpus(job, host)
                mine = self._host_of.get(job.id) == host.job.id or _is_on(job, host.node)
                left_mb = self._left_mb(job, host, least_memory_mb, mine=mine)
                if gpus is None or left_mb is None or not (mine or self._stays(host)):
                    continue
                if sum(host.guests.values()) + gpus <= host.where.gpus:
                    used = self._state.use(host.job.id).utilisation
                    load = (1.0 if used is None else used) * host.where.gpus + sum(host.guests.values())
                    able.append((load / host.where.gpus, host.job.id, host, left_mb))
            if able:
                first = [each for each in able if each[1] == self._host_of.get(job.id)]
                here = [each for each in able if _is_on(job, each[2].node)]
                _, _, host, left_mb = min(first or here or able, key=lambda each: each[:2])
                host.guaranteed, host.memory_mb = True, left_mb
                self._invite(job, host, f"what job {host.job.id} leaves of its GPUs")

    def _left_mb(self, job: Job, host: _Host, least_mb: int, *, mine: bool) -> int | None:
        """Memory that a guest of the host may use, MB; 0: nobody knows; None: too little, or less than it has used.

        Until it is known what the host needs, nobody joins it; who is there when it comes keeps the least.
        """
        memory_mb = self._state.gpu_memory_mb.get(host.where.gpu_type, 0)
        use = self._state.use(host.job.id)
        if not use.profiled or (memory_mb and not use.memory_mb):
            left_mb = least_mb if mine else None
        else:
            left_mb = memory_mb - use.memory_mb if memory_mb else 0
        if memory_mb == 0 or left_mb is None:
            return left_mb
        return left_mb if left_mb >= max(least_mb, self._state.use(job.id).memory_mb, 1) else None

    # The plan.

    def _invite(self, job: Job, host: _Host, why: str) -> None:
        node, gpus = self._nodes[host.node], job.spec.min_gpus
        where = common.on_one_node(job, node, gpus)
        host.guests[job.id] = gpus
        self._allowance.take(job, gpus, where.gpu_type)
        code = ReasonCode.FIRST_SLICE if host.turns else ReasonCode.SHARES
        reason = Reason(code, f"shares {where.configuration}: {why}")
        if common.in_flight(job) and where == job.target:
            reason = Reason(ReasonCode.IN_FLIGHT, f"on its way to {where.configuration}, {why}")
        share = self._known.share(where.gpu_type, self._state.use(job.id).kind, self._state.use(host.job.id).kind)
        part = 0.5 if host.turns or share is None else share
        goodput = common.rate(self._snapshot.models[job.id], where.configuration) * part
        self._placed[job.id] = common.assign(job, where, reason, self._snapshot, goodput)

    def plan(self) -> Plan:
        """The plan with guests."""
        assignments = dict(self._plan.assignments)
        groups = []
        for host in self._hosts.values():
            if host.guests:
                groups.append(self._group(host))
                names = " and ".join(f"job {guest}" for guest in host.guests)
                given = assignments[host.job.id]
                text = f"{given.reason.text}; {names} {'share' if len(host.guests) > 1 else 'shares'} its GPUs"
                reason = dataclasses.replace(given.reason, text=text)
                assignments[host.job.id] = dataclasses.replace(given, reason=reason)
        assignments |= self._placed
        order = [job.id for job in self._snapshot.jobs]
        return dataclasses.replace(
            self._plan,
            assignments={job: assignments[job] for job in order if job in assignments},
            waiting={job: why for job, why in (self._plan.waiting | self._back).items() if job not in self._placed},
            shared=(*self._plan.shared, *groups),
        )

    def _group(self, host: _Host) -> SharedGpus:
        gpus, mine = host.where.gpus, priority(host.job)
        jobs = (host.job.id, *host.guests)
        if host.turns:
            packs = [Pack((job,), gpus, mine if job == host.job.id else priority(self._jobs[job])) for job in jobs]
            return SharedGpus(host.node, gpus, tuple(packs), self._slice_s)
        pack = Pack(jobs, gpus, mine, host.job.id if host.guaranteed else None, self._limits(host, *host.guests) or ())
        return SharedGpus(host.node, gpus, (pack,), self._slice_s)


def _is_on(job: Job, node: str) -> bool:
    return job.phase is Phase.RUNNING and job.allocation is not None and job.allocation.nodes == (node,)
