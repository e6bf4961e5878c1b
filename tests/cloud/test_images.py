"""The AMI that a parameter names is pinned by its id: what others do to the parameter changes nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.model import Phase
from penstock_scheduler.people.errors import CloudRefuses
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import KEYS, Ec2
from tests.cloud.site import CloudSite

NAME = "/lab/penstock/ami"


class Images:
    """The parameter, and the AMIs that it has named."""

    def __init__(self, ec2: Ec2, first: str) -> None:
        self._ec2, self.first = ec2, first
        self.ssm: Any = boto3.client("ssm", region_name="us-east-1", endpoint_url=ec2.s3_url, **KEYS)
        self.name(first)

    def name(self, image: str) -> None:
        self.ssm.put_parameter(Name=NAME, Value=image, Type="String", Overwrite=True)

    def another(self) -> str:
        client = self._ec2.direct()
        image = str(client.register_image(Name="newer", RootDeviceName="/dev/xvda", Architecture="x86_64")["ImageId"])
        self.name(image)
        return image


@pytest.fixture
def images(ec2: Ec2, cloud_settings: Callable[..., CloudSettings]) -> Images:
    return Images(ec2, cloud_settings().image)


@pytest.fixture
def site(cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2, images: Images) -> CloudSite:
    return CloudSite(cloud_settings(image=f"ssm:{NAME}"), store, ec2)


def runs_on(site: CloudSite, ec2: Ec2, job: str, offer: str = "g5.xlarge") -> str:
    """The AMI of an instance that is ordered now."""
    before = {each["InstanceId"] for each in ec2.instances("running")}
    site.submit(job)
    site.send(job, offer)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    (image,) = [each["ImageId"] for each in ec2.instances("running") if each["InstanceId"] not in before]
    return str(image)


def test_a_changed_parameter_changes_no_launch_until_an_admin_accepts_it(
    site: CloudSite, ec2: Ec2, images: Images
) -> None:
    assert runs_on(site, ec2, "7") == images.first
    newer = images.another()
    site.crash()
    assert runs_on(site, ec2, "8") == images.first
    (told,) = site.tick().troubles
    assert f"names {newer} in us-east-1 now, and instances launch from {images.first}" in told
    assert "`penstock cloud accept-image`" in told
    assert site.cloud.accept_images() == (f"{newer} in us-east-1",)
    assert site.tick().troubles == ()
    assert runs_on(site, ec2, "9", "g4dn.xlarge") == newer
    site.crash()
    assert runs_on(site, ec2, "10", "g4dn.xlarge") == newer
    assert site.cloud.accept_images() == ()


def test_the_image_is_pinned_before_the_first_order(site: CloudSite, ec2: Ec2, images: Images) -> None:
    site.ticks(2)
    images.another()
    assert runs_on(site, ec2, "7") == images.first


def test_the_parameter_is_looked_at_every_hour(site: CloudSite, ec2: Ec2, images: Images) -> None:
    assert runs_on(site, ec2, "7") == images.first
    images.another()
    assert site.tick().troubles == ()
    site.sleep(3700)
    site.ticks(2)
    assert len(site.state.troubles) == 1
    images.name(images.first)
    site.sleep(3700)
    site.ticks(2)
    assert site.state.troubles == ()


def test_another_parameter_in_the_settings_needs_no_further_consent(
    site: CloudSite, ec2: Ec2, images: Images, cloud_settings: Callable[..., CloudSettings]
) -> None:
    assert runs_on(site, ec2, "7") == images.first
    newer = images.another()
    images.ssm.put_parameter(Name="/lab/other", Value=newer, Type="String")
    site.settings = cloud_settings(image="ssm:/lab/other")
    site.crash()
    assert runs_on(site, ec2, "8") == newer


def test_a_pinned_image_outlives_its_parameter(site: CloudSite, ec2: Ec2, images: Images) -> None:
    assert runs_on(site, ec2, "7") == images.first
    images.ssm.delete_parameter(Name=NAME)
    site.crash()
    assert runs_on(site, ec2, "8") == images.first
    with pytest.raises(CloudRefuses, match="ParameterNotFound"):
        site.cloud.accept_images()


def test_a_pinned_image_that_is_deleted_names_the_command(site: CloudSite, ec2: Ec2, images: Images) -> None:
    assert runs_on(site, ec2, "7") == images.first
    images.another()
    ec2.direct().deregister_image(ImageId=images.first)
    site.crash()
    site.submit("8")
    site.send("8")
    site.until(lambda: site.away == ["7"])
    assert "accept-image" in str(site.store.control(PROTECTED))
