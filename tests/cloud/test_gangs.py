"""Jobs on several nodes: one order for all of their instances, and the tags of what comes with them."""

from __future__ import annotations

import pytest

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
