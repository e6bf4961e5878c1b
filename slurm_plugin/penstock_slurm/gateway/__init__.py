"""The gateway through which Penstock reads Slurm and changes its jobs, with the back ends `cli` and `pyslurm`.

`docs/developer/slurm-gateway.md` says what each back end does, and with which versions it was tried.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock_scheduler.store.leadership.lease import ALONE
from penstock_slurm.gateway.base import (
    STAND_IN,
    Gateway,
    JobPlacement,
    PlainShape,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    SlurmRun,
    Unknown,
    Unread,
    Write,
    slurm_minutes,
)
from penstock_slurm.gateway.cli import CliGateway
from penstock_slurm.gateway.errors import (
    AccountingAway,
    BackendMissing,
    ControllerAway,
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

if TYPE_CHECKING:  # the agent loads no more than it needs
    from penstock_scheduler.api.ports import Leadership

__all__ = [
    "STAND_IN",
    "AccountingAway",
    "BackendMissing",
    "CliGateway",
    "ControllerAway",
    "Gateway",
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
    "SlurmReservation",
    "SlurmRun",
    "TimedOut",
    "Transient",
    "Unknown",
    "Unread",
    "UnreadableAnswer",
    "Unregistered",
    "Write",
    "open_gateway",
    "slurm_minutes",
]


PYSLURM_IS_REFUSED = (
    "no release of pyslurm passes the contract tests of the gateway: its hold ends penstockd, its requeue revives cancelled "
    "jobs, and it cannot change a job's number of nodes (docs/decisions/0015-pyslurm-is-refused.md); set [slurm] backend = 'cli'"
)


def open_gateway(
    backend: Literal["cli", "pyslurm"],
    *,
    conf: Path | None,
    timeout_s: float,
    leadership: Leadership = ALONE,
    messages: Messages | None = None,
) -> Gateway:
    """The gateway to the Slurm of `conf`. None: that of SLURM_CONF or the default. Contacts no daemon yet.

    `timeout_s` is the time limit of one command, in seconds. `leadership` is asked before each command that changes something.
    `messages` counts what Slurm says that is not known, for several gateways; None: for this one alone.

    Raises:
        BackendMissing: Slurm's commands are not on this machine, or `backend` is pyslurm, which does not pass the contract tests.
            It is also a ConfigError.
    """
    if backend == "pyslurm":
        raise BackendMissing(PYSLURM_IS_REFUSED, command="pyslurm")
    return CliGateway(conf=conf, timeout_s=timeout_s, leadership=leadership, messages=messages)
