"""The files through which a job and the agent of its node talk to each other: one folder for each Slurm job.

::

    RUN_DIR/NUMBER/devices              by the agent: indexes of the GPUs to which the job is bound, such as "0,1"
    RUN_DIR/NUMBER/gpus                 by the agent: device files of the node's GPUs, by index, one on each line
    RUN_DIR/NUMBER/mps                  by the agent: folder of the MPS control daemon; only for jobs that use one
    RUN_DIR/NUMBER/limits               by the agent: variables of the job's tasks that limit it, one NAME=VALUE on each
                                        line; only for jobs with limits that hold for the job's whole life
    RUN_DIR/NUMBER/control.json         by the agent: a `JobControl`, replaced whole
    RUN_DIR/NUMBER/job/RANK.json        by the job: a `JobStatus` of each of its processes on the node, replaced whole

NUMBER is SLURM_JOB_ID. The folder `job` belongs to the job's user. All else belongs to root, so that a job cannot lift
its own limits. After AntMan's pair of files for each job (OSDI '20): a job reads the control file again when it has
changed. Each control message has a number, by which the status says which one is in force. A job without a control file
has no limits.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from penstock_profiles.wire import Message

RUN_DIR_VARIABLE = "PENSTOCK_RUN_DIR"
"""Environment variable that names the folder inside jobs; `%n` in it stands for the node's name."""

RUN_DIR = "/run/penstock"

MAX_STATUS_BYTES = 16 * 1024
"""Longer status files are ignored."""

MAX_RANKS = 64
"""Most processes of a job on a node. Further processes are ignored."""

Count = Annotated[int, Field(ge=0, le=2**53)]
"""Bounded, as `Amount` is, so that the agent can calculate with whatever a job reports."""

Amount = Annotated[float, Field(ge=0, le=1e15)]


class JobControl(Message):
    """A control message: what a job may use now."""

    version: Literal[1] = 1
    number: NonNegativeInt
    """Grows with each message."""
    compute: float = Field(default=1.0, ge=0, le=1)
    """Share of the time in which it may train: a duty cycle between its steps. 0: it stands still, but answers."""
    memory_mb: NonNegativeInt = 0
    """Memory on each of its GPUs, MB, for each process; 0: no limit."""
    suspend: str | None = None
    """Request to move off the GPUs after the step, report that, and stand still until it is withdrawn, or until
    SIGCONT."""


class JobStatus(Message):
    """What one process of a job does. Counts run from its start, so that two statuses give what happened in between."""

    version: Literal[1] = 1
    number: Count = 0
    """Number of the control message that is in force; 0: none yet."""
    pid: Count
    time_s: Amount
    """The node's clock, s since 1970."""
    compute: float = Field(default=1.0, ge=0, le=1)
    """Compute share that is in force."""
    steps: Count = 0
    seconds: Amount = 0.0
    """Sum of the durations of its steps, without pauses and without standing still, s."""
    squares: Amount = 0.0
    """Sum of the squares of these durations, s^2."""
    samples: Amount = 0.0
    """Samples that the whole job has trained on; 0: it does not count them."""
    memory_mb: Amount = 0.0
    """Memory that it holds on its GPU now, including the framework's cache, MB; 0 on a CPU."""
    utilisation: float | None = Field(default=None, ge=0, le=1)
    """Utilisation of its GPU when it runs alone, by its own account; NVML's measurement goes first. None: unknown."""
    suspends: bool = True
    """Whether it can move its state off the GPUs on request."""
    suspended: str | None = None
    """The request on which it stands still, moved off its GPUs."""
    moved_mb: Amount = 0.0
    """State that it has moved to host memory, MB."""
    left_mb: Amount = 0.0
    """Memory that the framework has left on the GPU, MB. The driver's context comes on top."""
    anywhere: bool = False
    """Whether, suspended, it can continue on other GPUs: it has nothing left on its GPUs, not even a driver's
    context."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES at its start."""


def run_dir(name: str, node: str) -> Path:
    """Folder of a node's agent: the name with `%n` replaced."""
    return Path(name.replace("%n", node))


def job_dir(folder: Path, number: int) -> Path:
    """Folder of one Slurm job."""
    return folder / str(number)


def devices_file(folder: Path, number: int) -> Path:
    """GPUs to which the job is bound. It is missing before the job first gets GPUs; its tasks wait for it."""
    return job_dir(folder, number) / "devices"


def bound_devices(folder: Path, number: int) -> tuple[int, ...]:
    """GPUs to which the job is bound; (): none."""
    with contextlib.suppress(OSError, ValueError):
        return tuple(
            int(index) for index in devices_file(folder, number).read_text("ascii").split(",") if index.strip()
        )
    return ()


def gpus_file(folder: Path, number: int) -> Path:
    """Device files of the node's GPUs by index, written before `devices_file`. A task waits until it can open its
    own."""
    return job_dir(folder, number) / "gpus"


def mps_file(folder: Path, number: int) -> Path:
    """Folder that the job's tasks get as CUDA_MPS_PIPE_DIRECTORY. It is written before `devices_file`."""
    return job_dir(folder, number) / "mps"


def limits_file(folder: Path, number: int) -> Path:
    """Variables that limit the job, one NAME=VALUE on each line. It is written before `devices_file`."""
    return job_dir(folder, number) / "limits"


def control_path(folder: Path, number: int) -> Path:
    """The agent's control message to the job."""
    return job_dir(folder, number) / "control.json"


def statuses_dir(folder: Path, number: int) -> Path:
    """Folder of the statuses of the job's processes."""
    return job_dir(folder, number) / "job"
