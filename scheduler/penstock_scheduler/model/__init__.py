"""The domain model: frozen values, no behaviour that reads the world."""

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
from penstock_scheduler.model.cloud import BudgetLine, CloudRun, CloudState, Offer
from penstock_scheduler.model.cluster import Configuration, Node, Placement, Share
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
from penstock_scheduler.model.snapshot import ClusterState, Snapshot
from penstock_scheduler.model.wish import Adaptivity, Burst, EstimatorKind, GpuClass, JobWish, parse_wish, validate_wish

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
    "EstimatorKind",
    "GpuClass",
    "GpuLimit",
    "Hold",
    "Job",
    "JobId",
    "JobWish",
    "Migrate",
    "Node",
    "Offer",
    "Outcome",
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
    "Snapshot",
    "SolveReport",
    "SolveStatus",
    "Start",
    "parse_wish",
    "validate_wish",
]
