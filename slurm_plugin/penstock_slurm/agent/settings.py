"""Section `[agent]` of the settings file."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler.rounds.sharing.control import ControlSettings
from penstock_slurm.agent import limits, mps
from penstock_slurm.gateway.hostlist import expand


class AgentSettings(BaseModel):
    """Settings of penstock-agent, the same on each node."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run_dir: str = Field(
        default=RUN_DIR,
        description="Folder on the node for files of its jobs, which the jobs can write; %n is the node's name.",
    )
    state_dir: str = Field(
        default="/var/lib/penstock/agent-%n",
        description="Folder on the node for the agent's state, which no job can write; %n is the node's name.",
    )
    mps_dir: str | None = Field(
        default=None,
        max_length=mps.LONGEST,
        description="Folder on the node in which the site's nvidia-cuda-mps-control answers; %n is the node's name. "
        "A pack uses MPS if all of its jobs begin in it, belong to one user and are not time-sliced. Absent: no MPS.",
    )
    mps_percentage: int = Field(
        default=20,
        ge=1,
        le=100,
        description="Most of a GPU's multiprocessors that an opportunistic job beside a guaranteed one may use as a client "
        "of MPS, percent. It holds until the job's processes end.",
    )
    limiter: str | None = Field(
        default=None,
        max_length=limits.LONGEST,
        description="HAMi-core's libvgpu.so on the node. Jobs that begin in a pack without MPS preload it, so that none can "
        "take more GPU memory than its limit when it began. Absent: a job that takes more is cancelled (misuse).",
    )
    gpu_file: str | None = Field(
        default=None,
        description="Device files of the GPUs in the order of Slurm's indexes, as in File= of gres.conf, such as "
        "/dev/nvidia[0-7]; separate several lines with commas. Needed only if cgroup.conf has ConstrainDevices=yes. "
        "Files that are missing on a node are ignored. Absent: the files as NVIDIA's driver names them, which "
        "AutoDetect=nvml uses, too.",
    )
    host_memory_mb: NonNegativeInt | None = Field(
        default=None,
        description="Most host memory that the state of suspended jobs may take, MB. Absent: half of the node's memory.",
    )
    no_answer: Literal["freeze", "kill"] = Field(
        default="freeze",
        description="Action on a job that answers but does not move off its GPUs in time: `freeze` freezes it "
        "in place, `kill` cancels it.",
    )
    cuda_checkpoint: Literal["auto", "off"] = Field(
        default="off",
        description="Whether NVIDIA's driver moves the GPU memory of a job that does not move off its GPU by itself to "
        "the host when it is suspended: `auto`: if it can (driver 570 or later, one process on one GPU); `off`: never. "
        "Else the job is frozen with its memory on the GPU. A process may not survive a checkpoint that fails.",
    )
    misuse: Literal["tell", "kill"] = Field(
        default="kill",
        description="Action on a job that exceeds its memory limit, runs while it is suspended, or reports "
        "what is not true: `tell` informs its user, `kill` also cancels the job.",
    )
    control: ControlSettings = Field(
        default=ControlSettings(), description="How a guaranteed job keeps its speed beside opportunistic jobs."
    )

    gone: ClassVar[dict[str, str]] = {"gpu_time": "NVIDIA's driver counts the GPU time of jobs"}

    poll_s: ClassVar[float] = 0.5
    """How often the agent reads its order and checks its jobs, s. A time slice is 60 s, so a later look would waste a
    hundredth of it; a busy node reads a few files each time."""

    sample_s: ClassVar[float] = 5.0
    """Time between two samples of GPUs and processes, s. NVIDIA's driver keeps its own counters in between."""

    suspend_wait_s: PositiveFloat = Field(
        default=30.0,
        description="How long a job that answers may take to leave its GPUs after its time slice, seconds.",
    )
    start_wait_s: NonNegativeFloat = Field(
        default=120.0,
        description="How long a job may take to report its first step, seconds. Its time slice begins with that "
        "step. A job that has reported no step by then is treated as one that does not report to the agent.",
    )
    freeze_s: ClassVar[float] = 2.5
    """How long Slurm takes to freeze a job, s: it sends SIGSTOP 2.0 s after SIGTSTP, a constant of slurmd. If a job did not
    move off its GPUs, they count as used for at least this long."""

    misuse_s: ClassVar[float] = 15.0
    """How long a job may misuse its node before it is contained, s: three samples, so that one wrong sample cancels no
    job."""

    @field_validator("gpu_file")
    @classmethod
    def _are_paths(cls, text: str | None) -> str | None:
        if text is not None:
            files = expand(text)
            if not files or not all(path.startswith("/") and "\n" not in path and "%" not in path for path in files):
                raise ValueError(f"{text!r} must be absolute paths as in gres.conf, such as /dev/nvidia[0-7]")
        return text

    @field_validator("limiter")
    @classmethod
    def _is_one_path(cls, path: str | None) -> str | None:
        if path is not None and (not path.startswith("/") or set(path) & set(" :\n")):
            raise ValueError(
                f"{path!r} must be an absolute path without spaces and colons, which LD_PRELOAD would split"
            )
        return path

    @field_validator("mps_dir")
    @classmethod
    def _is_its_own(cls, folder: str | None) -> str | None:
        if folder is not None and (not folder.startswith("/") or "\n" in folder):
            raise ValueError(f"{folder!r} must be an absolute path, such as /run/nvidia-mps")
        if folder is not None and folder.rstrip("/") == mps.DEFAULT:
            raise ValueError(
                f"every CUDA process uses MPS in {mps.DEFAULT}, also processes that will be suspended; start the "
                "control daemon with CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps, and use that folder here"
            )
        return folder
