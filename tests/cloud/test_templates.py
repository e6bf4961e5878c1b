"""The launch template of a site is made once, and stays what it was: others may change its default, or delete it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock_cloud.images import PinnedImage
from penstock_cloud.settings import CloudSettings
from penstock_cloud.templates import Templates
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed
from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


def run(site: CloudSite, job: str, offer: str = "g5.xlarge") -> None:
    site.submit(job)
    site.send(job, offer)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)


def another_version(ec2: Ec2) -> str:
    """A person gives the template a second version with another AMI, as its default. Returns the template's id."""
    client = ec2.direct()
    image = client.register_image(Name="theirs", RootDeviceName="/dev/xvda", Architecture="x86_64")["ImageId"]
    (template,) = client.describe_launch_templates()["LaunchTemplates"]
    id_ = str(template["LaunchTemplateId"])
    client.create_launch_template_version(LaunchTemplateId=id_, LaunchTemplateData={"ImageId": image})
    client.modify_launch_template(LaunchTemplateId=id_, DefaultVersion="2")
    return id_


@pytest.mark.parametrize("restarted", [False, True])
def test_a_changed_default_of_the_template_changes_no_launch(site: CloudSite, ec2: Ec2, restarted: bool) -> None:
    run(site, "7")
    another_version(ec2)
    if restarted:
        site.crash()
    run(site, "8")
    assert {each["ImageId"] for each in ec2.instances("running")} == {site.settings.image}
    asked = [asked for action, asked in ec2.calls if action == "CreateFleet"]
    version = "LaunchTemplateConfigs.1.LaunchTemplateSpecification.Version"
    assert [each[version] for each in asked] == ["1", "1"]


def test_a_deleted_template_pauses_one_offer_and_is_made_anew(site: CloudSite, ec2: Ec2) -> None:
    run(site, "7")
    (template,) = ec2.direct().describe_launch_templates()["LaunchTemplates"]
    ec2.direct().delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
    site.submit("8")
    site.send("8")
    site.until(lambda: site.away == ["7"])
    assert site.store.control(PROTECTED) is None
    assert "launch template" in site.state.words["8"]
    assert "g5.xlarge is paused" in " ".join(site.state.closed)
    run(site, "9", "g4dn.xlarge")
    site.sleep(3600)
    run(site, "8")


def test_a_template_without_its_first_version_starts_nothing_and_is_tried_again(site: CloudSite, ec2: Ec2) -> None:
    run(site, "7")
    site.crash()
    gone = Fault("DescribeLaunchTemplateVersions", "error", "InvalidLaunchTemplateId.VersionNotFound")
    ec2.faults.append(gone)
    site.submit("8")
    site.send("8")
    site.until(lambda: site.away == ["7"])
    assert site.store.control(PROTECTED) is None
    assert "VersionNotFound" in site.state.words["8"]
    site.sleep(3600)
    run(site, "8")


def test_a_template_of_the_same_name_that_is_anothers_starts_nothing(site: CloudSite, ec2: Ec2) -> None:
    run(site, "7")
    client = ec2.direct()
    (template,) = client.describe_launch_templates()["LaunchTemplates"]
    client.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
    client.create_launch_template(
        LaunchTemplateName=template["LaunchTemplateName"], LaunchTemplateData={"ImageId": "ami-0000"}
    )
    site.crash()
    site.submit("8")
    site.send("8")
    site.until(lambda: site.away == ["7"])
    assert "is not as Penstock made it" in site.state.words["8"]
    assert len(ec2.instances("running")) == 1


def test_parallel_orders_make_the_template_once(cloud_settings: Callable[..., CloudSettings]) -> None:
    made: list[str] = []
    told: list[LaunchFailed] = []

    def ask(method: str, client: Any = None, /, **asked: Any) -> Any:
        """EC2. Another order comes while a call is under way."""
        made.append(method)
        if len(told) < 2:
            with pytest.raises(LaunchFailed) as refused:
                templates.of_site()
            told.append(refused.value)
        if method == "describe_images":
            return {"Images": [{}]}
        return {"LaunchTemplate": {"LaunchTemplateId": "lt-1"}}

    settings = cloud_settings()
    templates = Templates(ask, settings, PinnedImage(ask, settings))
    assert templates.of_site() == templates.of_site() == "lt-1"
    assert made == ["describe_images", "create_launch_template"]
    assert [each.kind for each in told] == [Kind.THROTTLED, Kind.THROTTLED]
