"""A real Slurm on one machine: munged, slurmctld and a slurmd for each node, with typed GPUs that do not exist.

It serves the demo, the tests (`penstock_slurm.loopback.fixtures`) and experiments (`penstock loopback`).
"""

from penstock_slurm.loopback.cluster import ClusterStatus, LoopbackCluster, NodeStatus
from penstock_slurm.loopback.errors import (
    CommandFailed,
    LoopbackError,
    NotRunning,
    PortInUse,
    ProgramsMissing,
)
from penstock_slurm.loopback.folder import default_folder
from penstock_slurm.loopback.waiting import wait_for

__all__ = [
    "ClusterStatus",
    "CommandFailed",
    "LoopbackCluster",
    "LoopbackError",
    "NodeStatus",
    "NotRunning",
    "PortInUse",
    "ProgramsMissing",
    "default_folder",
    "wait_for",
]
