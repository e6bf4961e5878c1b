"""Instance types of EC2 and their prices: a dated table that comes with Penstock, and what EC2 reports.

penstockd refreshes what it knows by itself, in the cloud's thread. A refresh asks `DescribeInstanceTypes`, the pricing API and
the spot price history. Its result is kept in a file, so that a daemon that starts while EC2 does not answer still knows the
prices. Before the first refresh, only on-demand prices of one region are known. Spot prices change within hours, so no table
contains them. Each price has the time at which it was true, and a refused refresh changes neither the price nor its time.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from penstock_cloud.failures import ask, pages, understood
from penstock_cloud.settings import CloudSettings
from penstock_profiles.files import save_whole
from penstock_profiles.gpus import Gpus, UnknownGpuError, load_gpus
from penstock_scheduler.burst.manager.provider import LaunchFailed
from penstock_scheduler.model.flags import CPU_SLOT
from penstock_scheduler.people.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "ec2-catalogue.json"
"""Name of the fetched file in the daemon's state_dir."""

PRICING_REGION = "us-east-1"
"""Region of the pricing API, which has the prices of all regions."""

WHOLE = 0.75
"""A GPU with less than this share of its type's memory is a slice of a GPU (g6f), which the models do not describe."""

OTHER_ACCELERATORS = frozenset({"InferenceAcceleratorInfo", "NeuronInfo", "FpgaInfo", "MediaAcceleratorInfo"})
"""What EC2 says of types whose price is that of something other than CPUs and GPUs."""

SPOT = "Linux/UNIX"
"""The operating system that spot prices are asked for."""

AGAIN_S = 600.0
"""How long after a refresh that failed the next one is tried."""


class InstanceType(BaseModel):
    """An instance type, and its on-demand price in US dollars per hour; None: not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_type: str
    gpu_type: str
    gpus: PositiveInt
    gpu_memory_mib: NonNegativeInt
    vcpus: PositiveInt
    memory_mib: PositiveInt
    usd_per_h: PositiveFloat | None = None
    priced_at: datetime | None = None
    """When the on-demand price was true; None: as of the catalogue."""
    spot_usd_per_h: dict[str, NonNegativeFloat] = {}
    """Zone -> latest spot price, US dollars per hour."""
    spot_at: datetime | None = None
    """When the spot prices were true; None: as of the catalogue."""


class Catalogue(BaseModel):
    """Instance types of one region, as of a date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    region: str
    at: date
    """When EC2 described the types, or the date of the shipped table."""
    priced_at: date | None = None
    """When the prices of types without a time of their own were true, if not at `at`."""
    types: dict[str, InstanceType]

    def as_of(self, instance_type: str, market: str) -> datetime:
        """When the price of a known type on a market was true."""
        known = self.types[instance_type]
        own = known.priced_at if market == "on-demand" else known.spot_at
        return own or datetime.combine(self.priced_at or self.at, time(), UTC)

    def with_prices(self, settings: CloudSettings, now_s: float) -> Catalogue:
        """The catalogue with the on-demand prices that the settings have, which are as of now, and with their discount."""

        def priced(known: InstanceType) -> InstanceType:
            if (usd_per_h := settings.prices.get(known.instance_type)) is not None:
                now = datetime.fromtimestamp(now_s, UTC)
                return known.model_copy(update={"usd_per_h": usd_per_h, "priced_at": now})
            if known.usd_per_h is None or not settings.discount:
                return known
            return known.model_copy(update={"usd_per_h": known.usd_per_h * (1 - settings.discount)})

        return self.model_copy(update={"types": {name: priced(known) for name, known in self.types.items()}})

    def is_fresh(self, instance_type: str, market: str, now_s: float, settings: CloudSettings) -> bool:
        """Whether the price of a known type on a market may be used."""
        days = settings.price_days if market == "on-demand" else settings.spot_price_days
        return now_s - self.as_of(instance_type, market).timestamp() <= days * 86400

    def expired(self, now_s: float, settings: CloudSettings) -> str:
        """Which known prices of the settings' types may not be used any more, as a sentence; empty: all may."""
        stale: dict[tuple[str, date], list[str]] = {}
        for market in settings.markets:
            for name in settings.instance_types:
                known = self.types.get(name)
                priced = known and (known.usd_per_h if market == "on-demand" else known.spot_usd_per_h)
                if priced and not self.is_fresh(name, market, now_s, settings):
                    stale.setdefault((market, self.as_of(name, market).date()), []).append(name)
        told = [f"{market} prices of {', '.join(names)} are as of {at}" for (market, at), names in stale.items()]
        return f"in {self.region}, {'; '.join(told)}: too old to be used" if told else ""

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


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a refresh has found.

    Attributes:
        catalogue: what is known now.
        refused: the prices that were refused, each as a sentence. They are as they were before.
    """

    catalogue: Catalogue
    refused: tuple[str, ...] = ()


def fetch(
    session: Any,
    region: str,
    names: Sequence[str],
    gpus: Gpus,
    *,
    now: datetime,
    known: Catalogue | None = None,
) -> Fetched:
    """Fetch the types `names` from EC2, with a few calls to each of three APIs.

    Without permission to read prices, those that are known stay, with the time at which they were true.

    Args:
        known: what was known before; None: nothing.

    Raises:
        LaunchFailed: EC2 does not describe its instance types.
    """
    from botocore.config import Config

    # The thread that ends instances waits meanwhile.
    quick = Config(connect_timeout=3, read_timeout=20, retries={"total_max_attempts": 2})
    ec2 = session.client("ec2", region_name=region, config=quick)
    types: dict[str, InstanceType] = {}
    wanted = [{"Name": "instance-type", "Values": list(names)}]  # EC2 ignores unknown names
    for page in pages(ec2.describe_instance_types, Filters=wanted):
        for found in page["InstanceTypes"]:
            if (described := _instance_type(found, gpus)) is not None:
                types[described.instance_type] = described
    refused = []
    before = {} if known is None or known.region != region else known.types
    try:
        on_demand = _on_demand(session.client("pricing", region_name=PRICING_REGION, config=quick), region, types)
        demand = {name: {"usd_per_h": on_demand.get(name), "priced_at": now} for name in types}
    except LaunchFailed as error:
        refused.append(f"on-demand prices of {region} were refused: {error}")
        kept = {name: known.as_of(name, "on-demand") for name in before} if known is not None else {}
        demand = {name: {"usd_per_h": old.usd_per_h, "priced_at": kept[name]} for name, old in before.items()}
    try:
        prices = _spot(ec2, types, now)
        spot = {name: {"spot_usd_per_h": prices.get(name, {}), "spot_at": now} for name in types}
    except LaunchFailed as error:
        refused.append(f"spot prices of {region} were refused: {error}")
        kept = {name: known.as_of(name, "spot") for name in before} if known is not None else {}
        spot = {name: {"spot_usd_per_h": old.spot_usd_per_h, "spot_at": kept[name]} for name, old in before.items()}
    priced = {name: each.model_copy(update=demand.get(name, {}) | spot.get(name, {})) for name, each in types.items()}
    return Fetched(Catalogue(region=region, at=now.astimezone(UTC).date(), types=priced), tuple(refused))


class Fetcher:
    """Fetches the catalogue of one region. It is a client of the cloud, so its calls may be wrapped in `Yielding`."""

    def __init__(self, settings: CloudSettings) -> None:
        self._settings = settings
        self._session: Any = None

    def get_catalogue(self, known: Catalogue | None, now_s: float) -> Fetched:
        """See `fetch`. Raises LaunchFailed."""
        import boto3
        from botocore.exceptions import BotoCoreError

        settings = self._settings
        try:
            if self._session is None:
                self._session = boto3.session.Session(region_name=settings.region)
            return fetch(
                self._session,
                settings.region,
                settings.instance_types,
                load_gpus(),
                now=datetime.fromtimestamp(now_s, UTC),
                known=known,
            )
        except BotoCoreError as error:
            raise understood(error) from error


def _instance_type(found: Mapping[str, Any], gpus: Gpus) -> InstanceType | None:
    """The instance type: its GPUs, or one CPU slot if it has no accelerator. None if it has no whole GPUs, or other ones."""
    devices = found.get("GpuInfo", {}).get("Gpus", [])
    if not devices and not OTHER_ACCELERATORS & found.keys():
        return InstanceType(
            instance_type=found["InstanceType"],
            gpu_type=CPU_SLOT,
            gpus=1,
            gpu_memory_mib=0,
            vcpus=found["VCpuInfo"]["DefaultVCpus"],
            memory_mib=found["MemoryInfo"]["SizeInMiB"],
        )
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
        answer = ask(pricing.get_products, ServiceCode="AmazonEC2", Filters=filters)
        found = [
            float(dimension["pricePerUnit"].get("USD", 0.0))
            for product in answer["PriceList"]
            for term in json.loads(product)["terms"].get("OnDemand", {}).values()
            for dimension in term["priceDimensions"].values()
        ]
        prices[name] = min((price for price in found if price > 0), default=None)
    return prices


def _spot(ec2: Any, types: Iterable[str], now: datetime) -> dict[str, dict[str, float]]:
    """Type -> zone -> current price. A history that begins now has one entry for each."""
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    asked = {"InstanceTypes": sorted(types), "ProductDescriptions": [SPOT], "StartTime": now}
    for page in pages(ec2.describe_spot_price_history, **asked):
        for row in page["SpotPriceHistory"]:
            key, entry = (row["InstanceType"], row["AvailabilityZone"]), (row["Timestamp"], float(row["SpotPrice"]))
            newest[key] = max(newest.get(key, entry), entry)
    prices: dict[str, dict[str, float]] = {}
    for (name, zone), (_, price) in newest.items():
        prices.setdefault(name, {})[zone] = price
    return prices


class KeptCatalogue:
    """The catalogue of a region, read again whenever its file has changed.

    Args:
        fetcher: `Fetcher`, or one that releases a lock during its calls; None: nothing is fetched here.
        every_s: seconds between two refreshes.
    """

    def __init__(self, file: Path, region: str, fetcher: Any = None, every_s: float = 0.0) -> None:
        self._file, self._region = file, region
        self._fetcher, self._every_s, self._again_s = fetcher, every_s, 0.0
        self._stamp: float | None = None
        self._catalogue = load(file, region)
        self.trouble = ""
        """Why the newest refresh failed, wholly or in part; empty: it did not."""

    def now(self) -> Catalogue | None:
        """The current catalogue. If the file has been damaged since, the last readable one."""
        stamp = self._changed_s()
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            try:
                self._catalogue = load(self._file, self._region)
            except ConfigError as error:
                log.warning("catalogue", extra={"text": str(error)})
        return self._catalogue

    def refresh(self, now_s: float) -> None:
        """Fetch the catalogue if it is due: `every_s` after its file was written, and soon after a failure."""
        due_s = max((self._changed_s() or 0.0) + self._every_s, self._again_s)
        if self._fetcher is None or self._every_s <= 0 or now_s < due_s:
            return
        self._again_s = now_s + AGAIN_S
        try:
            fetched = self._fetcher.get_catalogue(self.now(), now_s)
        except LaunchFailed as error:
            self.trouble = f"EC2 does not describe its types in {self._region}: {error}"
        else:
            self.trouble = "; ".join(fetched.refused)
            try:
                save(fetched.catalogue, self._file)
            except OSError as error:
                self.trouble = f"{self._file} cannot be written: {error}"
        if self.trouble:
            log.warning("prices were not refreshed", extra={"region": self._region, "text": self.trouble})

    def _changed_s(self) -> float | None:
        """When the file was written, s since 1970; None: there is none."""
        try:
            return self._file.stat().st_mtime
        except OSError:
            return None
