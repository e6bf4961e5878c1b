"""The library inside a training job: reports, checkpoints, and the daemon's requests.

Any program can use it::

    run = connect(folder)                       # claim an epoch for this run of the job
    checkpoints = Checkpoints(folder, run.epoch)
    state = checkpoints.latest()                # the last run's checkpoint, or None
    ...
    request = run.poll()                        # between steps: does the daemon ask for a checkpoint?

A PyTorch script becomes elastic with `start`, `TrainingRun.prepare` and `TrainingRun.step`: docs/user/executor.md.

The same script runs unchanged without Penstock and without Slurm. Then nothing is reported.
"""

from typing import TYPE_CHECKING

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.checkpoint import Checkpoint, Checkpoints, NotSaved, Superseded, Unreadable
from penstock_executor.client import Client, connect
from penstock_executor.environment import Environment, EnvironmentDisagrees, read_environment, share
from penstock_executor.profiling import profile

if TYPE_CHECKING:
    from penstock_executor.training.run import TrainingRun
    from penstock_executor.training.starting import start

__all__ = [
    "Allocation",
    "Checkpoint",
    "Checkpoints",
    "Client",
    "Environment",
    "EnvironmentDisagrees",
    "NotSaved",
    "Superseded",
    "TrainingRun",
    "UnknownAllocation",
    "Unreadable",
    "connect",
    "find_allocation",
    "profile",
    "read_environment",
    "share",
    "start",
]


def __getattr__(name: str) -> object:
    """Import elastic training only when it is used: it needs PyTorch, which takes seconds to import."""
    if name not in ("TrainingRun", "start"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError("penstock_executor.start needs PyTorch: pip install torch") from error
    from penstock_executor.training import starting

    return getattr(starting, name)
