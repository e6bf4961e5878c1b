"""Two regions in one manager: the cheaper one is used, and what fails in one concerns that one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.model import BurstJob, Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite, there

THERE = "eu-west-1"


@pytest.fixture
def site(cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2) -> CloudSite:
    """us-east-1, and eu-west-1 at half its prices."""
    site = CloudSite(cloud_settings(regions={THERE: there(ec2, THERE)}), store, ec2, ec2.through)
    site.prices = {THERE: 0.5}
    return site


def cheapest(site: CloudSite, gpu_type: str = "a10g") -> str:
    offers = [offer for offer in site.tick().offers if offer.gpu_type == gpu_type and offer.nodes == 1]
    return min(offers, key=lambda offer: offer.usd_per_h).id


def regions_of(site: CloudSite, job: str) -> list[str]:
    """Regions in which the job's instances run."""
    return [region for region, job_ in site.running_in() if job_ == job]


def test_an_order_goes_to_the_cheapest_region_and_ends_there(site: CloudSite, ec2: Ec2) -> None:
    prices = {offer.id: offer.usd_per_h for offer in site.tick().offers}
    assert prices["g5.xlarge@eu-west-1"] == pytest.approx(prices["g5.xlarge@us-east-1"] / 2)
    site.submit("7")
    site.send("7", cheapest(site))
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert regions_of(site, "7") == [THERE]
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not site.running_in()
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert spent > 0


def test_a_region_without_capacity_is_paused_and_the_other_one_is_not(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "fleet", "InsufficientInstanceCapacity"))
    site.send("7", "g5.xlarge@eu-west-1")
    site.until(lambda: not site.state.runs)
    assert cheapest(site) == "g5.xlarge@us-east-1"
    assert any("g5.xlarge@eu-west-1 is paused" in text for text in site.state.closed)


def test_a_region_that_refuses_the_request_is_closed_until_an_admin_says_so(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "error", "InvalidSubnetID.NotFound", words="no such subnet"))
    site.send("7", "g5.xlarge@eu-west-1")
    site.until(lambda: not site.state.runs)
    site.crash()
    assert {offer.id.split("@")[1] for offer in site.tick().offers} == {"us-east-1"}
    assert "no such subnet" in " ".join(site.state.closed)
    assert (site.store.control(PROTECTED), site.state.protected) == (None, ""), "the other region goes on"
    site.send("7", cheapest(site))
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert "no such subnet" in " ".join(site.cloud.end_protection())
    assert {offer.id.split("@")[1] for offer in site.tick().offers} == {"us-east-1", THERE}


def test_a_region_that_does_not_answer_offers_nothing_and_ends_nothing(site: CloudSite, ec2: Ec2) -> None:
    """A job runs in each region. While one is silent, the other's job ends, is paid for, and a new one is launched."""
    for job, offer in (("7", "g5.xlarge@eu-west-1"), ("8", "g5.xlarge@us-east-1")):
        site.submit(job)
        site.send(job, offer)
    site.until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()))
    site.ticks(2)
    ec2.silent.add(THERE)
    site.sleep(60)
    site.ticks(3)
    assert {run.job: run.state for run in site.state.runs} == {"7": "running", "8": "running"}
    assert {offer.id.split("@")[1] for offer in site.state.offers} == {"us-east-1"}
    assert THERE in " ".join(site.state.closed)
    site.finish("8")
    site.until(lambda: site.away == ["7"])
    site.submit("9")
    site.tick(BurstJob("9", 77, "g4dn.xlarge@us-east-1", 5.0))
    site.until(lambda: site.jobs["9"].phase is Phase.RUNNING)
    assert sorted(site.running_in()) == [(THERE, "7"), ("us-east-1", "9")]
    ec2.silent.clear()
    site.sleep(60)
    for job in ("7", "9"):
        site.finish(job)
    site.until(lambda: not site.state.runs)
    assert not site.running_in()
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
