"""The part of section `[cloud]` that is the same for all providers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from penstock_scheduler.burst.deciding.ledger import BudgetSettings


class BurstSettings(BaseModel):
    """Which jobs may burst, and for how much."""

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
    boot_s: PositiveFloat = Field(
        default=180.0, description="Expected time from the order to the first step, seconds. It is paid for."
    )
    boot_timeout_s: PositiveFloat = Field(
        default=600.0, description="Time after which an instance that has not joined Slurm is terminated."
    )
    silent_s: PositiveFloat = Field(
        default=3600.0,
        description="Time without a sign of life of the daemon after which an instance terminates itself.",
    )
    reconcile_s: PositiveFloat = Field(default=60.0, description="Seconds between two listings of all instances.")
    capacity_back_off_s: PositiveFloat = Field(
        default=600.0, description="Pause for a type and market without capacity. It doubles each time, up to an hour."
    )
    quota_back_off_s: PositiveFloat = Field(default=3600.0, description="Pause for a market whose quota is used up.")
    protected_after: PositiveInt = Field(
        default=5,
        description="Failed boots in a row after which nothing is launched until `penstock cloud resume`.",
    )
    max_runs: PositiveInt = Field(default=32, description="Most jobs in the cloud at once.")
    by_default: bool = Field(default=False, description="Whether jobs without --burst may burst.")
    wait: Literal["no-wait", "constant-wait", "runtime-wait", "resource-wait", "compute-wait", "star-wait"] = Field(
        default="compute-wait", description="Rule for the waiting budget of a job before it may burst."
    )
    waiting_budget_percent: NonNegativeFloat = Field(
        default=25.0, description="P: average waiting budget, in per cent of the mean running time."
    )
    mean_runtime_h: PositiveFloat = Field(
        default=1.0, description="Mean running time, until it is known from the site's own jobs."
    )
    mean_gpus: PositiveFloat = Field(
        default=1.0, description="Mean GPUs of a job, until known from the site's own jobs."
    )
    short_h: PositiveFloat | None = Field(
        default=None, description="Jobs that run for less burst at once; not set: no such rule."
    )
    max_queue: NonNegativeInt | None = Field(
        default=None,
        description="Most jobs that wait for GPUs on site and may burst; beyond it, the newest burst at once; not set: any "
        "number.",
    )
    t_max_h: PositiveFloat = Field(default=0.25, description="Star-wait: longest first run in the cloud.")
    patience: NonNegativeFloat = Field(
        default=3.0, description="Star-wait: factor on the waiting budget of jobs that came back."
    )
    at_cap: Literal["finish", "recall"] = Field(
        default="finish", description="What happens to present runs when a budget is used up."
    )
    margin: NonNegativeFloat = Field(default=0.25, description="Share by which a commitment exceeds the expected cost.")
    unknown_h: PositiveFloat = Field(default=24.0, description="Hours committed to a job of unknown running time.")
    cost_per_usd: NonNegativeFloat = Field(
        default=0.1, description="Weight of a dollar against the cost of a round without GPUs, which is about 1."
    )
    bytes_per_s: PositiveFloat = Field(default=125e6, description="Bandwidth to the cloud, bytes per second.")
    usd_per_gb: NonNegativeFloat = Field(
        default=0.09,
        description="Price of data transfer, US dollars per GB. The default is AWS's for data out of us-east-1.",
    )
    budget: BudgetSettings = Field(
        default=BudgetSettings(), description="Hard limits in US dollars. Without any, no job may burst."
    )

    @model_validator(mode="before")
    @classmethod
    def _has_an_identity(cls, given: Any) -> Any:
        if isinstance(given, dict) and "site" not in given:
            raise ValueError(
                f'site is missing: this site\'s identity. Add site = "{uuid4()}", which was made for this message, and use it '
                "for no other site"
            )
        return given
