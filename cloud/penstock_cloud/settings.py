"""Section `[cloud]` of the settings file."""

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

from penstock_scheduler.burst.ledger import BudgetSettings

HOURS_A_MONTH = 730.0
"""AWS bills volumes by months of this length."""

Market = Literal["on-demand", "spot"]


class CloudSettings(BaseModel):
    """EC2: what may be launched, where, for how much, and which jobs may burst. Enable it with `[daemon] cloud = "ec2"`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    site: UUID = Field(
        description="This site's identity, a random UUID that no other site has. It is in the tags of all that the site "
        "creates. Penstock touches nothing that has another one, or none. Never change it while a job is in the cloud."
    )
    name: str = Field(
        pattern=r"^[A-Za-z0-9._-]{1,50}$", description="This site's name in tags, for people who read the bill."
    )
    region: str = Field(default="us-east-1", description="EC2's region.")
    endpoint: str | None = Field(
        default=None, description="URL of EC2's API, for a private endpoint; not set: the region's own."
    )
    subnets: tuple[str, ...] = Field(
        default=(), description="Subnets to launch in, preferred ones first. Each is in one zone."
    )
    security_groups: tuple[str, ...] = Field(default=(), description="Security groups of the instances.")
    image: str = Field(
        default="", description="The AMI. It needs slurmd, munge with the site's key, and the site's file systems."
    )
    instance_profile: str | None = Field(
        default=None, description="IAM instance profile; not set: none. Penstock itself needs none."
    )
    kms_key: str | None = Field(
        default=None,
        description="Key that encrypts volumes; not set: the account's default. Volumes are always encrypted.",
    )
    volume_gb: PositiveInt = Field(default=200, description="Size of the root volume; at least the image's.")
    instance_types: tuple[str, ...] = Field(
        default=("g4dn.xlarge", "g5.xlarge", "g5.12xlarge", "g6.xlarge"), description="Types that may be launched."
    )
    markets: tuple[Market, ...] = Field(
        default=("on-demand",), description="With 'spot' as well, jobs that can be stopped run on spot instances."
    )
    reservations: tuple[str, ...] = Field(
        default=(),
        description="Capacity reservations and capacity blocks (cr-...) that on-demand orders use first.",
    )
    price_days: PositiveFloat = Field(
        default=31.0,
        description="Age in days beyond which on-demand prices are not used, so that nothing is offered until "
        "`penstock cloud refresh` has fetched new ones.",
    )
    tags: dict[str, str] = Field(
        default={}, description="Further tags of the instances, for example for the site's bills."
    )
    share: Path = Field(
        default=Path("/var/spool/penstock/cloud"),
        description="Folder, shared with the cloud nodes, for the daemon's sign of life and interruption notices.",
    )
    slurm_conf: str = Field(default="/etc/slurm/slurm.conf", description="Path of slurm.conf on the cloud nodes.")
    bucket: str | None = Field(
        default=None,
        description="S3 bucket for detached runs, if instances have no network connection to the site; not set: instances "
        "join Slurm as nodes.",
    )
    s3_endpoint: str | None = Field(default=None, description="URL of S3's API; not set: the region's own.")
    detached_user: str = Field(
        default="ubuntu", description="User of the image that detached jobs run as; empty: root."
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
    volume_usd_per_gb_month: NonNegativeFloat = Field(
        default=0.08, description="Price of a root volume, US dollars per GB and month of 730 h (gp3 in us-east-1)."
    )
    ipv4_usd_per_h: NonNegativeFloat = Field(
        default=0.005, description="Price of an instance's public IPv4 address, US dollars per hour; 0: it has none."
    )
    budget: BudgetSettings = Field(
        default=BudgetSettings(), description="Hard limits in US dollars. Without any, no job may burst."
    )

    @property
    def extras_usd_per_h(self) -> float:
        """What an instance costs beyond its own price, US dollars per hour: its volume and its public IPv4 address."""
        return self.volume_gb * self.volume_usd_per_gb_month / HOURS_A_MONTH + self.ipv4_usd_per_h

    @model_validator(mode="before")
    @classmethod
    def _has_an_identity(cls, given: Any) -> Any:
        if isinstance(given, dict) and "site" not in given:
            raise ValueError(
                f'site is missing: this site\'s identity. Add site = "{uuid4()}", which was made for this message, and use it '
                "for no other site"
            )
        return given
