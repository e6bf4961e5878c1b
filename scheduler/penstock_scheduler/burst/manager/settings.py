"""The part of section `[cloud]` that is the same for all providers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import UUID, uuid4

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from penstock_scheduler.burst.deciding.ledger import CloudBudgets


class BurstSettings(BaseModel):
    """Which jobs may burst, and for how much. Besides the settings, it has the constants of the burst manager, so that a
    simulation and a test can have others (`model_copy`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    site: UUID = Field(
        description="This site's identity, a random UUID that no other site has. It is in the tags of all that the site "
        "creates. Penstock touches nothing that has another one, or none. Never change it while a job is in the cloud."
    )
    name: str = Field(
        pattern=r"^[A-Za-z0-9._-]{1,50}$", description="This site's name in tags, for people who read the bill."
    )
    share: Path = Field(
        default=Path("/var/spool/penstock/cloud"),
        description="Folder, shared with the cloud nodes, for the daemon's sign of life and interruption notices.",
    )
    share_users: tuple[str, ...] = Field(
        default=("slurm",),
        description="Users besides root and penstockd's own to whom that folder may belong: slurmctld's.",
    )
    boot_timeout_s: PositiveFloat = Field(
        default=600.0, description="Time after which an instance that has not joined Slurm is terminated."
    )
    silent_s: PositiveFloat = Field(
        default=3600.0,
        description="Time without a sign of life of the daemon after which an instance terminates itself.",
    )
    by_default: bool = Field(default=False, description="Whether jobs without --burst may burst.")
    wait: Literal["no-wait", "constant-wait", "runtime-wait", "resource-wait", "compute-wait", "star-wait"] = Field(
        default="compute-wait", description="Rule for the waiting budget of a job before it may burst."
    )
    waiting_budget_percent: NonNegativeFloat = Field(
        default=25.0, description="P: average waiting budget, in per cent of the mean running time."
    )
    short_h: PositiveFloat | None = Field(
        default=None, description="Jobs that run for less burst at once; not set: no such rule."
    )
    max_queue: NonNegativeInt | None = Field(
        default=None,
        description="Most jobs that wait for GPUs on site and may burst; beyond it, the newest burst at once; not set: any "
        "number.",
    )
    at_cap: Literal["finish", "recall"] = Field(
        default="finish", description="Effect on present runs when a budget is used up."
    )
    usd_per_gb: NonNegativeFloat = Field(
        default=0.09,
        description="Price of data transfer, US dollars per GB. The default is AWS's for data out of us-east-1.",
    )
    budget: CloudBudgets = Field(
        default=CloudBudgets(), description="Hard limits in US dollars. Without any, no job may burst."
    )

    boot_s: ClassVar[float] = 180.0
    """Expected time from the order to the first step, s. It is paid for. A commitment has the longest boot, so a wrong
    estimate breaks no budget."""

    reconcile_s: ClassVar[float] = 60.0
    """Time between two listings of all instances, s. EC2 bills a minute at least, so a leftover costs no less if it is found
    sooner."""

    capacity_back_off_s: ClassVar[float] = 600.0
    """First pause for a type and market without capacity, s. It doubles each time, up to an hour, so the first one matters
    little."""

    quota_back_off_s: ClassVar[float] = 3600.0
    """First pause for a market whose quota is used up, s. Only people raise a quota, within hours or days."""

    protected_after: ClassVar[int] = 5
    """Failed boots in a row after which penstockd launches no instance until `penstock cloud resume`. Each costs minutes of an
    instance, and a spot market may end two or three young ones in a row."""

    mean_runtime_h: ClassVar[float] = 1.0
    """Mean running time, until the site's own jobs tell it: after its first jobs, no assumption is needed."""

    mean_gpus: ClassVar[float] = 1.0
    """Mean GPUs of a job, as above."""

    t_max_h: ClassVar[float] = 0.25
    """Star-wait: longest first run in the cloud. The paper's."""

    patience: ClassVar[float] = 3.0
    """Star-wait: factor on the waiting budget of jobs that came back. The paper's."""

    margin: ClassVar[float] = 0.25
    """Share by which a commitment exceeds the expected cost. The budget gets the rest back after the run."""

    unknown_h: ClassVar[float] = 24.0
    """Hours committed to a job of unknown running time: a user who needs more can declare `--runtime`."""

    cost_per_usd: ClassVar[float] = 0.1
    """Weight of a dollar against the cost of a round without GPUs, which is about 1. Waiting budgets and caps are what a site
    sets to spend more or less."""

    bytes_per_s: ClassVar[float] = 125e6
    """Bandwidth to the cloud: 1 Gbit/s. It only estimates how long a job's declared data takes."""

    @model_validator(mode="before")
    @classmethod
    def _has_an_identity(cls, given: Any) -> Any:
        if isinstance(given, dict) and "site" not in given:
            raise ValueError(
                f'site is missing: this site\'s identity. Add site = "{uuid4()}", which was made for this message, and use it '
                "for no other site"
            )
        return given
