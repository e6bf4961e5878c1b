"""The stages `gandiva-share` and `antman-share`, their settings, and their steps.

Each step adds joining jobs to the `Residents` of a round; see the package.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.model import GpuClass, Job, JobId, Phase, Placement, Plan, SharedGpus, SharingState, Snapshot
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.colocation.residents import Resident, Residents, gpu_class, in_transit, waiting

# Steps 1 and 2: joins of earlier rounds.


def keep_in_transit(residents: Residents, least_memory_mb: int = 0) -> None:
    """Let jobs in transit join the resident job that they were sent to. A job that cannot join it any more waits."""
    for job_id, group in in_transit(residents.snapshot).items():
        if job_id in residents.assignments:
            continue
        job, resident = residents.jobs[job_id], residents.residents.get(group.jobs[0])
        if resident is not None and _rejoins(residents, job, resident, group, job.target, least_memory_mb):
            residents.join(job, resident, f"beside job {resident.job.id}")
        else:
            residents.turn_away(job, group.jobs[0])


def keep_recent(residents: Residents, jobs: Iterable[Job], interval_s: float, least_memory_mb: int = 0) -> None:
    """Let jobs that moved less than `interval_s` ago stay where they are, while the reason why they joined still holds."""
    for job in jobs:
        group = residents.group_of.get(job.id)
        if group is None or common.rested(residents.snapshot, job.id, interval_s):
            continue
        resident = residents.residents[group.jobs[0]]
        if _still_pays(residents, job, resident, group) and _rejoins(
            residents, job, resident, group, job.allocation, least_memory_mb
        ):
            residents.join(job, resident, f"stays beside job {resident.job.id}")


def _still_pays(residents: Residents, job: Job, resident: Resident, group: SharedGpus) -> bool:
    """Whether the reason why a job joined still holds: a guaranteed resident, its first slice, or a pack that pays."""
    if any(pack.guaranteed for pack in group.packs):
        return True
    if group.time_sliced:
        return resident.running_in_place and residents.state.use(job.id).ran_s < residents.slice_s
    return resident.running_in_place and residents.expected_total(job, resident) is not None


def _rejoins(
    residents: Residents,
    job: Job,
    resident: Resident,
    group: SharedGpus,
    where: Placement | None,
    least_memory_mb: int,
) -> bool:
    """Whether a job can share the resident job's GPUs at `where` in the way of its group. If so, the resident takes
    that way."""
    gpus = residents.gpus(job, resident)
    if gpus is None or where is None or (gpus, (resident.node,)) != (where.gpus, where.nodes):
        return False
    if any(pack.guaranteed for pack in group.packs):
        left_mb = residents.left_mb(job, resident, least_memory_mb, present=True)
        if left_mb is None or gpus > resident.free_gpus:
            return False
        resident.guaranteed, resident.memory_mb = True, left_mb
        return True
    if resident.joined:
        return False
    if group.time_sliced:
        resident.time_sliced = resident.job.movable
        return resident.time_sliced
    return gpus == resident.where.gpus and residents.limits(resident, job.id) is not None


# Step 3: what guaranteed jobs leave.


def use_leftovers(
    residents: Residents, jobs: Sequence[Job], guaranteed: Collection[JobId], least_memory_mb: int
) -> None:
    """Let jobs join guaranteed jobs, on the least loaded GPUs.

    A job stays with its present resident job if it can, else on its present node if it can.
    """
    able = [
        each
        for each in residents.residents.values()
        if each.job.id in guaranteed and (each.guaranteed or not each.joined)
    ]
    for job in jobs:
        # A job that does not answer the agent cannot be held to a share.
        if job.id in residents.placed or residents.state.use(job.id).answers is False:
            continue
        found = list(_hosts(residents, job, able, least_memory_mb))
        if found:
            same = [each for each in found if residents.is_with(job, each[1])]
            near = [each for each in found if _is_on(job, each[1].node)]
            _, resident, left_mb = min(same or near or found, key=lambda each: each[0])
            resident.guaranteed, resident.memory_mb = True, left_mb
            residents.join(job, resident, f"what job {resident.job.id} leaves of its GPUs")


def _hosts(
    residents: Residents, job: Job, able: Iterable[Resident], least_memory_mb: int
) -> Iterator[tuple[tuple[float, JobId], Resident, int]]:
    """The resident jobs that the job can join, each with its load and the memory that it leaves, MB."""
    for resident in able:
        gpus = residents.gpus(job, resident)
        present = residents.is_with(job, resident) or _is_on(job, resident.node)
        left_mb = residents.left_mb(job, resident, least_memory_mb, present=present)
        if gpus is None or left_mb is None or not (present or resident.running_in_place):
            continue
        if gpus <= resident.free_gpus:
            yield (_load(residents, resident), resident.job.id), resident, left_mb


def _load(residents: Residents, resident: Resident) -> float:
    """Load of each of the resident job's GPUs: its utilisation, and 1 for each joining job's GPU."""
    used = residents.state.use(resident.job.id).utilisation
    load = (1.0 if used is None else used) * resident.where.gpus + sum(resident.joined.values())
    return load / resident.where.gpus


def _is_on(job: Job, node: str) -> bool:
    return job.phase is Phase.RUNNING and job.allocation is not None and job.allocation.nodes == (node,)


# Step 4: packs.


def pack(residents: Residents, jobs: Sequence[Job], guaranteed: Collection[JobId] = ()) -> None:
    """Pack jobs with resident jobs that are not guaranteed, so that all of them together are expected to train most."""
    able = [resident for job, resident in sorted(residents.residents.items()) if job not in guaranteed]
    while _pack_once(residents, jobs, able):
        pass


def _pack_once(residents: Residents, jobs: Sequence[Job], able: Sequence[Resident]) -> bool:
    """Match once. Returns whether a limit refused a matched job, so that other jobs may have its place."""
    jobs = [job for job in jobs if job.id not in residents.placed and residents.state.use(job.id).profiled]
    able = [resident for resident in able if not resident.joined and resident.running_in_place]
    gain_JR = np.array([[residents.gain(job, resident) for resident in able] for job in jobs])
    if not gain_JR.any():
        return False
    from scipy.optimize import linear_sum_assignment  # takes a second to load

    age_J = 1 - 1e-6 * np.arange(len(jobs)) / len(jobs)  # among equals, the job that has waited longest
    refused = False
    for row, column in zip(*linear_sum_assignment(age_J[:, None] * gain_JR, maximize=True), strict=True):
        job, resident = jobs[row], able[column]
        if gain_JR[row, column] == 0:
            continue
        if residents.gpus(job, resident) is None:
            refused = True
        else:
            why = f"packed with job {resident.job.id}: together they train more than in time slices"
            residents.join(job, resident, why)
    return refused


# Step 5: first slices.


def first_slices(residents: Residents, jobs: Sequence[Job], part: float) -> None:
    """Give jobs that have never run one time slice each, on GPUs of at most `part` of the resident jobs."""
    every = residents.residents.values()
    left = math.ceil(part * len(every)) - sum(resident.time_sliced for resident in every)
    for job in jobs:
        if left <= 0:
            return
        if job.id in residents.placed or residents.state.use(job.id).ran_s >= residents.slice_s:
            continue
        able = [
            resident
            for resident in every
            if not resident.joined
            and resident.running_in_place
            and resident.job.movable
            and resident.job.sharing_priority <= job.sharing_priority
            and residents.gpus(job, resident) is not None
        ]
        able.sort(key=lambda each: (each.where.gpus, _moved_s(residents, each), each.job.id))
        if able:
            resident = residents.present_first(job, able)[0]
            resident.time_sliced = True
            why = f"a first slice of {residents.slice_s:g} s on GPUs of job {resident.job.id}"
            residents.join(job, resident, why)
            left -= 1


def _moved_s(residents: Residents, resident: Resident) -> float:
    """When the resident job last moved, s; -inf: never."""
    return residents.state.use(resident.job.id).moved_s or -math.inf


PACK_INTERVAL_S = 120.0
"""Shortest time between two moves of a joining job to different resident jobs, s: two time slices of `gandiva`, as for its
packs. A job that must leave its GPUs moves earlier."""

LEAST_MEMORY_MB = 1024
"""Least GPU memory that a joining job needs, MB. It also keeps this much until its resident job's need is known."""


class GandivaShareSettings(BaseModel):
    """Section `[policy.gandiva-share]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    slice_s: float = Field(default=60.0, gt=0, description="Length of a time slice, seconds.")

    first_slices: ClassVar[float] = 0.25
    """Largest share of the resident jobs that give up a time slice at once to jobs that have never run: three of four keep
    their speed, whoever comes."""

    pack_interval_s: ClassVar[float] = PACK_INTERVAL_S


class AntmanShareSettings(BaseModel):
    """Section `[policy.antman-share]` of the settings file, and part of `[policy.antman]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    control_s: float = Field(default=10.0, gt=0, description="Control period, seconds.")
    default_class: GpuClass = Field(
        default=GpuClass.GUARANTEED, description="Class of jobs whose job spec has no gpu_class."
    )

    pack_interval_s: ClassVar[float] = PACK_INTERVAL_S


class GandivaShare:
    """Packs waiting jobs with resident jobs, and gives new jobs a first time slice."""

    name = "gandiva-share"
    shares = True

    def __init__(self, settings: GandivaShareSettings) -> None:
        self._settings = settings

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """Return the plan with the joining jobs added."""
        if snapshot.sharing is None:
            return plan
        chosen = self._settings
        residents = Residents(snapshot, snapshot.sharing, plan, chosen.slice_s)
        jobs = waiting(snapshot, plan)
        keep_in_transit(residents)
        keep_recent(residents, jobs, chosen.pack_interval_s)
        pack(residents, jobs)
        first_slices(residents, jobs, chosen.first_slices)
        return residents.plan()


class AntmanShare:
    """Places waiting opportunistic jobs on GPUs of guaranteed jobs, and packs them with one another."""

    name = "antman-share"
    shares = True

    def __init__(self, settings: AntmanShareSettings) -> None:
        self._settings = settings

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """Return the plan with the joining opportunistic jobs added."""
        if snapshot.sharing is None:
            return plan
        return with_opportunistic_jobs(snapshot, snapshot.sharing, plan, self._settings)


def with_opportunistic_jobs(snapshot: Snapshot, state: SharingState, plan: Plan, settings: AntmanShareSettings) -> Plan:
    """Return the plan with the waiting opportunistic jobs that can join a resident job."""
    classes = {job.id: gpu_class(job, settings.default_class) for job in snapshot.jobs}
    jobs = [job for job in waiting(snapshot, plan) if classes[job.id] is GpuClass.OPPORTUNISTIC]
    guaranteed = {job for job, its in classes.items() if its is GpuClass.GUARANTEED}
    residents = Residents(snapshot, state, plan, settings.control_s)
    keep_in_transit(residents, LEAST_MEMORY_MB)
    keep_recent(residents, jobs, settings.pack_interval_s, LEAST_MEMORY_MB)
    use_leftovers(residents, jobs, guaranteed, LEAST_MEMORY_MB)
    pack(residents, jobs, guaranteed)
    return residents.plan()
