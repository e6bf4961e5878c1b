"""The domain model: frozen values, no behaviour that reads the world."""

from penstock_scheduler.model.actions import Action, Hold, Migrate, Outcome, Progress, Resize, Start
from penstock_scheduler.model.cluster import Configuration, Node, Placement, Share
from penstock_scheduler.model.job import EndedRun, GpuLimit, Job, JobId, Phase, Refusal
from penstock_scheduler.model.plan import Assignment, Batch, Plan, Reason, ReasonCode, SolveReport, SolveStatus
from penstock_scheduler.model.snapshot import ClusterState, Snapshot
from penstock_scheduler.model.wish import Adaptivity, Burst, EstimatorKind, GpuClass, JobWish, parse_wish, validate_wish

__all__ = [
    "Action",
    "Adaptivity",
    "Assignment",
    "Batch",
    "Burst",
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
    "Outcome",
    "Phase",
    "Placement",
    "Plan",
    "Progress",
    "Reason",
    "ReasonCode",
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
