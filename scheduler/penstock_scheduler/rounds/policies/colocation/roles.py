"""Which jobs are resident, which join them, and which wait to join."""

from __future__ import annotations

import dataclasses

from penstock_scheduler.model import GpuClass, Job, JobId, Phase, Plan, ReasonCode, SharedGpus, Snapshot
from penstock_scheduler.rounds.policies import common

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
    return sorted(jobs, key=lambda job: (-job.sharing_priority, job.submit_s, job.id))


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
