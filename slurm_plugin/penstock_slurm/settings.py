"""Section `[slurm]` of the settings file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator


class SlurmSettings(BaseModel):
    """How to reach Slurm, and which partitions to manage."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    partitions: tuple[str, ...] = Field(
        min_length=1,
        description="Partitions that Penstock manages. It never touches jobs without a job spec there.",
    )
    adopt: tuple[Annotated[str, Field(pattern=r"^(account|user|partition):[A-Za-z0-9._+@-]+$")], ...] = Field(
        default=(),
        description="Whose jobs Penstock manages, such as ['account:ml', 'user:ada', 'partition:a100']. Without it, all jobs of "
        "`partitions` count. A job that Penstock has started stays managed until it ends.",
    )
    cloud_partition: str | None = Field(
        default=None,
        description="Partition of nodes with State=CLOUD, or of gateways, for jobs that burst to the cloud; not set: the site "
        "has none. No other jobs may run on its nodes.",
    )
    conf: Path | None = Field(
        default=None, description="Path of slurm.conf; not set: SLURM_CONF or the site's default."
    )
    reader: Literal["commands", "pyslurm"] = Field(
        default="commands",
        description="Through which Penstock reads Slurm's jobs. 'commands': Slurm's commands. 'pyslurm': pyslurm in a process of "
        "its own; Slurm's commands take over if it fails.",
    )
    spool_dir: Path = Field(
        default=Path("/var/spool/penstock"),
        description="Folder, shared by all nodes, for reports and control messages.",
    )
    command_timeout_s: PositiveFloat = Field(default=15.0, description="How long one Slurm command may take.")
    checkpoint_wait_s: NonNegativeFloat = Field(
        default=60.0, description="How long a job that answers requests may take to save before it is stopped."
    )
    start_patience_s: PositiveFloat = Field(
        default=60.0, description="How long Slurm may take to start a job where it was sent before Penstock gives up."
    )
    plain_after_s: PositiveFloat | None = Field(
        default=None,
        description="When penstockd has been away for this long, seconds, Slurm starts waiting jobs with adaptive flags by "
        "itself, as plain jobs with their fewest GPUs; not set: such jobs wait for penstockd.",
    )
    time_limit: Literal["total", "run"] = Field(
        default="total",
        description="'total': a move does not lengthen a job's time limit; 'run': each run has the whole limit, as in Slurm.",
    )
    plain_patience_s: NonNegativeFloat = Field(
        default=300.0,
        description="How long a plain job waits in a managed partition before GPUs are set aside for it. With a very large "
        "number, adaptive jobs make no room.",
    )
    agents: bool = Field(
        default=False,
        description="Whether penstock-agent runs on the nodes, so that jobs can share GPUs. Policies and stages that share GPUs "
        "need it.",
    )
    weight: Literal["none", "fair-share"] = Field(
        default="none",
        description="'fair-share': the weight of a job is 2 ** (2 F - 1), from 1/2 to 2, with Slurm's fair-share factor F of its "
        "user and account; 1 without one. Needs accounting and priority/multifactor.",
    )

    time_limit_grace_s: ClassVar[float] = 60.0
    """Time that each restart adds to a time limit over all runs, s: about what a move costs a job of several gigabytes."""

    agent_patience_s: ClassVar[float] = 300.0
    """How long an agent may be silent before its suspended jobs are resumed, if no other job uses their GPUs, or start again
    from their last checkpoint, s. An upgrade of the agent or a node under heavy load takes a minute or two."""

    reservation_lead_s: ClassVar[float] = 900.0
    """How long before a reservation begins Penstock vacates its nodes, s. Jobs get `checkpoint_wait_s` to
    save and leave, over several rounds."""

    rules_refresh_s: ClassVar[float] = 300.0
    """How often limits, fair share and topology are read, s: Slurm itself computes fair share every five minutes
    (PriorityCalcPeriod)."""

    credential_pause_s: ClassVar[float] = 1.05
    """Pause between the moment when Slurm begins to end a job's run and the job's next start, s. With less than 1 s, Slurm
    may kill the next run ('Job credential revoked'): 2 of 35 in a test without the pause, 0 of 40 with it."""

    @model_validator(mode="after")
    def _adopts_own_partitions(self) -> SlurmSettings:
        for each in self.adopt:
            kind, _, name = each.partition(":")
            if kind == "partition" and name not in self.partitions:
                raise ValueError(f"adopt: {each!r} is none of `partitions`, which are {', '.join(self.partitions)}")
        return self
