"""The library inside a training job: reports, checkpoints, and the daemon's requests.

::

    run = connect(folder)                       # who am I, and which run of the job is this
    checkpoints = Checkpoints(folder, run.epoch)
    state = checkpoints.latest()                # where the last run got to, or None
    ...
    request = run.poll()                        # between steps: does the daemon want a checkpoint?

That is for any program. A PyTorch script becomes elastic by `start`, `TrainingRun.prepare` and `TrainingRun.step`:
docs/user/executor.md.

The same script runs unchanged without Penstock and without Slurm: then nobody is told anything.
"""

from typing import TYPE_CHECKING

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.checkpoint import Checkpoint, Checkpoints, NotSaved, Superseded
from penstock_executor.client import Client, connect
from penstock_executor.environment import Environment, EnvironmentDisagrees, read_environment
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
    "connect",
    "find_allocation",
    "profile",
    "read_environment",
    "start",
]


def __getattr__(name: str) -> object:
    """Elastic training needs PyTorch, which takes seconds to import: only whoever asks for it pays."""
    if name not in ("TrainingRun", "start"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError("penstock_executor.start needs PyTorch: pip install 'penstock[executor]'") from error
    from penstock_executor.training import starting

    return getattr(starting, name)
