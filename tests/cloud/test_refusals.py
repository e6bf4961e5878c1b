"""A refusal stops what it concerns: an offer, a call, or all of a place. Failures with one cause count once."""

from __future__ import annotations

import pytest

from penstock_cloud.failures import refusal
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.burst.manager.provider import Kind
from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientInstanceCapacity", Kind.CAPACITY),
        ("InsufficientAddressCapacity", Kind.CAPACITY),
        ("InsufficientVolumeCapacity", Kind.CAPACITY),
        ("InsufficientCapacityOnOutpost", Kind.CAPACITY),
        ("VolumeTypeNotAvailableInZone", Kind.CAPACITY),
        ("VcpuLimitExceeded", Kind.QUOTA),
        ("NetworkInterfaceLimitExceeded", Kind.QUOTA),
        ("AddressLimitExceeded", Kind.QUOTA),
        ("MaxIOPSLimitExceeded", Kind.QUOTA),
        ("MaxSpotInstanceCountExceeded", Kind.QUOTA),
        ("ResourceCountExceeded", Kind.QUOTA),
        ("RequestLimitExceeded", Kind.THROTTLED),
        ("RequestThrottled", Kind.THROTTLED),
        ("PriorRequestNotComplete", Kind.THROTTLED),
        ("ExpiredToken", Kind.THROTTLED),
        ("InvalidLaunchTemplateId.NotFound", Kind.CAPACITY),
        ("InvalidLaunchTemplateId.VersionNotFound", Kind.CAPACITY),
        ("AuthFailure", Kind.CONFIG),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", Kind.CONFIG),
        ("UnauthorizedOperation", Kind.CONFIG),
        ("InvalidAMIID.NotFound", Kind.CONFIG),
        ("InvalidSubnetID.NotFound", Kind.CONFIG),
        ("PendingVerification", Kind.CONFIG),
        ("InvalidParameterCombination", Kind.UNKNOWN),
        ("IdempotentParameterMismatch", Kind.UNKNOWN),
        ("SomethingOfNextYear", Kind.UNKNOWN),
    ],
)
def test_codes(code: str, kind: Kind) -> None:
    assert refusal(code, "told by the test").kind is kind


def test_a_failure_of_ec2_itself_is_tried_again() -> None:
    assert refusal("SomethingOfNextYear", "", status=503).kind is Kind.THROTTLED


def test_an_unknown_refusal_stops_only_what_was_ordered(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "fleet", "SomethingOfNextYear"))
    site.send("7")
    site.until(lambda: not site.state.runs)
    assert site.store.control(PROTECTED) is None
    assert {offer.id for offer in site.tick().offers} == {"g4dn.xlarge", "2x g4dn.xlarge"}
    told = " ".join(site.state.closed)
    assert "g5.xlarge is paused" in told
    assert "Penstock does not know this refusal: SomethingOfNextYear" in told
    assert "SomethingOfNextYear" in site.state.words["7"]
    site.send("7", "g4dn.xlarge")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.sleep(3700)
    assert "g5.xlarge" in {offer.id for offer in site.tick().offers}, "it is tried again"


def test_orders_that_go_into_one_shortage_pause_their_type_once(site: CloudSite, ec2: Ec2) -> None:
    ec2.faults.append(Fault("CreateFleet", "fleet", "InsufficientInstanceCapacity", times=2))
    for job in ("1", "2"):
        site.submit(job)
    site.tick()
    site.round += 1
    site.tick(*(site.order(job) for job in ("1", "2")))
    site.tick()
    site.until(lambda: not site.state.runs)
    site.sleep(site.settings.capacity_back_off_s)
    assert "g5.xlarge" in {offer.id for offer in site.tick().offers}
    ec2.faults.append(Fault("CreateFleet", "fleet", "InsufficientInstanceCapacity"))
    site.send("1")
    site.until(lambda: not site.state.runs)
    site.sleep(site.settings.capacity_back_off_s)
    assert "g5.xlarge" not in {offer.id for offer in site.tick().offers}, "an order placed later does extend it"


def test_nodes_that_fail_to_boot_together_count_once(site: CloudSite, ec2: Ec2) -> None:
    site.settings = site.settings.model_copy(update={"protected_after": 2})
    site.crash()
    site.boots = False
    for job in ("1", "2"):
        site.submit(job)
    site.tick()
    site.tick(*(site.order(job) for job in ("1", "2")))
    site.ticks(2)
    site.sleep(site.settings.boot_timeout_s)
    site.until(lambda: not site.state.runs)
    assert site.store.control(PROTECTED) is None
    site.sleep(3601)
    site.send("1")
    site.tick()
    site.sleep(site.settings.boot_timeout_s)
    site.until(lambda: not site.state.runs)
    assert "2 boots in a row failed" in str(site.store.control(PROTECTED))


@pytest.mark.parametrize(
    "action", ["CreateFleet", "DescribeInstances", "TerminateInstances", "DeletePlacementGroup", "CreateLaunchTemplate"]
)
def test_a_page_of_a_proxy_in_ec2s_place_counts_as_no_answer(site: CloudSite, ec2: Ec2, action: str) -> None:
    """boto3 cannot read it, and raises another error than for a refusal or for no answer."""
    site.submit("7")
    site.tick()
    ec2.faults.append(Fault(action, "gateway's page"))
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not site.state.protected
    assert not ec2.running()
    assert len(ec2.instances()) == 1
    assert not ec2.faults, "the page was answered"
