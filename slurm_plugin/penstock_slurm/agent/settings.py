"""Section `[agent]` of the settings file."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator

from penstock_profiles.node_channel import RUN_DIR
from penstock_scheduler.sharing.control import ControlSettings
from penstock_slurm.agent import mps
from penstock_slurm.gateway.hostlist import expand


class AgentSettings(BaseModel):
    """How penstock-agent works on each node."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run_dir: str = Field(
        default=RUN_DIR,
        description="Folder on the node for its jobs' files, in which they can write; %n is the node's name.",
    )
    state_dir: str = Field(
        default="/var/lib/penstock/agent-%n",
        description="Folder on the node for the agent's state, in which no job can write; %n is the node's name.",
    )
    mps_dir: str | None = Field(
        default=None,
        max_length=mps.LONGEST,
        description="Folder on the node in which the site's nvidia-cuda-mps-control answers; packs go through it whose jobs all "
        "begin in them, take no turns and are of one user. %n is the node's name. Absent: no MPS.",
    )
    gpu_file: str | None = Field(
        default=None,
        description="Device files of the GPUs in the order of their indexes in Slurm, as gres.conf's File= has them "
        "(/dev/nvidia[0-7]), for sites whose cgroup.conf has ConstrainDevices=yes; of several lines with `,` between them. "
        "Those that a node has not are no matter. Absent: as NVIDIA's driver names them, which is what AutoDetect=nvml takes.",
    )
    poll_s: PositiveFloat = Field(default=0.5, description="How often the agent looks at its order and at its jobs.")
    sample_s: PositiveFloat = Field(default=5.0, description="Between two samples of GPUs and processes.")
    suspend_wait_s: PositiveFloat = Field(
        default=30.0, description="How long a job that answers may take to move off its GPUs when its turn is over."
    )
    start_wait_s: NonNegativeFloat = Field(
        default=120.0,
        description="How long a job that tells no step yet counts as one that starts: until its first step its slice does not "
        "begin. One that has told none by then is served as one that does not speak with the agent.",
    )
    freeze_s: NonNegativeFloat = Field(
        default=2.5,
        description="How long Slurm takes to freeze a job (SIGSTOP comes 2.0 s after SIGTSTP): so long at least the GPUs of one "
        "that did not move off them count as used.",
    )
    host_memory_mb: NonNegativeInt | None = Field(
        default=None,
        description="Most of the node's memory that the state of suspended jobs may take, MB; absent: half of all there is.",
    )
    no_answer: Literal["freeze", "kill"] = Field(
        default="freeze",
        description="What becomes of a job that answers, but does not move off its GPUs in time: frozen where it is, or "
        "cancelled.",
    )
    misuse: Literal["tell", "kill"] = Field(
        default="kill",
        description="What becomes of a job that stays over its memory limit, runs on though suspended, or says what is not so: "
        "its user is told, or it is cancelled as well.",
    )
    misuse_s: PositiveFloat = Field(default=15.0, description="How long it may go on before that.")
    control: ControlSettings = Field(
        default=ControlSettings(), description="How a guaranteed job's speed is kept beside opportunistic ones."
    )

    @field_validator("gpu_file")
    @classmethod
    def _are_paths(cls, text: str | None) -> str | None:
        if text is not None:
            files = expand(text)
            if not files or not all(path.startswith("/") and "\n" not in path and "%" not in path for path in files):
                raise ValueError(f"{text!r} is not all paths from the root; give gres.conf's, such as /dev/nvidia[0-7]")
        return text

    @field_validator("mps_dir")
    @classmethod
    def _is_its_own(cls, folder: str | None) -> str | None:
        if folder is not None and (not folder.startswith("/") or "\n" in folder):
            raise ValueError(f"{folder!r} is no path from the root; give a folder such as /run/nvidia-mps")
        if folder is not None and folder.rstrip("/") == mps.DEFAULT:
            raise ValueError(
                f"{mps.DEFAULT} is where every CUDA process looks, also one that is to be frozen in turns; start the control "
                "daemon with CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps, and give that"
            )
        return folder
