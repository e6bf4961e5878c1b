"""Section `[cloud]` of the settings file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from penstock_scheduler.burst.ledger import BudgetSettings

Market = Literal["on-demand", "spot"]


class CloudSettings(BaseModel):
    """EC2: what may be launched, where, for how much, and who may leave for it. `[daemon] cloud = "ec2"` switches it on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(
        default="penstock",
        pattern=r"^[A-Za-z0-9._-]{1,100}$",
        description="Marks this site's instances: what bears another name is never touched. One name for each site.",
    )
    region: str = Field(default="us-east-1", description="EC2's region.")
    endpoint: str | None = Field(
        default=None, description="URL of EC2's API, for a private endpoint; absent: the region's own."
    )
    subnets: tuple[str, ...] = Field(
        default=(), description="Subnets to launch in, the preferred first; each lies in one zone."
    )
    security_groups: tuple[str, ...] = Field(default=(), description="Security groups of the instances.")
    image: str = Field(
        default="", description="The AMI: with slurmd, munge and the site's munge key, and its file systems."
    )
    instance_profile: str | None = Field(
        default=None, description="IAM instance profile; absent: none, and a node needs none of Penstock's."
    )
    kms_key: str | None = Field(
        default=None, description="Key that volumes are encrypted with; absent: the account's default. They always are."
    )
    volume_gb: PositiveInt = Field(default=200, description="Size of the root volume; at least the image's.")
    instance_types: tuple[str, ...] = Field(
        default=("g4dn.xlarge", "g5.xlarge", "g5.12xlarge", "g6.xlarge"), description="Types that may be launched."
    )
    markets: tuple[Market, ...] = Field(
        default=("on-demand",), description="'spot' beside it lets jobs that can be stopped run where it is cheap."
    )
    reservations: tuple[str, ...] = Field(
        default=(),
        description="Capacity reservations and capacity blocks (cr-...) that orders on demand go into first.",
    )
    tags: dict[str, str] = Field(default={}, description="Further tags of the instances, for the site's bills.")
    share: Path = Field(
        default=Path("/var/spool/penstock/cloud"),
        description="Folder, on the cloud nodes too, for the daemon's sign of life and for notices of interruption.",
    )
    slurm_conf: str = Field(default="/etc/slurm/slurm.conf", description="slurm.conf as the cloud nodes see it.")
    bucket: str | None = Field(
        default=None,
        description="S3 bucket for detached runs, where no network joins the instances to the site; absent: instances join "
        "Slurm as nodes.",
    )
    s3_endpoint: str | None = Field(default=None, description="URL of S3's API; absent: the region's own.")
    detached_user: str = Field(
        default="ubuntu", description="User of the image that detached jobs run as; empty: root."
    )
    boot_s: PositiveFloat = Field(default=180.0, description="Seconds from the order to the first step; paid for.")
    boot_timeout_s: PositiveFloat = Field(
        default=600.0, description="An instance that has not joined Slurm by then is given back."
    )
    silent_s: PositiveFloat = Field(
        default=3600.0, description="Seconds of the daemon's silence after which an instance ends itself."
    )
    reconcile_s: PositiveFloat = Field(default=60.0, description="Seconds between two looks at all instances.")
    capacity_back_off_s: PositiveFloat = Field(
        default=600.0, description="Pause of a type and market that had no capacity; doubled each time, up to an hour."
    )
    quota_back_off_s: PositiveFloat = Field(default=3600.0, description="Pause of a market whose quota is used up.")
    protected_after: PositiveInt = Field(
        default=5,
        description="Boots that fail one after another before nothing more is launched until an admin says so.",
    )
    max_runs: PositiveInt = Field(default=32, description="Most jobs in the cloud at once.")
    by_default: bool = Field(default=False, description="Whether jobs that do not say (--burst) may leave.")
    wait: Literal["no-wait", "constant-wait", "runtime-wait", "resource-wait", "compute-wait", "star-wait"] = Field(
        default="compute-wait", description="What the wait for GPUs on site is proportional to."
    )
    waiting_budget_percent: NonNegativeFloat = Field(
        default=25.0, description="P: jobs wait so many per cent of their mean running time, on average."
    )
    mean_runtime_h: PositiveFloat = Field(
        default=1.0, description="Mean running time, until the site's own jobs say otherwise."
    )
    mean_gpus: PositiveFloat = Field(default=1.0, description="Mean GPUs of a job, until the site's own say otherwise.")
    short_h: PositiveFloat | None = Field(
        default=None, description="Jobs that run for less leave at once; absent: no such rule."
    )
    t_max_h: PositiveFloat = Field(default=0.25, description="Star-wait: longest first run in the cloud.")
    patience: NonNegativeFloat = Field(default=3.0, description="Star-wait: times the wait of who has come back.")
    at_cap: Literal["finish", "recall"] = Field(
        default="finish", description="What becomes of what runs when a budget is used up."
    )
    margin: NonNegativeFloat = Field(default=0.25, description="Share by which a commitment exceeds the expected cost.")
    unknown_h: PositiveFloat = Field(default=24.0, description="Hours committed to a job of unknown running time.")
    cost_per_usd: NonNegativeFloat = Field(
        default=0.1, description="What a dollar weighs beside the cost of leaving a job out for a round, about 1."
    )
    bytes_per_s: PositiveFloat = Field(default=125e6, description="Of the line to the cloud.")
    usd_per_gb: NonNegativeFloat = Field(default=0.0, description="Of data transfer.")
    budget: BudgetSettings = Field(
        default=BudgetSettings(), description="Hard caps in dollars; without any, nothing may leave."
    )
