"""Section `[slurm]` of the settings file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat


class SlurmSettings(BaseModel):
    """How to reach Slurm, and what of it to manage."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    partitions: tuple[str, ...] = Field(
        min_length=1,
        description="Partitions that Penstock manages. Jobs that did not ask for it are never touched there.",
    )
    cloud_partition: str | None = Field(
        default=None,
        description="Partition of nodes with State=CLOUD, or of gateways, for jobs that leave for the cloud; absent: the site "
        "has none. Its nodes are given to nobody else.",
    )
    conf: Path | None = Field(default=None, description="slurm.conf; absent: as SLURM_CONF or the site's default says.")
    backend: Literal["cli", "pyslurm"] = Field(
        default="cli",
        description="'cli': Slurm's commands, any version. 'pyslurm': needs the pyslurm of Slurm's version.",
    )
    spool_dir: Path = Field(
        default=Path("/var/spool/penstock"), description="Folder, on all nodes, through which jobs and the daemon talk."
    )
    command_timeout_s: PositiveFloat = Field(default=15.0, description="How long one Slurm command may take.")
    checkpoint_wait_s: NonNegativeFloat = Field(
        default=60.0, description="How long a job that answers requests may take to save before Slurm stops it."
    )
    start_patience_s: PositiveFloat = Field(
        default=60.0, description="How long Slurm may take to start a job where it was sent before that is given up."
    )
    plain_after_s: PositiveFloat | None = Field(
        default=None,
        description="Seconds of penstockd's silence after which Slurm starts a waiting job with adaptive flags by itself, as "
        "a plain job with its fewest GPUs; absent: such jobs wait for penstockd.",
    )
    time_limit: Literal["total", "run"] = Field(
        default="total",
        description="'total': a job's time limit counts over all its runs; 'run': each run has it anew, as Slurm has it.",
    )
    time_limit_grace_s: NonNegativeFloat = Field(
        default=60.0,
        description="Time that each restart adds to a time limit over all runs: about what a move takes of it.",
    )
    plain_patience_s: NonNegativeFloat = Field(
        default=300.0,
        description="How long a plain job waits in a managed partition before GPUs are set aside for it. A large number: "
        "adaptive jobs make no room.",
    )
    agents: bool = Field(
        default=False,
        description="Whether penstock-agent runs on the nodes, so that jobs can share GPUs: policies and stages that let them "
        "need it.",
    )
    presets: dict[str, dict[str, bool | int | float | str]] = Field(
        default={}, description="Options of sbatch's under a name, for `penstock submit --preset NAME`."
    )
    reservation_lead_s: NonNegativeFloat = Field(
        default=900.0,
        description="How long before a reservation begins its nodes get no more jobs, and jobs leave them.",
    )
    weight: Literal["none", "fair-share"] = Field(
        default="none",
        description="'fair-share': jobs weigh 2 ** (2 F - 1), from 1/2 to 2, for Slurm's fair-share factor F of their user and "
        "account; 1 without one. Needs accounting and priority/multifactor.",
    )
    rules_refresh_s: PositiveFloat = Field(
        default=300.0, description="How often limits, fair share and topology are read anew; they change seldom."
    )
    credential_pause_s: NonNegativeFloat = Field(
        default=1.2,
        description="Pause between a job's stop and its next start. With less than 1.1 s Slurm 22.05 was seen to kill "
        "jobs ('Job credential revoked'): 2 of 35 without it, 0 of 40 with it.",
    )
