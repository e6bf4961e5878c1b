"""Section `[cloud]` of the settings file."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from penstock_cloud.command import CommandSettings
from penstock_scheduler.burst.manager.provider import Market
from penstock_scheduler.burst.manager.settings import BurstSettings

Folder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]
Storage = Annotated[str, Field(pattern=r"^(s3|efs)://[A-Za-z0-9][A-Za-z0-9._/-]*$|^fsx://[A-Za-z0-9.-]+/[A-Za-z0-9]+$")]

HOURS_A_MONTH = 730.0
"""AWS bills volumes by months of this length."""


class RegionSettings(BaseModel):
    """Section `[cloud.regions.NAME]`: what is different in a further region. What is not set is as in `[cloud]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    subnets: tuple[str, ...] = Field(description="Subnets to launch in, preferred ones first.")
    security_groups: tuple[str, ...] = Field(description="Security groups of the instances.")
    image: str = Field(description="The AMI, which differs from region to region.")
    instance_types: tuple[str, ...] | None = Field(default=None, description="Types that may be launched.")
    kms_key: str | None = Field(default=None, description="Key that encrypts volumes; keys belong to a region.")
    reservations: tuple[str, ...] = Field(default=(), description="Capacity reservations and capacity blocks there.")
    volume_usd_per_gb_month: NonNegativeFloat | None = Field(default=None, description="Price of a root volume.")
    prices: dict[str, PositiveFloat] = Field(default={}, description="On-demand prices there that are set by hand.")


class CloudSettings(BurstSettings):
    """The cloud: which jobs may burst, for how much, and what may be launched where on EC2. Enable it with
    `[daemon] cloud = "ec2"`, or "command" for commands of your own without EC2."""

    region: str = Field(default="us-east-1", description="EC2's region.")
    subnets: tuple[str, ...] = Field(
        default=(), description="Subnets to launch in, preferred ones first. Each is in one zone."
    )
    security_groups: tuple[str, ...] = Field(default=(), description="Security groups of the instances.")
    image: str = Field(
        default="",
        description="The AMI, or 'ssm:PARAMETER' for the one that a parameter of AWS Systems Manager names. It needs slurmd, "
        "munge with the site's key, and the site's file systems.",
    )
    instance_profile: str | None = Field(
        default=None, description="IAM instance profile; not set: none. Penstock itself needs none."
    )
    kms_key: str | None = Field(
        default=None,
        description="Key that encrypts volumes; not set: the account's default. Volumes are always encrypted.",
    )
    efa: bool = Field(
        default=False,
        description="Whether the instances of jobs on several nodes get Elastic Fabric Adapters, on types that have them. The "
        "image needs EFA's driver, and the security groups must allow all traffic among their members.",
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
    tags: dict[str, str] = Field(
        default={}, description="Further tags of the instances, for example for the site's bills."
    )
    mounts: dict[Folder, Storage] = Field(
        default={},
        description="Folders that instances mount: folder -> 's3://BUCKET/PREFIX' (by mount-s3), 'efs://FILE-SYSTEM-ID' or "
        "'fsx://DNS-NAME/MOUNT-NAME' (Lustre). An instance that cannot mount one ends itself.",
    )
    bucket: str | None = Field(
        default=None,
        description="S3 bucket for detached runs, if instances have no network connection to the site; not set: instances "
        "join Slurm as nodes.",
    )
    detached_user: str = Field(
        default="ubuntu", description="User of the image that detached jobs run as. An empty text means root."
    )
    volume_usd_per_gb_month: NonNegativeFloat = Field(
        default=0.08, description="Price of a root volume, US dollars per GB and month of 730 h (gp3 in us-east-1)."
    )
    prices: dict[str, PositiveFloat] = Field(
        default={},
        description="On-demand prices that are set by hand, with the site's discounts: instance type -> US dollars an hour. They "
        "replace EC2's, and are never too old.",
    )
    discount: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="Share by which the site pays less than EC2's on-demand prices."
    )
    regions: dict[str, RegionSettings] = Field(
        default={}, description="Further regions; an order goes to the cheapest offer that fits, wherever it is."
    )

    commands: dict[str, CommandSettings] = Field(
        default={}, description="Places of other clouds, each behind a command of your own; beside EC2, or without it."
    )

    price_days: ClassVar[float] = 31.0
    """Age in days beyond which an on-demand price is not used, so that its type is not offered. AWS changes such a price about
    once a year, and announces it weeks ahead."""

    spot_price_days: ClassVar[float] = 1.0
    """The same for spot prices, which change several times a day."""

    refresh_h: ClassVar[float] = 6.0
    """Hours after which penstockd fetches types and prices again: four times within the life of a spot price."""

    ipv4_usd_per_h: ClassVar[float] = 0.005
    """Price of an instance's public IPv4 address, US dollars per hour: AWS's in every region. An instance without one counts
    with it too, so a budget holds."""

    @model_validator(mode="after")
    def _places_have_different_names(self) -> CloudSettings:
        if twice := sorted({self.region, *self.regions} & set(self.commands)) or sorted(
            {self.region} & set(self.regions)
        ):
            raise ValueError(f"two places are named {twice[0]}; each region and each command needs a name of its own")
        return self

    @model_validator(mode="after")
    def _prices_are_of_known_types(self) -> CloudSettings:
        for each in self.everywhere():
            if wrong := sorted(set(each.prices) - set(each.instance_types)):
                raise ValueError(f"prices names {wrong[0]}, which is not in instance_types")
        return self

    @model_validator(mode="after")
    def _s3_needs_a_profile(self) -> CloudSettings:
        if self.instance_profile is None and any(what.startswith("s3://") for what in self.mounts.values()):
            raise ValueError("mounts of s3:// need instance_profile, with a role that may read and write the bucket")
        return self

    @property
    def extras_usd_per_h(self) -> float:
        """What an instance costs beyond its own price, US dollars per hour: its volume and its public IPv4 address."""
        return self.volume_gb * self.volume_usd_per_gb_month / HOURS_A_MONTH + self.ipv4_usd_per_h

    def everywhere(self) -> tuple[CloudSettings, ...]:
        """The settings as they are in each of the regions."""
        return tuple(self.in_region(name) for name in (self.region, *self.regions))

    def in_region(self, name: str) -> CloudSettings:
        """The settings as they are in one of the regions. A region that is not set up any more can be listed and tidied."""
        if name == self.region:
            return self
        other: dict[str, object] = {"region": name, "reservations": (), "subnets": (), "kms_key": None, "prices": {}}
        if (region := self.regions.get(name)) is not None:
            kept = {"instance_types": self.instance_types, "volume_usd_per_gb_month": self.volume_usd_per_gb_month}
            own = region.model_dump()
            other |= own | {key: value for key, value in kept.items() if own[key] is None}
        return self.model_copy(update=other)
