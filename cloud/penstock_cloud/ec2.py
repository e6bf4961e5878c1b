"""EC2 by boto3 behind the port `Provider`: launch, list and end instances. Every call may be repeated; no state is kept.

The call that launches an instance also sets its tags, so that the instances of a crashed daemon can be found and identified.
The same order has the same ClientToken, so EC2 answers a repeated order with the same instance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock_cloud.catalogue import SPOT, Catalogue, KeptCatalogue
from penstock_cloud.failures import ask, pages, refusal
from penstock_cloud.images import LOOK_UP, PinnedImage
from penstock_cloud.settings import CloudSettings
from penstock_cloud.templates import TAG, VERSION, Templates, ec2_tags, mine
from penstock_scheduler.burst.manager.provider import ADOPTED, DescribedInstance, Kind, LaunchFailed, Machine, Order
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.store.cloud_runs import RunStore

Listed = list[DescribedInstance]
Tags = list[dict[str, str]]

GONE = frozenset({"shutting-down", "terminated"})
"""States in which an instance no longer costs anything."""


TAKEN = "Server.SpotInstanceTermination"
"""EC2's reason for the end of an instance that it has taken back from the spot market."""

AT_ONCE = 100
"""Most instances that one call ends. EC2 allows 1,000, and advises fewer."""

NO_FLEETS = frozenset({"InvalidAction", "UnauthorizedOperation", "UnsupportedOperation"})
"""Errors of CreateFleet that launched nothing, and after which RunInstances may still succeed."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Capacity that the site pays for whether or not it is used. Times are in s since 1970."""

    id: str
    instance_type: str
    zone: str
    block: bool
    """Whether it is a capacity block, which is paid for in advance."""
    end_s: float | None
    """When EC2 ends its instances; None: never."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """An order with what EC2 needs besides.

    Attributes:
        group: the placement group of a gang; empty: none.
        template: the launch template's id.
        efa: number of its EFA interfaces on each instance.
    """

    order: Order
    group: str
    template: str
    efa: int = 0

    @property
    def template_spec(self) -> dict[str, str]:
        return {"LaunchTemplateId": self.template, "Version": VERSION}


BLOCK_ENDS_S = 1800.0
"""EC2 begins to end a capacity block's instances half an hour before the block's end: AWS, "Capacity Blocks for ML"."""


def connect(settings: CloudSettings) -> Any:
    """A client of EC2 in the settings' region that answers or fails within seconds. Raises ConfigError."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError as error:
        raise ConfigError(f"[daemon] cloud: {error}; pip install boto3") from None
    config = Config(connect_timeout=3, read_timeout=20, retries={"total_max_attempts": 1}, max_pool_connections=50)
    try:
        session = boto3.session.Session(region_name=settings.region)
        return session.client("ec2", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"[cloud] region={settings.region!r}: {error}") from None


def connect_ssm(settings: CloudSettings) -> Any:
    """A client of Systems Manager in the settings' region, if the image is to be looked up there; None: it is not."""
    if not settings.image.startswith(LOOK_UP):
        return None
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=3, read_timeout=20, retries={"total_max_attempts": 2})
    return boto3.session.Session(region_name=settings.region).client("ssm", config=config)


class Ec2:
    """One region of EC2 as a `Provider`. Every method raises LaunchFailed.

    Args:
        ec2: boto3's client.
        settings: the settings as they are in this region.
        catalogue: returns the current catalogue of instance types; None: no catalogue describes this region.
        kept: refreshes what `catalogue` returns; None: nobody does.
        ssm: boto3's client of Systems Manager, if the image is looked up there.
        store: keeps the pinned image, if there is one.

    Attributes:
        name: the region that the client speaks to.
        image: its AMI.
        templates: its launch templates.
    """

    def __init__(
        self,
        ec2: Any,
        settings: CloudSettings,
        catalogue: Callable[[], Catalogue | None] = lambda: None,
        kept: KeptCatalogue | None = None,
        ssm: Any = None,
        store: RunStore | None = None,
    ) -> None:
        self._ec2 = ec2
        self.name = str(ec2.meta.region_name)
        self._settings = settings
        self._catalogue, self._kept = catalogue, kept
        self.image = PinnedImage(self._ask, settings, ssm, store)
        self.templates = Templates(self._ask, settings, self.image)
        self._zones: dict[str, str] = {}

    # --- offers

    def offers(self, now_s: float) -> Sequence[Machine]:
        """See `Provider`. A price on spot is the highest of the site's zones, since an order may be served in any of them."""
        catalogue = self._priced(now_s)
        if catalogue is None:
            return ()
        found, settings, zones = [], self._settings, self.zones().values()
        for name in settings.instance_types:
            kind = catalogue.types.get(name)
            for market in settings.markets:
                price = catalogue.usd_per_h(name, market, zones)
                if kind is not None and price and catalogue.is_fresh(name, market, now_s, settings):
                    extras = settings.extras_usd_per_h
                    found.append(
                        Machine(
                            instance_type=name,
                            market=market,
                            gpu_type=kind.gpu_type,
                            gpus=kind.gpus,
                            vcpus=kind.vcpus,
                            memory_mib=kind.memory_mib,
                            usd_per_h=price + extras,
                            extras_usd_per_h=extras,
                        )
                    )
        return found

    def prices(self, now_s: float) -> str:
        """See `Provider`."""
        catalogue = self._priced(now_s)
        if catalogue is None:
            why = f"no instance types are known in {self.name}"
        elif not (why := catalogue.expired(now_s, self._settings)):
            return ""
        if self._kept is not None and self._kept.trouble:
            why += f" ({self._kept.trouble})"
        return f"{why}; run `penstock cloud doctor`, then `penstock cloud refresh`"

    def _priced(self, now_s: float) -> Catalogue | None:
        catalogue = self._catalogue()
        return None if catalogue is None else catalogue.with_prices(self._settings, now_s)

    def refresh(self, now_s: float) -> None:
        """See `Provider`."""
        self.image.look(now_s)
        if self._kept is not None:
            self._kept.refresh(now_s)

    def news(self) -> str:
        """See `Provider`."""
        return self.image.news()

    def accept(self) -> str:
        """See `Provider`."""
        image = self.image.accept()
        self.templates.forget()
        return image

    def check(self) -> str:
        """See `Provider`. `penstock cloud doctor` checks more."""
        try:
            self.zones()
        except LaunchFailed as error:
            return f"EC2 does not describe the subnets in {self.name}: {error}; run `penstock cloud doctor`"
        return self.prices(datetime.now(UTC).timestamp())

    def spot_prices(self, instance_type: str, zone: str, begin_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """See `Provider`. EC2's answer begins with the last change before the time."""
        found = pages(
            self._ec2.describe_spot_price_history,
            InstanceTypes=[instance_type],
            AvailabilityZone=zone,
            ProductDescriptions=[SPOT],
            StartTime=datetime.fromtimestamp(begin_s, UTC),
            EndTime=datetime.fromtimestamp(end_s, UTC),
        )
        return sorted(
            (each["Timestamp"].timestamp(), float(each["SpotPrice"]))
            for page in found
            for each in page["SpotPriceHistory"]
            if (each["InstanceType"], each["AvailabilityZone"]) == (instance_type, zone)
        )

    # --- the site's subnets and templates

    def zones(self) -> dict[str, str]:
        """Subnet -> zone, in the order of the settings."""
        if not self._zones:
            subnets = self._settings.subnets
            if not subnets:
                raise LaunchFailed(Kind.CONFIG, "", "[cloud] subnets is empty; name at least one")
            found = self._ask("describe_subnets", SubnetIds=list(subnets))["Subnets"]
            zones = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in found}
            self._zones = {subnet: zones[subnet] for subnet in subnets}
        return self._zones

    def _make_group(self, name: str) -> None:
        """Create a placement group that keeps nodes near each other, unless it exists."""
        try:
            self._ask("create_placement_group", GroupName=name, Strategy="cluster")
        except LaunchFailed as error:
            if error.code != "InvalidPlacementGroup.Duplicate":
                raise

    def _drop_group(self, name: str) -> None:
        """Delete a placement group after its instances have ended."""
        try:
            self._ask("delete_placement_group", GroupName=name)
        except LaunchFailed as error:
            if error.code not in ("InvalidPlacementGroup.Unknown", "InvalidPlacementGroup.InUse"):
                raise

    # --- instances

    def launch_gang(self, order: Order) -> Mapping[str, str]:
        """See `Provider`. A reservation comes first, then any of the site's zones with capacity.

        The order alone determines the reservations to try, not the capacity that is free in them. So a repeated order, after
        a lost answer, reaches the same reservation with the same token. The instances of a gang get their nodes' names once
        they exist, since one order gives all of them the same tags; they wait for them.
        """
        group, efa = "", 0
        if len(order.nodes) > 1:
            group, efa = f"penstock-{order.run}", self.templates.efa(order.instance_type)
            self._make_group(group)
        templates = self.templates
        template = templates.of_site(efa) if order.guest is None else templates.of_run(order.run, order.guest)
        try:
            ids = self._launch(_Launch(order, group, template, efa))
        except LaunchFailed as error:
            if error.code.startswith("InvalidLaunchTemplate"):
                templates.forget()
            raise
        if len(ids) < len(order.nodes):
            words = f"EC2 has launched {len(ids)} of {len(order.nodes)} instances"
            raise refusal("InsufficientInstanceCapacity", words)
        named = dict(zip(order.nodes, sorted(ids), strict=True))
        if group:
            for node, id_ in named.items():
                self._ask("create_tags", Resources=[id_], Tags=ec2_tags({"node": node}))
        return named

    def _launch(self, launch: _Launch) -> list[str]:
        for reservation, subnet in self._reserved(launch):
            try:
                return self._into(launch, reservation, subnet)
            except LaunchFailed as error:
                if error.kind is not Kind.CAPACITY:
                    raise
        try:
            return self._by_fleet(launch)
        except LaunchFailed as error:
            if error.code not in NO_FLEETS:
                raise
        return self._one_by_one(launch)

    def tidy(self, run: str) -> None:
        """See `Provider`. Only detached runs have a template of their own, and only their sites may delete templates."""
        self._drop_group(f"penstock-{run}")
        if self._settings.bucket is not None:
            self.templates.drop(run)

    def reservations(self) -> list[Reservation]:
        """The active ones among the reservations in the settings, in the order of the settings."""
        if not self._settings.reservations:
            return []
        found = {
            each["CapacityReservationId"]: Reservation(
                id=each["CapacityReservationId"],
                instance_type=each["InstanceType"],
                zone=each["AvailabilityZone"],
                block=each.get("ReservationType") == "capacity-block",
                end_s=each["EndDate"].timestamp() - BLOCK_ENDS_S if "EndDate" in each else None,
            )
            for each in self._active_reservations()
        }
        return [found[name] for name in self._settings.reservations if name in found]

    def _active_reservations(self) -> list[Mapping[str, Any]]:
        """All of the account's reservations. A request by id would fail once EC2 has forgotten one that is over."""
        active = [{"Name": "state", "Values": ["active"]}]
        found = pages(self._ec2.describe_capacity_reservations, Filters=active, MaxResults=1000)
        return [each for page in found for each in page["CapacityReservations"]]

    def _reserved(self, launch: _Launch) -> list[tuple[Reservation, str]]:
        """Reservations that suit an order, each with the site's subnet in its zone. Those of a gang are all in the first
        zone."""
        order = launch.order
        if order.market != "on-demand":
            return []
        subnets = list(self.zones().items())
        subnet_of = {zone: subnet for subnet, zone in reversed(subnets[:1] if launch.group else subnets)}
        return [
            (each, subnet_of[each.zone])
            for each in self.reservations()
            if each.instance_type == order.instance_type
            and each.zone in subnet_of
            and (each.end_s is None or order.until_s <= each.end_s)
        ]

    def _into(self, launch: _Launch, reservation: Reservation, subnet: str) -> list[str]:
        asked = self._run(launch, f"{launch.order.token}-{reservation.id[-8:]}", subnet)
        asked["CapacityReservationSpecification"] = {
            "CapacityReservationTarget": {"CapacityReservationId": reservation.id}
        }
        if reservation.block:
            asked["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
            asked.pop("Placement", None)  # EC2 keeps a block's instances near each other itself
        return self._run_instances(asked)

    def _run_instances(self, asked: Mapping[str, Any]) -> list[str]:
        return [str(each["InstanceId"]) for each in self._ask("run_instances", **asked)["Instances"]]

    def _by_fleet(self, launch: _Launch) -> list[str]:
        order, count = launch.order, len(launch.order.nodes)
        overrides: list[dict[str, Any]] = [
            {"InstanceType": order.instance_type, "SubnetId": subnet} for subnet in self.zones()
        ]
        # All or none. A fleet of one needs no such words, and is asked for as it always was.
        whole = {"MinTargetCapacity": count, "SingleAvailabilityZone": True} if count > 1 else {}
        if launch.group:
            overrides = [override | {"Placement": {"GroupName": launch.group}} for override in overrides[:1]]
        if order.market == "spot":
            overrides = [override | {"MaxPrice": f"{order.usd_per_h:.6f}"} for override in overrides]
        options: dict[str, Any] = {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized", **whole}}
        if order.market == "on-demand":
            options = {
                "OnDemandOptions": {
                    "AllocationStrategy": "lowest-price",
                    "CapacityReservationOptions": {"UsageStrategy": "use-capacity-reservations-first"},
                    **whole,
                }
            }
        answer = self._ask(
            "create_fleet",
            ClientToken=order.token,
            Type="instant",
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": launch.template_spec,
                    "Overrides": overrides,
                }
            ],
            TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": order.market},
            TagSpecifications=[{"ResourceType": "instance", "Tags": self._order_tags(order)}],
            **options,
        )
        ids = [id_ for group in answer.get("Instances", []) for id_ in group["InstanceIds"]]
        if ids:
            return [str(id_) for id_ in ids]
        errors = [(each["ErrorCode"], each.get("ErrorMessage", "")) for each in answer.get("Errors", [])]
        if not errors:
            raise refusal("InsufficientInstanceCapacity", "EC2 returned an empty fleet without a reason")
        told = [refusal(code, words) for code, words in errors]
        # Zones may fail for different reasons, such as capacity and quota. The gravest error counts.
        gravest = (Kind.CONFIG, Kind.UNKNOWN, Kind.QUOTA, Kind.THROTTLED, Kind.CAPACITY)
        raise min(told, key=lambda error: gravest.index(error.kind))

    def _one_by_one(self, launch: _Launch) -> list[str]:
        order = launch.order
        subnets = list(self.zones())
        last: LaunchFailed | None = None
        for number, subnet in enumerate(subnets[:1] if launch.group else subnets):
            asked = self._run(launch, f"{order.token}-{number}", subnet)
            if order.market == "spot":
                once = {
                    "SpotInstanceType": "one-time",
                    "InstanceInterruptionBehavior": "terminate",
                    "MaxPrice": f"{order.usd_per_h:.6f}",
                }
                asked["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
            try:
                return self._run_instances(asked)
            except LaunchFailed as error:
                if error.kind is not Kind.CAPACITY:
                    raise
                last = error
        assert last is not None, "at least one subnet exists"
        raise last

    def _run(self, launch: _Launch, token: str, subnet: str) -> dict[str, Any]:
        """Arguments of RunInstances for an order: all of its instances, or none."""
        order, count = launch.order, len(launch.order.nodes)
        asked: dict[str, Any] = {
            "LaunchTemplate": launch.template_spec,
            "ClientToken": token,
            "InstanceType": order.instance_type,
            "MinCount": count,
            "MaxCount": count,
            "TagSpecifications": [{"ResourceType": "instance", "Tags": self._order_tags(order)}],
        }
        if launch.efa:  # RunInstances takes no subnet beside a template's interfaces
            asked["NetworkInterfaces"] = [each | {"SubnetId": subnet} for each in self.templates.interfaces(launch.efa)]
        else:
            asked["SubnetId"] = subnet
        if launch.group:
            asked["Placement"] = {"GroupName": launch.group}
        return asked

    def list(self, run: str | None = None) -> Listed:
        """See `Provider`. EC2 lists instances for about an hour after their end."""
        filters = [{"Name": f"tag:{TAG}site", "Values": [str(self._settings.site)]}]
        if run is not None:
            filters.append({"Name": f"tag:{TAG}run", "Values": [run]})
        return self._described(filters)

    def of_others(self, other: str) -> Listed:
        """Instances of another site or store that have not ended. Only an admin's explicit command asks for them."""
        found = [
            each
            for tag in ("site", "owner")
            for each in self._described([{"Name": f"tag:{TAG}{tag}", "Values": [other]}])
        ]
        return [each for each in found if not each.gone]

    def adopt(self, id_: str) -> None:
        """Make an instance this site's, by its tags."""
        self._ask("create_tags", Resources=[id_], Tags=ec2_tags(mine(self._settings) | {"owner": ADOPTED}))

    def known(self, ids: Collection[str]) -> Listed:
        """Those of these instances that EC2 lists, whatever tags they have by now. Oldest first."""
        return self._described([{"Name": "instance-id", "Values": sorted(ids)}]) if ids else []

    def forgotten(self, id_: str) -> bool:
        """Whether EC2 says that there is no such instance. An answer that merely lacks the instance does not say so."""
        try:
            self._ask("describe_instances", InstanceIds=[id_])
        except LaunchFailed as error:
            if error.code == "InvalidInstanceID.NotFound":
                return True
            raise
        return False

    def _described(self, filters: Sequence[Mapping[str, Any]]) -> Listed:
        found = pages(self._ec2.describe_instances, Filters=filters, MaxResults=1000)
        seen = [
            _seen(each, self.name) for page in found for group in page["Reservations"] for each in group["Instances"]
        ]
        return sorted(seen, key=lambda each: (each.launched_s, each.id))

    def terminate(self, ids: Sequence[str]) -> None:
        """End instances, a hundred in a call. Those that are gone already are ignored.

        EC2 ends none of a call's instances if it refuses one of them, such as one that it does not know any more. So each
        instance of a refused call is ended by itself, and a refusal of some is raised after the others have ended.
        """
        refused: LaunchFailed | None = None
        calls = [list(ids[first : first + AT_ONCE]) for first in range(0, len(ids), AT_ONCE)]
        while calls:
            some = calls.pop(0)
            try:
                self._ask("terminate_instances", InstanceIds=some)
            except LaunchFailed as error:
                if error.kind in (Kind.LOST, Kind.THROTTLED):
                    raise
                if len(some) > 1:
                    calls += [[id_] for id_ in some]
                elif error.code != "InvalidInstanceID.NotFound":
                    refused = error
        if refused is not None:
            raise refused

    def _order_tags(self, order: Order) -> Tags:
        extra = [{"Key": key, "Value": value} for key, value in sorted(self._settings.tags.items())]
        node = {"node": order.nodes[0]} if len(order.nodes) == 1 else {}
        return ec2_tags(mine(self._settings) | dict(order.tags) | node) + extra

    def _ask(self, method: str, client: Any = None, /, **asked: Any) -> Any:
        return ask(getattr(self._ec2 if client is None else client, method), **asked)


def _seen(instance: Mapping[str, Any], region: str) -> DescribedInstance:
    tags: Iterable[Mapping[str, str]] = instance.get("Tags", [])
    return DescribedInstance(
        id=instance["InstanceId"],
        state=instance["State"]["Name"],
        instance_type=instance["InstanceType"],
        zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
        launched_s=instance["LaunchTime"].timestamp(),
        ended_s=ended_s(instance.get("StateTransitionReason", "")),
        tags={tag["Key"].removeprefix(TAG): tag["Value"] for tag in tags if tag["Key"].startswith(TAG)},
        region=region,
        gone=instance["State"]["Name"] in GONE,
        taken=instance.get("StateReason", {}).get("Code") == TAKEN,
        spot=instance.get("InstanceLifecycle") == "spot",
    )


def ended_s(reason: str) -> float | None:
    """When an instance ended, from EC2's text `User initiated (2026-11-21 14:50:02 GMT)`. None if it has no time."""
    if not reason.endswith(" GMT)") and not reason.endswith(" UTC)"):
        return None
    try:
        at = datetime.strptime(reason.rsplit("(", 1)[-1][:19], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return at.replace(tzinfo=UTC).timestamp()
