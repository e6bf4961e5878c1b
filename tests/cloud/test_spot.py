"""Runs on the spot market cost what EC2 bills: the price of their zone while they lived, not the offered one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from penstock_cloud.catalogue import Catalogue, shipped
from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite

OFFERED = 0.60


def with_spot() -> Catalogue:
    known = shipped()
    types = {
        name: each.model_copy(update={"spot_usd_per_h": {f"us-east-1{zone}": OFFERED for zone in "abcdef"}})
        for name, each in known.types.items()
    }
    return known.model_copy(update={"types": types})


@pytest.fixture
def site(cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2) -> CloudSite:
    class OnSpot(CloudSite):
        catalogue = staticmethod(with_spot)

    return OnSpot(cloud_settings(markets=("on-demand", "spot"), spot_price_days=36500.0), store, ec2)


def ran(site: CloudSite, ec2: Ec2, end: Callable[[str], Any] | None = None) -> str:
    """The ledger's words for a run on spot. Its instance ends some seconds after its launch, for the clock of moto."""
    site.submit("7", checkpointable=True)
    site.send("7", "g5.xlarge spot")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    (id_,) = ec2.running()
    if end is None:
        site.finish("7")
    else:
        end(id_)
    site.until(lambda: not site.state.runs)
    (line,) = [line for line in site.store.cloud_ledger() if line.kind == "usd"]
    assert id_ in line.text
    assert line.amount == pytest.approx(site.store.ledger_totals("usd")["physics"])
    return line.text


def paid(site: CloudSite) -> float:
    return sum(line.amount for line in site.store.cloud_ledger() if line.kind == "usd")


def test_a_run_costs_the_price_of_its_zone_at_its_launch(site: CloudSite, ec2: Ec2) -> None:
    for zone in "abcdef":
        ec2.spot["g5.xlarge", f"us-east-1{zone}"] = 0.24 if zone == "a" else 0.36
        ec2.spot_changes.append(("g5.xlarge", f"us-east-1{zone}", site.now_s() + 9e5, 0.99))
        ec2.spot_changes.append(("g4dn.xlarge", f"us-east-1{zone}", site.now_s() - 60, 0.01))
    text = ran(site, ec2)
    (instance,) = ec2.instances()
    price = 0.24 if instance["Placement"]["AvailabilityZone"] == "us-east-1a" else 0.36
    assert paid(site) == pytest.approx(price / 60, abs=1e-6)
    assert f"at ${price:.2f} an hour" in text


def test_a_price_that_ec2_does_not_tell_is_the_offered_one(site: CloudSite, ec2: Ec2) -> None:
    ec2.faults.append(Fault("DescribeSpotPriceHistory", "error", "UnauthorizedOperation", times=99))
    text = ran(site, ec2)
    assert "at the offered $0.60 an hour, as the price of that time is not known" in text
    assert paid(site) == pytest.approx(OFFERED / 60, abs=1e-6)


def test_a_throttled_question_for_the_price_is_asked_again(site: CloudSite, ec2: Ec2) -> None:
    ec2.spot |= {("g5.xlarge", f"us-east-1{zone}"): 0.24 for zone in "abcdef"}
    ec2.faults.append(Fault("DescribeSpotPriceHistory", "error", "RequestLimitExceeded", times=2))
    assert "at $0.24 an hour" in ran(site, ec2)


def test_an_instance_that_ec2_takes_within_its_first_hour_is_free(site: CloudSite, ec2: Ec2) -> None:
    ec2.spot |= {("g5.xlarge", f"us-east-1{zone}"): 0.24 for zone in "abcdef"}

    def take(id_: str) -> None:
        ec2.direct().terminate_instances(InstanceIds=[id_])
        instance = ec2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].get_instance(id_)
        instance.state_reason = StateReason("taken", "Server.SpotInstanceTermination")

    ran(site, ec2, take)
    assert paid(site) == 0.0


def orphan(site: CloudSite, ec2: Ec2, **extras: str) -> LedgerLine:
    """The ledger's line for an instance on spot that belongs to no run."""
    site.tick()
    tags = {
        "site": str(site.settings.site),
        "owner": str(site.store.control("cloud.owner")),
        "run": "9.1-a",
        "job": "9",
        "account": "physics",
        "usd_per_h": "0.62",
    }
    (instance,) = ec2.direct().run_instances(
        ImageId=site.settings.image,
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        InstanceMarketOptions={"MarketType": "spot"},
        TagSpecifications=[
            {
                "ResourceType": "instance",
                "Tags": [{"Key": f"penstock:{key}", "Value": value} for key, value in (tags | extras).items()],
            }
        ],
    )["Instances"]
    site.until(lambda: bool(site.store.cloud_ledger()))
    (line,) = site.store.cloud_ledger()
    assert f"{instance['InstanceId']} " in line.text
    assert "belonged to no run" in line.text
    site.ticks(3)
    assert site.store.cloud_ledger() == [line], "charged once"
    return line


def test_an_instance_of_no_run_costs_what_ec2_bills_with_its_volume_and_address(site: CloudSite, ec2: Ec2) -> None:
    ec2.spot |= {("g5.xlarge", f"us-east-1{zone}"): 0.24 for zone in "abcdef"}
    ec2.faults.append(Fault("DescribeSpotPriceHistory", "error", "RequestLimitExceeded", times=2))
    assert orphan(site, ec2, extras_usd_per_h="0.06").amount == pytest.approx(0.30 / 60, abs=1e-6)


def test_an_instance_of_no_run_costs_its_tags_price_if_ec2_tells_none(site: CloudSite, ec2: Ec2) -> None:
    """As do instances that an older Penstock launched, which have no tag for the extras."""
    ec2.faults.append(Fault("DescribeSpotPriceHistory", "error", "UnauthorizedOperation", times=99))
    assert orphan(site, ec2).amount == pytest.approx(0.62 / 60, abs=1e-6)


def test_the_prices_of_all_pages_come_oldest_first(cloud_settings: Callable[..., CloudSettings]) -> None:
    """EC2 lists the newest first, up to a thousand in a page, and begins with the last change before the time."""
    times = [datetime(2026, 11, 30, hour, tzinfo=UTC) for hour in (8, 10, 11)]
    asked: list[dict[str, Any]] = []

    class Client:
        meta = SimpleNamespace(region_name="us-east-1")

        def describe_spot_price_history(self, **question: Any) -> dict[str, Any]:
            asked.append(dict(question))
            page = times[:0:-1] if "NextToken" not in question else times[:1]
            rows = [
                {
                    "InstanceType": "g5.xlarge",
                    "AvailabilityZone": "us-east-1a",
                    "Timestamp": at,
                    "SpotPrice": f"0.{at.hour}",
                }
                for at in page
            ]
            more = "" if "NextToken" in question else "more"
            return {"SpotPriceHistory": rows, "NextToken": more, "ResponseMetadata": {"RequestId": "x"}}

    region = Region(Client(), cloud_settings(), shipped)
    begin, end = times[0].replace(hour=9), times[-1].replace(hour=12)
    found = region.spot_prices("g5.xlarge", "us-east-1a", begin.timestamp(), end.timestamp())
    assert found == [(at.timestamp(), float(f"0.{at.hour}")) for at in times]
    wanted = {
        "InstanceTypes": ["g5.xlarge"],
        "AvailabilityZone": "us-east-1a",
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": begin,
        "EndTime": end,
    }
    assert asked == [wanted, wanted | {"NextToken": "more"}]
