"""A real Slurm on one machine: munged, slurmctld and a slurmd for each node, with typed GPUs that do not exist.

It serves the demo, the tests (`penstock_loopback.fixtures`) and experiments (`penstock loopback`).
"""

from penstock_loopback.cluster import ClusterStatus, LoopbackCluster, NodeStatus
from penstock_loopback.errors import (
    CommandFailed,
    LoopbackError,
    NotRunning,
    PortInUse,
    ProgramsMissing,
)
from penstock_loopback.folder import default_folder
from penstock_loopback.processes import wait_for

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
