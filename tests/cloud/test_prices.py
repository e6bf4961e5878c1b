"""Prices that the admin sets by hand, and a discount on EC2's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2
from tests.cloud.site import CloudSite

REGION = {"subnets": (), "security_groups": (), "image": "ami-1"}


def test_a_site_without_permission_to_read_prices_sets_them_by_hand(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    """On day one: the table that comes with Penstock is too old."""
    site = CloudSite(cloud_settings(prices={"g5.xlarge": 0.8}, price_days=31.0), store, ec2)
    (offer,) = {offer.nodes: offer for offer in site.tick().offers if offer.nodes == 1}.values()
    assert (offer.id, offer.usd_per_h) == ("g5.xlarge", 0.8)
    assert "prices of g4dn.xlarge are as of 2025-06-30" in " ".join(site.state.closed)
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.finish("7")
    site.until(lambda: not site.state.runs)
    (usd,) = [line.amount for line in store.cloud_ledger() if line.kind == "usd"]
    used = sum(line.amount for line in store.ledger() if line.kind == "cloud-gpu-seconds")  # none of less than 1 s
    assert usd == pytest.approx(max(used, 60.0) / 3600 * 0.8)
    site.sleep(400 * 86400)
    assert {offer.id for offer in site.tick().offers} == {"g5.xlarge", "2x g5.xlarge"}, "such a price is never too old"


def test_a_discount_lowers_what_ec2_reports_and_not_what_is_set_by_hand(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    site = CloudSite(cloud_settings(prices={"g5.xlarge": 0.8}, discount=0.1), store, ec2)
    prices = {offer.id: offer.usd_per_h for offer in site.tick().offers if offer.nodes == 1}
    assert prices == pytest.approx({"g5.xlarge": 0.8, "g4dn.xlarge": 0.526 * 0.9})


def test_prices_belong_to_a_region(cloud_settings: Callable[..., CloudSettings]) -> None:
    there = REGION | {"prices": {"g5.xlarge": 0.9}}
    settings = cloud_settings(prices={"g4dn.xlarge": 0.4}, regions={"eu-west-1": there, "eu-west-2": REGION})
    assert [each.prices for each in settings.everywhere()] == [{"g4dn.xlarge": 0.4}, {"g5.xlarge": 0.9}, {}]
    assert settings.in_region("us-west-1").prices == {}, "a region that is not set up any more"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"prices": {"g5.xlrge": 1.0}}, "prices names g5.xlrge, which is not in instance_types"),
        ({"regions": {"eu-west-1": REGION | {"prices": {"p5.x": 1.0}}}}, "prices names p5.x"),
        ({"prices": {"g5.xlarge": 0.0}}, "greater than 0"),
        ({"discount": 1.0}, "less than 1"),
    ],
)
def test_a_price_that_can_never_apply_is_refused(
    cloud_settings: Callable[..., CloudSettings], wrong: dict[str, object], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        cloud_settings(**wrong)
