"""The domain model: frozen values. Nothing here reads the clock, files or the environment.

A name is imported from its module when it is first used, so that a client, which needs only the job spec, does not import the
models of jobs' speed and with them NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_scheduler.model.actions import (
        Action,
        BurstJob,
        CloudAction,
        Hold,
        Migrate,
        Outcome,
        Progress,
        Recall,
        Resize,
        Start,
        Stop,
        StopCode,
    )
    from penstock_scheduler.model.cloud import BudgetLine, CloudRun, CloudState, GpuBudget, Offer, Period
    from penstock_scheduler.model.cluster import (
        Configuration,
        LeaveCause,
        LeaveRequest,
        Node,
        NodeChoice,
        Outranks,
        Partition,
        Placement,
        Preemptible,
        ResourceRequest,
        Share,
        host_of,
        on_parts,
        part_of_node,
    )
    from penstock_scheduler.model.facts import JobFacts, Promise
    from penstock_scheduler.model.job import (
        EndedRun,
        GpuLimit,
        Job,
        JobId,
        Phase,
        PlainJob,
        Refusal,
        Suspension,
        WaitingJob,
    )
    from penstock_scheduler.model.plan import (
        Assignment,
        Batch,
        CloudAssignment,
        Plan,
        Reason,
        ReasonCode,
        SolveReport,
        SolveStatus,
    )
    from penstock_scheduler.model.sharing import JobUse, KnownPair, Limit, Pack, PackSeen, SharedGpus, SharingState
    from penstock_scheduler.model.snapshot import ClusterState, Kept, Snapshot, UnknownValue
    from penstock_scheduler.model.spec import Adaptivity, Burst, GpuClass, JobSpec, parse_spec, validate_spec

__all__ = [
    "Action",
    "Adaptivity",
    "Assignment",
    "Batch",
    "BudgetLine",
    "Burst",
    "BurstJob",
    "CloudAction",
    "CloudAssignment",
    "CloudRun",
    "CloudState",
    "ClusterState",
    "Configuration",
    "EndedRun",
    "GpuBudget",
    "GpuClass",
    "GpuLimit",
    "Hold",
    "Job",
    "JobFacts",
    "JobId",
    "JobSpec",
    "JobUse",
    "Kept",
    "KnownPair",
    "LeaveCause",
    "LeaveRequest",
    "Limit",
    "Migrate",
    "Node",
    "NodeChoice",
    "Offer",
    "Outcome",
    "Outranks",
    "Pack",
    "PackSeen",
    "Partition",
    "Period",
    "Phase",
    "Placement",
    "PlainJob",
    "Plan",
    "Preemptible",
    "Progress",
    "Promise",
    "Reason",
    "ReasonCode",
    "Recall",
    "Refusal",
    "Resize",
    "ResourceRequest",
    "Share",
    "SharedGpus",
    "SharingState",
    "Snapshot",
    "SolveReport",
    "SolveStatus",
    "Start",
    "Stop",
    "StopCode",
    "Suspension",
    "UnknownValue",
    "WaitingJob",
    "host_of",
    "on_parts",
    "parse_spec",
    "part_of_node",
    "validate_spec",
]


_MODULES = (
    *("spec", "job", "cluster", "sharing", "cloud", "actions", "plan"),
    *("facts", "snapshot"),  # these import NumPy
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
