"""What a job and the agent of its node say to each other: files on the node, one folder for each job of Slurm's.

::

    RUN_DIR/NUMBER/devices              the agent's: indexes of the GPUs that the job is bound to, such as "0,1"
    RUN_DIR/NUMBER/gpus                 the agent's: device files of the node's GPUs, by index, one a line
    RUN_DIR/NUMBER/mps                  the agent's: the folder of the MPS control daemon that it goes through; most have none
    RUN_DIR/NUMBER/control.json         the agent's: a `JobControl`, replaced whole
    RUN_DIR/NUMBER/job/RANK.json        the job's: a `JobStatus` of each of its processes on the node, replaced whole

NUMBER is SLURM_JOB_ID. All but the folder `job` is root's, so that a job cannot lift its own limits; `job` is its user's.
After AntMan's pair of files for each job (OSDI '20): the control file is read again when it has changed, and carries a number, so
that the status can say which one is carried out. A job that sees no control file runs as it likes.
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
"""A longer status file is none of ours."""

MAX_RANKS = 64
"""Most processes of a job on a node that are listened to."""

Count = Annotated[int, Field(ge=0, le=2**53)]
"""Bounded, as `Amount` is: whatever a job says, the agent can reckon with it."""

Amount = Annotated[float, Field(ge=0, le=1e15)]


class JobControl(Message):
    """What a job may use now."""

    version: Literal[1] = 1
    number: NonNegativeInt
    """Grows with each change."""
    compute: float = Field(default=1.0, ge=0, le=1)
    """Part of the time in which it may train: a duty cycle between its steps. 0: it stands still, but answers."""
    memory_mb: NonNegativeInt = 0
    """Memory on each of its GPUs, MB, for each process; 0: no limit."""
    suspend: str | None = None
    """A request: after the step move all off the GPUs, say so, and stand still until it is withdrawn, or SIGCONT."""


class JobStatus(Message):
    """What one process of a job does. Counts are from its beginning, so that any two of them give what was between."""

    version: Literal[1] = 1
    number: Count = 0
    """The control that it carries out; 0: none yet."""
    pid: Count
    time_s: Amount
    """The node's clock, s since 1970."""
    compute: float = Field(default=1.0, ge=0, le=1)
    """As carried out."""
    steps: Count = 0
    seconds: Amount = 0.0
    """Sum of the steps' durations, without pauses put in and without standing still, s."""
    squares: Amount = 0.0
    """Sum of their squares, s^2."""
    samples: Amount = 0.0
    """Trained on, of the whole job; 0: it does not count them."""
    memory_mb: Amount = 0.0
    """Held on its GPU now, MB, the framework's cache included; on a CPU 0."""
    utilisation: float | None = Field(default=None, ge=0, le=1)
    """Part of its GPU that it uses alone, where it knows; what NVML measures counts more. None: it does not know."""
    suspends: bool = True
    """Whether it can move its state off the GPUs when asked to."""
    suspended: str | None = None
    """The request after which it stands still, moved off its GPUs."""
    moved_mb: Amount = 0.0
    """Moved to the host's memory, MB."""
    left_mb: Amount = 0.0
    """Left on the GPU by the framework, MB; the driver's own context comes on top."""
    anywhere: bool = False
    """Whether, suspended, it may go on on any other GPUs: it has nothing on those that it had, not even a driver's context."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES as it found it."""


def run_dir(name: str, node: str) -> Path:
    """The folder of a node's agent, `%n` in its name replaced."""
    return Path(name.replace("%n", node))


def job_dir(folder: Path, number: int) -> Path:
    """The folder of one job of Slurm's."""
    return folder / str(number)


def devices_file(folder: Path, number: int) -> Path:
    """The GPUs that the job is bound to. It is not there before the job's first turn: a task waits for it."""
    return job_dir(folder, number) / "devices"


def bound_devices(folder: Path, number: int) -> tuple[int, ...]:
    """The GPUs that the job is bound to, as its file says; () if it says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return tuple(int(word) for word in devices_file(folder, number).read_text("ascii").split(",") if word.strip())
    return ()


def gpus_file(folder: Path, number: int) -> Path:
    """The device files of the node's GPUs, by index, written before `devices_file`: a task waits until it may open its own."""
    return job_dir(folder, number) / "gpus"


def mps_file(folder: Path, number: int) -> Path:
    """Names the folder that the job's tasks get as CUDA_MPS_PIPE_DIRECTORY. It is written before `devices_file`."""
    return job_dir(folder, number) / "mps"


def control_path(folder: Path, number: int) -> Path:
    """What the agent tells the job."""
    return job_dir(folder, number) / "control.json"


def statuses_dir(folder: Path, number: int) -> Path:
    """Where the job's processes tell what they do."""
    return job_dir(folder, number) / "job"
