"""The library inside a training job: reports, checkpoints, and the daemon's requests.

::

    run = connect(folder)                       # who am I, and which run of the job is this
    checkpoints = Checkpoints(folder, run.epoch)
    state = checkpoints.latest()                # where the last run got to, or None
    ...
    request = run.poll()                        # between steps: does the daemon want a checkpoint?

The same script runs unchanged without Penstock and without Slurm: then nobody is told anything.
"""

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.checkpoint import Checkpoint, Checkpoints, Fenced, NotSaved
from penstock_executor.client import Client, connect
from penstock_executor.environment import Environment, EnvironmentDisagrees, read_environment
from penstock_executor.profiling import profile

__all__ = [
    "Allocation",
    "Checkpoint",
    "Checkpoints",
    "Client",
    "Environment",
    "EnvironmentDisagrees",
    "Fenced",
    "NotSaved",
    "UnknownAllocation",
    "connect",
    "find_allocation",
    "profile",
    "read_environment",
]
