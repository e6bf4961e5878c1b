"""Orders into capacity reservations and capacity blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2, Fault, Reserved
from tests.cloud.site import CloudSite


def test_orders_go_into_blocks_and_reservations_first(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    """An ended reservation, a block that ends too soon, a block and a reservation with one place each, and then no
    reservation."""
    settings = cloud_settings(
        reservations=("cr-forgotten", "cr-too-soon", "cr-block-01", "cr-other-type", "cr-reserved")
    )
    site = CloudSite(settings, store, ec2, ec2.through)
    zone = ec2.direct().describe_subnets(SubnetIds=[settings.subnets[1]])["Subnets"][0]["AvailabilityZone"]
    soon = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(site.now_s() + 2000))
    ec2.reservations |= {
        "cr-reserved": Reserved("g5.xlarge", zone, 1),
        "cr-block-01": Reserved("g5.xlarge", zone, 1, block=True, end="2099-01-01T00:00:00.000Z"),
        "cr-too-soon": Reserved("g5.xlarge", zone, 9, block=True, end=soon),
        "cr-other-type": Reserved("g4dn.xlarge", zone, 9),
    }
    for job in ("1", "2"):
        site.submit(job)
        site.send(job, usd=1.0)  # for an hour, and the block that ends soon lasts for three minutes
    assert [ec2.reservations[name].left for name in ("cr-block-01", "cr-reserved", "cr-too-soon")] == [0, 0, 9]
    assert not any(action == "CreateFleet" for action, _ in ec2.calls)
    zones = {each["Placement"]["AvailabilityZone"] for each in ec2.instances()}
    assert zones == {zone}
    site.finish("1")
    site.until(lambda: site.away == ["2"])
    site.submit("3")
    ec2.faults.append(Fault("CreateFleet", "lost-after"))
    site.send("3", usd=1.0)
    site.until(lambda: site.jobs["3"].phase is Phase.RUNNING)
    assert [action for action, _ in ec2.calls].count("CreateFleet") == 1, "found again by its tag"
    assert len(ec2.running()) == 2


@pytest.mark.parametrize("kind", ["lost-before", "lost-after"])
def test_a_lost_answer_about_a_reservation_launches_nothing_twice(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2, kind: str
) -> None:
    """Even while EC2 does not list the new instance, the same reservation is tried again, although it is full by then."""
    settings = cloud_settings(reservations=("cr-block-01",))
    site = CloudSite(settings, store, ec2, ec2.through)
    zone = ec2.direct().describe_subnets(SubnetIds=[settings.subnets[0]])["Subnets"][0]["AvailabilityZone"]
    ec2.reservations["cr-block-01"] = Reserved("g5.xlarge", zone, 1, block=True, end="2099-01-01T00:00:00.000Z")
    site.submit("7")
    ec2.faults += [Fault("RunInstances", kind), Fault("DescribeInstances", "hide", times=8)]
    site.send("7")
    site.sleep(30)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert len(ec2.instances()) == 1
    assert ec2.reservations["cr-block-01"].left == 0
    assert ec2.double_launches == 0
