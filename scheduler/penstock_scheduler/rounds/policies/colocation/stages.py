"""The stages `gandiva-share` and `antman-share`, and their settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.model import GpuClass, Plan, SharingState, Snapshot
from penstock_scheduler.rounds.policies.colocation import steps
from penstock_scheduler.rounds.policies.colocation.residents import Residents
from penstock_scheduler.rounds.policies.colocation.roles import gpu_class, waiting

PackInterval = Annotated[
    float,
    Field(
        ge=0,
        description="Shortest time between two moves of a joining job to different resident jobs, seconds. A job "
        "that must leave its GPUs moves earlier.",
    ),
]


LEAST_MEMORY_MB = 1024
"""Least GPU memory that a joining job needs, MB. It also keeps this much until its resident job's need is known."""


class GandivaShareSettings(BaseModel):
    """Section `[policy.gandiva-share]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    slice_s: float = Field(default=60.0, gt=0, description="Length of a time slice, seconds.")
    first_slices: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Largest share of the resident jobs that give up a time slice at once to jobs that have never run.",
    )
    pack_interval_s: PackInterval = 120.0


class AntmanShareSettings(BaseModel):
    """Section `[policy.antman-share]` of the settings file, and part of `[policy.antman]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    control_s: float = Field(default=10.0, gt=0, description="Control period, seconds.")
    default_class: GpuClass = Field(
        default=GpuClass.GUARANTEED, description="Class of jobs whose job spec has no gpu_class."
    )
    pack_interval_s: PackInterval = 120.0


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
        steps.keep_in_transit(residents)
        steps.keep_recent(residents, jobs, chosen.pack_interval_s)
        steps.pack(residents, jobs)
        steps.first_slices(residents, jobs, chosen.first_slices)
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
    steps.keep_in_transit(residents, LEAST_MEMORY_MB)
    steps.keep_recent(residents, jobs, settings.pack_interval_s, LEAST_MEMORY_MB)
    steps.use_leftovers(residents, jobs, guaranteed, LEAST_MEMORY_MB)
    steps.pack(residents, jobs, guaranteed)
    return residents.plan()
