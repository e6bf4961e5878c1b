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
    SpecError,
)
from penstock_slurm.loopback.spec import DEFAULT_SPEC, NodeSpec, parse_nodes
from penstock_slurm.loopback.waiting import wait_for

__all__ = [
    "DEFAULT_SPEC",
    "ClusterStatus",
    "CommandFailed",
    "LoopbackCluster",
    "LoopbackError",
    "NodeSpec",
    "NodeStatus",
    "NotRunning",
    "PortInUse",
    "ProgramsMissing",
    "SpecError",
    "default_folder",
    "parse_nodes",
    "wait_for",
]
