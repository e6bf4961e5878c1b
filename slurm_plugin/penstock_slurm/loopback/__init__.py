"""A real Slurm on one machine: munged, slurmctld and a slurmd for each node, with typed GPUs that do not exist.

For the demo, for tests (`penstock_slurm.loopback.fixtures`) and for trying things out (`penstock loopback`).
"""

from penstock_slurm.loopback.cluster import ClusterStatus, LoopbackCluster, NodeStatus, default_folder
from penstock_slurm.loopback.errors import (
    CommandFailed,
    LoopbackError,
    NotRunning,
    PortInUse,
    ProgramsMissing,
)
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
