"""The simulated cluster and clock behind the daemon's ports, for what-if questions, tests, and machines without Slurm.

`simulate` compares policies and returns DataFrames.
"""

from penstock_scheduler.simulator.api import simulate
from penstock_scheduler.simulator.cluster import SimulatedCluster, SimulatedSettings, nodes_from_spec, open_cluster
from penstock_scheduler.simulator.disturbances import Latencies
from penstock_scheduler.simulator.frames import SimulationResult
from penstock_scheduler.simulator.jobs import SimulatedClock, SimulatedJob, SimulatedRun
from penstock_scheduler.simulator.truth import EstimatedJob

__all__ = [
    "EstimatedJob",
    "Latencies",
    "SimulatedClock",
    "SimulatedCluster",
    "SimulatedJob",
    "SimulatedRun",
    "SimulatedSettings",
    "SimulationResult",
    "nodes_from_spec",
    "open_cluster",
    "simulate",
]
