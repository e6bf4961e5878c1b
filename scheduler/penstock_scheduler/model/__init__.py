"""The domain model: frozen values. Nothing here reads the clock, files or the environment."""

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
)
from penstock_scheduler.model.budget import GpuBudget, Period
from penstock_scheduler.model.cloud import BudgetLine, CloudRun, CloudState, Offer
from penstock_scheduler.model.cluster import Configuration, Node, Placement, Share
from penstock_scheduler.model.facts import JobFacts
from penstock_scheduler.model.job import EndedRun, GpuLimit, Job, JobId, Phase, Refusal
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
from penstock_scheduler.model.snapshot import ClusterState, Snapshot
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
    "KnownPair",
    "Limit",
    "Migrate",
    "Node",
    "Offer",
    "Outcome",
    "Pack",
    "PackSeen",
    "Period",
    "Phase",
    "Placement",
    "Plan",
    "Progress",
    "Reason",
    "ReasonCode",
    "Recall",
    "Refusal",
    "Resize",
    "Share",
    "SharedGpus",
    "SharingState",
    "Snapshot",
    "SolveReport",
    "SolveStatus",
    "Start",
    "parse_spec",
    "validate_spec",
]
