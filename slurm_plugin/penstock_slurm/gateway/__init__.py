"""Slurm as Penstock reads it (`SlurmReader`) and changes it (`SlurmWriter`).

Slurm's commands are both (`CliGateway`). `PyslurmReader` reads the jobs through pyslurm in a process of its own.
"""

from __future__ import annotations

from penstock_slurm.gateway.base import (
    STAND_IN,
    JobPlacement,
    PlainShape,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmQos,
    SlurmReader,
    SlurmReservation,
    SlurmRun,
    SlurmWriter,
    Unknown,
    Unread,
    Write,
    slurm_minutes,
)
from penstock_slurm.gateway.cli import CliGateway
from penstock_slurm.gateway.errors import (
    AccountingAway,
    CommandsMissing,
    ControllerAway,
    HeldMeanwhile,
    JobGone,
    Messages,
    NotWaiting,
    Refused,
    SlurmError,
    TimedOut,
    Transient,
    UnreadableAnswer,
    Unregistered,
)

__all__ = [
    "STAND_IN",
    "AccountingAway",
    "CliGateway",
    "CommandsMissing",
    "ControllerAway",
    "HeldMeanwhile",
    "JobGone",
    "JobPlacement",
    "Messages",
    "NotWaiting",
    "PlainShape",
    "Refused",
    "SlurmError",
    "SlurmFeatures",
    "SlurmJob",
    "SlurmLimit",
    "SlurmNode",
    "SlurmPartition",
    "SlurmQos",
    "SlurmReader",
    "SlurmReservation",
    "SlurmRun",
    "SlurmWriter",
    "TimedOut",
    "Transient",
    "Unknown",
    "Unread",
    "UnreadableAnswer",
    "Unregistered",
    "Write",
    "slurm_minutes",
]
