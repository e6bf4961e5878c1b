"""Tells a second program of a Slurm job from a rerun of the first one.

Both find the checkpoint of a training that is done. For the rerun, nothing is left to do. The second program means
another training, and would end with success without a step. So a program that ends well notes whose training it has
completed. Slurm counts up when it starts a job again, so a rerun does not find its own note.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from penstock_executor.environment import Environment, read_environment
from penstock_executor.training.processes import Group

NAME = "completed.json"


def note(folder: Path, environment: Environment, steps: int) -> None:
    """A program of this run of the Slurm job ends well, and its training is done after so many steps."""
    if environment.job_id is not None:
        with contextlib.suppress(OSError):
            beside = folder / f"{NAME}.tmp"
            beside.write_text(json.dumps(_mark(environment, steps)))
            beside.rename(folder / NAME)


def is_anothers(folder: Path, environment: Environment, steps: int) -> bool:
    """Whether another program of this run of the Slurm job has completed the training with so many steps."""
    if environment.job_id is None or environment.relaunched or environment.measuring is not None:
        return False
    try:
        return bool(json.loads((folder / NAME).read_bytes()) == _mark(environment, steps))
    except (OSError, ValueError):
        return False


def refuse_anothers(folder: Path, group: Group, steps: int) -> None:
    """All processes call it. Raises RuntimeError if another program of this Slurm job has completed the training."""
    if group.from_first(group.rank == 0 and is_anothers(folder, read_environment(), steps)):
        raise RuntimeError(
            f"{folder}: another program of this Slurm job has completed this training, so that this one would train"
            f" nothing; give each training a folder of its own, such as px.start({str(folder / 'second')!r}); a"
            " program that only evaluates needs no run.epochs"
        )


def _mark(environment: Environment, steps: int) -> list[object]:
    return [environment.job_id, environment.restarts, steps]
