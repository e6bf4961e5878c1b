"""Jobs on several nodes: one order for all of their instances, and the tags of what comes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.ec2 import connect
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.provider import Order
from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite
from tests.cloud.test_ownership import tags_of


def test_a_gang_is_one_order_for_all_its_nodes_or_none(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7", max_gpus=2)
    ec2.faults.append(Fault("CreateFleet", "fleet", "InsufficientInstanceCapacity"))
    site.send("7", "2x g5.xlarge", 10.0)
    site.until(lambda: not site.state.runs)
    assert not ec2.instances()
    assert not ec2.groups
    site.sleep(1300)
    site.send("7", "2x g5.xlarge", 10.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    fleets = [fields for action, fields in ec2.calls if action == "CreateFleet"]
    assert len(fleets) == 2
    assert fleets[1]["TargetCapacitySpecification.TotalTargetCapacity"] == "2"
    assert fleets[1]["OnDemandOptions.MinTargetCapacity"] == "2"
    assert site.jobs["7"].allocation is not None
    named = {tags_of(each)["penstock:node"] for each in ec2.instances("running")}
    assert named == {share.node for share in site.jobs["7"].allocation.shares}
    assert len(named) == 2
    assert ec2.groups == {f"penstock-{site.run_of('7')}"}
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not ec2.groups
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_what_ec2_launches_of_a_gang_that_is_not_whole_is_ended_and_paid_for(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7", max_gpus=2)
    ec2.faults.append(Fault("CreateFleet", "partial"))
    site.send("7", "2x g5.xlarge", 10.0)
    site.until(lambda: not site.state.runs)
    assert len(ec2.instances()) == 1
    assert not ec2.running()
    assert "1 of 2 instances" in site.state.words["7"]
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert spent > 0


@pytest.mark.parametrize("action", ["CreateFleet", "CreateTags"])
@pytest.mark.parametrize("kind", ["lost-before", "lost-after"])
def test_a_lost_answer_about_a_gang_launches_nothing_twice_and_each_node_has_its_name(
    site: CloudSite, ec2: Ec2, action: str, kind: str
) -> None:
    site.submit("7", max_gpus=2)
    ec2.faults.append(Fault(action, kind))
    site.send("7", "2x g5.xlarge", 10.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert len(ec2.instances()) == 2
    assert len({tags_of(each)["penstock:node"] for each in ec2.instances()}) == 2
    assert ec2.double_launches == 0


def test_volumes_have_the_sites_tag(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7")
    (found,) = ec2.direct().describe_launch_template_versions(Versions=["$Latest"])["LaunchTemplateVersions"]
    told = found["LaunchTemplateData"]["TagSpecifications"]
    (tags,) = [each for each in told if each["ResourceType"] == "volume"]
    assert {"Key": "penstock:site", "Value": str(site.settings.site)} in tags["Tags"]


def test_a_run_is_tidied_without_a_refusal(site: CloudSite, ec2: Ec2, caplog: pytest.LogCaptureFixture) -> None:
    """A site without detached runs may not delete templates, so it does not try."""
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not any(action == "DeleteLaunchTemplate" for action, _ in ec2.calls)
    assert "a leftover of the run stays" not in caplog.text


def interfaces(ec2: Ec2) -> list[list[dict[str, Any]]]:
    """The network interfaces of each launch template."""
    found = ec2.direct().describe_launch_template_versions(Versions=["$Latest"])["LaunchTemplateVersions"]
    return [each["LaunchTemplateData"].get("NetworkInterfaces", []) for each in found]


@pytest.mark.parametrize(("instance_type", "cards"), [("g5.xlarge", 0), ("g5.12xlarge", 1), ("p4d.24xlarge", 4)])
@pytest.mark.parametrize("fleets", [True, False])
def test_a_gang_has_an_efa_interface_on_each_network_card_of_its_type(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2, instance_type: str, cards: int, fleets: bool
) -> None:
    settings = cloud_settings(efa=True)
    region = Region(connect(settings), settings)
    if not fleets:
        ec2.faults.append(Fault("CreateFleet", "error", "UnauthorizedOperation"))
    order = Order("7.1-x", "token", instance_type, "on-demand", ("a", "b"), {"run": "7.1-x"}, 1.0)
    assert set(region.launch_gang(order)) == {"a", "b"}
    (made,) = interfaces(ec2)
    assert [(each["NetworkCardIndex"], each["DeviceIndex"], each["InterfaceType"]) for each in made] == [
        (card, 0 if card == 0 else 1, "efa") for card in range(cards)
    ]
    assert all(each["Groups"] == list(settings.security_groups) for each in made)
    launch = [asked for action, asked in ec2.calls if action == ("CreateFleet" if fleets else "RunInstances")][-1]
    subnets = {key: value for key, value in launch.items() if key.endswith("SubnetId")}
    assert set(subnets.values()) == {settings.subnets[0]}
    if not fleets:
        names = [f"NetworkInterface.{card}.SubnetId" for card in range(1, cards + 1)] or ["SubnetId"]
        assert sorted(subnets) == names
    assert len(ec2.running()) == 2


def test_a_single_instance_and_a_site_that_does_not_ask_for_it_have_no_efa(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2
) -> None:
    for efa, nodes in ((True, ("a",)), (False, ("a", "b"))):
        settings = cloud_settings(efa=efa)
        order = Order(f"7.{efa}-x", f"token {efa}", "p4d.24xlarge", "on-demand", nodes, {"run": "7"}, 1.0)
        Region(connect(settings), settings).launch_gang(order)
    assert set(map(len, interfaces(ec2))) == {0}
    assert not any(action == "DescribeInstanceTypes" for action, _ in ec2.calls)
