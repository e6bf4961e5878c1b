from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_cloud.ec2 import connect
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.nova import nova
from tests.cloud.openstack_cloud import OpenStackCloud
from tests.cloud.site import CloudSite

SITE = "5e1f0000-0000-4000-8000-000000000001"
"""The identity of the site of most tests."""


@pytest.fixture(scope="session")
def moto() -> Iterator[Ec2]:
    """moto behind the proxy, one for all tests."""
    proxy = Ec2()
    yield proxy
    proxy.stop()


@pytest.fixture
def ec2(moto: Ec2, monkeypatch: pytest.MonkeyPatch) -> Ec2:
    """moto behind the proxy, reset for each test."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", moto.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto.s3_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", moto.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSM", moto.s3_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", moto.url)
    moto.reset()
    return moto


@pytest.fixture
def cloud_settings(ec2: Ec2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CloudSettings]:
    """Settings for an account in which all that they name is there: an image, a group, two subnets. What is no setting is a
    constant of `CloudSettings`."""
    for constant, value in {"reconcile_s": 1.0, "price_days": 36500.0, "ipv4_usd_per_h": 0.0}.items():
        monkeypatch.setattr(CloudSettings, constant, value)
    client = ec2.direct()
    image = client.register_image(Name="cloud-node", RootDeviceName="/dev/xvda", Architecture="x86_64")["ImageId"]
    subnets = [
        each["SubnetId"]
        for each in sorted(client.describe_subnets()["Subnets"], key=lambda each: each["AvailabilityZone"])[:2]
    ]
    group = client.describe_security_groups()["SecurityGroups"][0]["GroupId"]

    def make(**other: object) -> CloudSettings:
        fields = {
            "site": SITE,
            "name": "penstock",
            "subnets": tuple(subnets),
            "security_groups": (group,),
            "image": image,
            "instance_types": ("g5.xlarge", "g4dn.xlarge"),
            "share": tmp_path / "share",
            "by_default": True,
            "wait": "no-wait",
            "volume_usd_per_gb_month": 0.0,
            "budget": {"site": {"usd_total": 1000.0}},
        }
        constants = {name: other.pop(name) for name in [*other] if name not in CloudSettings.model_fields}
        return CloudSettings.model_validate(fields | other).model_copy(update=constants)

    return make


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = open_store(tmp_path / "state", writer=True)
    yield opened
    opened.close()


@pytest.fixture
def site(cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2) -> CloudSite:
    """A site in memory with four cloud nodes, and its cloud on moto."""
    settings = cloud_settings()
    ec2.through = ec2.through or connect(settings)
    return CloudSite(settings, store, ec2, ec2.through)


@pytest.fixture
def hypervisor(ec2: Ec2) -> Iterator[Hypervisor]:
    """Boots moto's instances. Their files are in a folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with Hypervisor(ec2, Path(folder) / "hypervisor") as machines:
            yield machines


@pytest.fixture
def plain(tmp_path: Path) -> CloudSettings:
    return CloudSettings.model_validate(
        {
            "site": SITE,
            "name": "lab",
            "share": tmp_path / "share",
            "by_default": True,
            "wait": "no-wait",
            "budget": {"site": {"usd_total": 1000.0}},
        }
    ).model_copy(update={"reconcile_s": 1.0})


@pytest.fixture
def openstack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStackCloud]:
    monkeypatch.setenv("OS_PASSWORD", "right")
    with nova() as cloud:
        yield OpenStackCloud(tmp_path, cloud)
