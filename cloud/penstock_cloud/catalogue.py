"""GPU instance types of EC2 and their prices: a dated table that comes with Penstock, and what EC2 reports.

A refresh asks `DescribeInstanceTypes`, the pricing API and the spot price history. Its result is kept in a file, so that a
daemon that starts while EC2 does not answer still knows the prices. Before the first refresh, only on-demand prices of one
region are known. Spot prices change within hours, so no table contains them.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from penstock_profiles.files import save_whole
from penstock_profiles.gpus import Gpus, UnknownGpuError
from penstock_scheduler.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "ec2-catalogue.json"
"""Name of the fetched file in the daemon's state_dir."""

PRICING_REGION = "us-east-1"
"""Region of the pricing API, which has the prices of all regions."""

WHOLE = 0.75
"""A GPU with less than this share of its type's memory is a slice of a GPU (g6f), which the models do not describe."""

SPOT = "Linux/UNIX"
"""The operating system that spot prices are asked for."""


class InstanceType(BaseModel):
    """An instance type, and its on-demand price in US dollars per hour; None: not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_type: str
    gpu_type: str
    gpus: PositiveInt
    gpu_memory_mib: PositiveInt
    vcpus: PositiveInt
    memory_mib: PositiveInt
    usd_per_h: PositiveFloat | None = None
    spot_usd_per_h: dict[str, NonNegativeFloat] = {}
    """Zone -> latest spot price, US dollars per hour."""


class Catalogue(BaseModel):
    """Instance types of one region, as of a date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    region: str
    at: date
    """When EC2 described the types, or the date of the shipped table."""
    priced_at: date | None = None
    """When the on-demand prices were true, if not at `at`."""
    types: dict[str, InstanceType]

    @property
    def prices_as_of(self) -> date:
        """When the on-demand prices were true."""
        return self.priced_at or self.at

    def expired(self, today: date, days: float) -> str | None:
        """Why the on-demand prices may not be used any more, with the remedy; None: they may."""
        age = (today - self.prices_as_of).days
        if age <= days:
            return None
        return (
            f"on-demand prices are as of {self.prices_as_of}, {age} days ago, and [cloud] price_days={days:g}; run "
            "`penstock cloud refresh`, and daily from then on"
        )

    def usd_per_h(self, instance_type: str, market: str, zones: Iterable[str]) -> float | None:
        """Highest price on a market (`on-demand` or `spot`) in these zones, since an order may be served in any of them."""
        known = self.types.get(instance_type)
        if known is None or market == "on-demand":
            return None if known is None else known.usd_per_h
        prices = [known.spot_usd_per_h[zone] for zone in zones if zone in known.spot_usd_per_h]
        return max(prices, default=None)


def file_of(state_dir: Path, region: str, *, home: str) -> Path:
    """The fetched file of a region. `home` is the one of `[cloud] region`."""
    return state_dir / (FILE if region == home else f"ec2-catalogue-{region}.json")


def shipped() -> Catalogue:
    """The table that comes with Penstock."""
    text = (files("penstock_cloud") / "data" / "ec2.csv").read_text(encoding="utf-8")
    notes = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("# ") and ": " in line)
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    types = {row["instance_type"]: InstanceType.model_validate(row) for row in rows}
    return Catalogue(region=notes["region"], at=date.fromisoformat(notes["date"]), types=types)


def load(file: Path, region: str) -> Catalogue | None:
    """The catalogue of a region: the last one fetched, else the shipped one. None if neither describes this region.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        kept = Catalogue.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        kept = shipped()
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}; delete it and fetch it again with `penstock cloud refresh`"
        ) from None
    return kept if kept.region == region else None


def save(catalogue: Catalogue, file: Path) -> None:
    """Save what was fetched."""
    save_whole(file, catalogue.model_dump_json(indent=1))


def fetch(
    session: Any, region: str, names: Sequence[str], gpus: Gpus, *, now: datetime, endpoint: str | None = None
) -> Catalogue:
    """Fetch the types `names` from EC2, with a few calls to each of three APIs.

    Without permission to read prices, those of the shipped table are used, with the table's date.

    Args:
        endpoint: EC2's; the price list has its own.

    Raises:
        ClientError, BotoCoreError: EC2 does not describe its instance types.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    ec2 = session.client("ec2", region_name=region, endpoint_url=endpoint)
    types: dict[str, InstanceType] = {}
    wanted = [{"Name": "instance-type", "Values": list(names)}]  # EC2 ignores unknown names
    for page in ec2.get_paginator("describe_instance_types").paginate(Filters=wanted):
        for found in page["InstanceTypes"]:
            if (known := _instance_type(found, gpus)) is not None:
                types[known.instance_type] = known
    spot: dict[str, dict[str, float]] = {}
    today = now.astimezone(UTC).date()
    priced_at = today
    try:
        on_demand = _on_demand(session.client("pricing", region_name=PRICING_REGION), region, types)
    except (BotoCoreError, ClientError):
        table = shipped()
        priced_at = table.at
        on_demand = {name: kept.usd_per_h for name, kept in table.types.items()} if table.region == region else {}
    try:
        spot = _spot(ec2, types, now)
    except (BotoCoreError, ClientError):
        spot = {}
    priced = {
        name: known.model_copy(update={"usd_per_h": on_demand.get(name), "spot_usd_per_h": spot.get(name, {})})
        for name, known in types.items()
    }
    return Catalogue(region=region, at=today, priced_at=priced_at, types=priced)


def _instance_type(found: Mapping[str, Any], gpus: Gpus) -> InstanceType | None:
    """The instance type. None if it has no whole GPUs."""
    devices = found.get("GpuInfo", {}).get("Gpus", [])
    if not devices:
        return None
    device = devices[0]
    memory_mib = device["MemoryInfo"]["SizeInMiB"]
    gpu_type = gpu_type_of(device["Name"], memory_mib, gpus)
    count = sum(each["Count"] for each in devices)
    known = gpus.get(gpu_type)
    if count < 1 or (known is not None and memory_mib < WHOLE * known.memory_gb * 1000):
        return None
    return InstanceType(
        instance_type=found["InstanceType"],
        gpu_type=gpu_type,
        gpus=count,
        gpu_memory_mib=memory_mib,
        vcpus=found["VCpuInfo"]["DefaultVCpus"],
        memory_mib=found["MemoryInfo"]["SizeInMiB"],
    )


def gpu_type_of(name: str, memory_mib: int, gpus: Gpus) -> str:
    """Penstock's name for EC2's name of a GPU; with the memory where types differ only in memory (A100, V100)."""
    for word in (f"{name}_{round(memory_mib / 1024)}gb", name):
        try:
            return gpus.type_of(word)
        except UnknownGpuError:
            continue
    return "_".join(name.lower().split())


def _on_demand(pricing: Any, region: str, types: Iterable[str]) -> dict[str, float | None]:
    fixed = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    prices: dict[str, float | None] = {}
    for name in types:
        filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in fixed.items()]
        filters.append({"Type": "TERM_MATCH", "Field": "instanceType", "Value": name})
        answer = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)
        found = [
            float(dimension["pricePerUnit"]["USD"])
            for product in answer["PriceList"]
            for term in json.loads(product)["terms"].get("OnDemand", {}).values()
            for dimension in term["priceDimensions"].values()
        ]
        prices[name] = min((price for price in found if price > 0), default=None)
    return prices


def _spot(ec2: Any, types: Iterable[str], now: datetime) -> dict[str, dict[str, float]]:
    """Type -> zone -> current price. A history that begins now has one entry for each."""
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=sorted(types), ProductDescriptions=[SPOT], StartTime=now
    )
    for page in pages:
        for row in page["SpotPriceHistory"]:
            key, entry = (row["InstanceType"], row["AvailabilityZone"]), (row["Timestamp"], float(row["SpotPrice"]))
            newest[key] = max(newest.get(key, entry), entry)
    prices: dict[str, dict[str, float]] = {}
    for (name, zone), (_, price) in newest.items():
        prices.setdefault(name, {})[zone] = price
    return prices


class Kept:
    """The catalogue of a region, read again whenever its file has changed."""

    def __init__(self, file: Path, region: str) -> None:
        self._file, self._region = file, region
        self._stamp: float | None = None
        self._catalogue = load(file, region)

    def now(self) -> Catalogue | None:
        """The current catalogue. If the file has been damaged since, the last readable one."""
        try:
            stamp = self._file.stat().st_mtime
        except OSError:
            return self._catalogue
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._catalogue = load(self._file, self._region)
            except ConfigError as error:
                log.warning("catalogue", extra={"text": str(error)})
        return self._catalogue
