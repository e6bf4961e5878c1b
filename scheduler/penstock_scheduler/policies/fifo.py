"""First in, first out: what a plain queue does, as the yardstick.

Jobs start in the order of their submission, each on the largest configuration that it asks for and that exists, on its
first GPU type with room; the first that finds no room makes all behind it wait. Nobody is moved once running.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from penstock_scheduler.model import Assignment, JobId, Phase, Placement, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.placement import place
from penstock_scheduler.policies import common


class FifoSettings(BaseModel):
    """Section `[policy.fifo]` of the settings file: it has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fifo:
    """The policy; see the module."""

    name = "fifo"

    def __init__(self, settings: FifoSettings) -> None:
        del settings

    def decide(self, snapshot: Snapshot) -> Plan:
        """Start what fits, in order."""
        assignments: dict[JobId, Assignment] = {}
        waiting: dict[JobId, Reason] = {}
        taken: dict[JobId, Placement] = dict(common.pinned(snapshot))
        for job in snapshot.jobs:
            if job.id not in taken and job.phase is Phase.RUNNING and job.allocation is not None:
                taken[job.id] = job.allocation
        for job in snapshot.jobs:
            if job.id in taken:
                reason = Reason(ReasonCode.KEPT, f"keeps {taken[job.id].configuration}")
                assignments[job.id] = common.assign(job, taken[job.id], reason, snapshot)
        options = common.configurations(snapshot.nodes)
        blocked_by: JobId | None = None
        for job in sorted(snapshot.jobs, key=lambda job: (job.submit_s, job.id)):
            if job.id in taken:
                continue
            types = job.wish.gpu_types or tuple(sorted({option.gpu_type for option in options}))
            model = snapshot.models[job.id]
            fitting = [option for option in options if common.allowed(job, option) and common.rate(model, option) > 0]
            fitting.sort(key=lambda option: (-option.gpus, types.index(option.gpu_type), option.nodes))
            if not fitting:
                waiting[job.id] = common.never_fits(job, options, snapshot.nodes)
                continue
            if blocked_by is not None:
                text = f"job {blocked_by} is before it in the queue"
                waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))
                continue
            largest = [option for option in fitting if option.gpus == fitting[0].gpus]
            for option in largest:
                found = place(snapshot.nodes, {job.id: option}, {job.id: job.partitions}, {}, taken).placements
                if found:
                    taken[job.id] = found[job.id]
                    reason = Reason(ReasonCode.CHOSEN, f"starts on {option}: first in the queue")
                    assignments[job.id] = common.assign(job, taken[job.id], reason, snapshot)
                    break
            else:
                blocked_by = job.id
                text = f"waits for {largest[0].gpus} free GPUs"
                waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, str(largest[0]))
        return Plan(snapshot.round, assignments, waiting)
