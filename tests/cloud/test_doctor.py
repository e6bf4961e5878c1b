"""`penstock cloud doctor` against moto: it finds each fault, with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from penstock_cloud import staging
from penstock_cloud.catalogue import shipped
from penstock_cloud.doctor import examine, policy
from penstock_cloud.ec2 import Ec2 as Ec2Region
from penstock_cloud.ec2 import connect, connect_ssm
from penstock_cloud.settings import CloudSettings
from tests.cloud.conftest import SITE
from tests.cloud.faults import KEYS, Ec2, Fault, Reserved


def quotas(vcpus: float) -> Any:
    """moto has no EC2 quotas, so botocore's stub answers for them."""
    client = boto3.client("service-quotas", region_name="us-east-1", **KEYS)
    stub = Stubber(client)
    told = {"Quota": {"Value": vcpus, "QuotaCode": "L-DB2E81BA"}, "ResponseMetadata": {"RequestId": "x"}}
    stub.add_response("get_service_quota", told)
    stub.activate()
    return client


def wrong(settings: CloudSettings, vcpus: float = 64.0) -> dict[str, str]:
    """Check -> remedy, for each failed check."""
    found = examine(settings, connect(settings), quotas(vcpus), shipped(), lambda: True)
    return {finding.check: finding.remedy for finding in found if not finding.ok}


def test_a_site_that_is_set_up_has_nothing_wrong(cloud_settings: Callable[..., CloudSettings]) -> None:
    assert wrong(cloud_settings()) == {}


@pytest.mark.parametrize(
    ("change", "check", "remedy"),
    [
        ({"subnets": ()}, "subnets", "name subnets of us-east-1"),
        ({"subnets": ("subnet-0123456789abcdef0",)}, "subnets", "other regions"),
        ({"image": "ami-0123456789abcdef0"}, "image", "AMIs differ from region to region"),
        ({"security_groups": ("sg-0123456789abcdef0",)}, "security groups", "slurmctld and the nodes talk"),
        ({"instance_types": ("g5.xlarge", "g9.huge")}, "prices", "take them out"),
        ({"budget": {}}, "budget", "usd_per_month"),
    ],
)
def test_what_is_named_wrongly_is_found(
    cloud_settings: Callable[..., CloudSettings], change: dict[str, Any], check: str, remedy: str
) -> None:
    assert remedy in wrong(cloud_settings(**change)).get(check, "")


def test_a_wrong_region_is_found(cloud_settings: Callable[..., CloudSettings]) -> None:
    found = wrong(cloud_settings(region="eu-west-1"))
    assert "other regions" in found["subnets"]
    assert "region" in found["image"]
    assert connect(cloud_settings(region="eu-west-1"))


def test_a_missing_permission_is_found(cloud_settings: Callable[..., CloudSettings], ec2: Ec2) -> None:
    ec2.faults.append(Fault("RunInstances", "error", "UnauthorizedOperation", words="You are not authorized"))
    assert "penstock cloud policy" in wrong(cloud_settings())["permission"]


def test_a_quota_of_nothing_is_found(cloud_settings: Callable[..., CloudSettings]) -> None:
    assert (
        "raise L-DB2E81BA to at least 4 vCPUs" in wrong(cloud_settings(), vcpus=0.0)["quota of G instances, on-demand"]
    )


def test_nothing_is_launched_by_looking(cloud_settings: Callable[..., CloudSettings], ec2: Ec2) -> None:
    wrong(cloud_settings())
    assert ec2.instances() == []


def test_the_policy_allows_what_the_code_asks_for_and_no_more(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2
) -> None:
    allowed = {
        action
        for statement in policy(cloud_settings())["Statement"]
        for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }
    assert not any("*" in action for action in allowed)
    wrong(cloud_settings())
    assert {"s3:GetObject", "s3:PutObject"}.isdisjoint(allowed), "without a bucket, the policy has no statement for one"
    asked = {f"ec2:{action}" for action, _ in ec2.calls}
    launches = {"ec2:CreateFleet", "ec2:TerminateInstances", "ec2:DescribeInstances", "ec2:CreatePlacementGroup"}
    assert asked | launches <= allowed


def test_the_bucket_of_detached_runs_is_tried(cloud_settings: Callable[..., CloudSettings], ec2: Ec2) -> None:
    settings = cloud_settings(bucket="penstock-runs")
    s3 = staging.connect(settings)

    def told() -> dict[str, str]:
        found = examine(settings, connect(settings), quotas(64.0), shipped(), lambda: True, s3)
        return {finding.check: f"{finding.text} {finding.remedy}" for finding in found}

    assert "NoSuchBucket" in told()["bucket"]
    assert "create the bucket penstock-runs" in told()["bucket"]
    s3.create_bucket(Bucket="penstock-runs")
    assert told()["bucket"] == "penstock-runs can be written and read "
    assert "KeyCount" in (listed := s3.list_objects_v2(Bucket="penstock-runs"))
    assert not listed["KeyCount"]
    rights = {each["Sid"]: each for each in policy(settings)["Statement"]}
    assert rights["PassWorkAndResults"]["Resource"] == f"arn:aws:s3:::penstock-runs/{SITE}/*"


def test_reservations_that_nothing_can_go_into_are_found(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2
) -> None:
    settings = cloud_settings(reservations=("cr-good", "cr-far", "cr-gone"))
    zone = connect(settings).describe_subnets(SubnetIds=[settings.subnets[0]])["Subnets"][0]["AvailabilityZone"]
    ec2.reservations |= {"cr-good": Reserved("g5.xlarge", zone, 1), "cr-far": Reserved("g5.xlarge", "elsewhere", 1)}
    assert "in the zones of subnets" in wrong(settings)["reservations"]
    found = examine(settings, connect(settings), quotas(64.0), shipped(), lambda: True)
    assert "cr-far, cr-gone" in next(each.text for each in found if each.check == "reservations")


@pytest.mark.parametrize(
    ("key", "resource"),
    [
        ("1234abcd", "arn:aws:kms:*:*:key/1234abcd"),
        ("arn:aws:kms:us-east-1:1:key/1234abcd", "arn:aws:kms:us-east-1:1:key/1234abcd"),
        ("alias/site", "arn:aws:kms:*:*:key/*"),
    ],
)
def test_the_policy_allows_the_sites_profile_and_key(
    cloud_settings: Callable[..., CloudSettings], key: str, resource: str
) -> None:
    plain = {each["Sid"] for each in policy(cloud_settings())["Statement"]}
    settings = cloud_settings(instance_profile="node", kms_key=key)
    more = {each["Sid"]: each for each in policy(settings)["Statement"] if each["Sid"] not in plain}
    assert set(more) == {"GiveInstancesTheirRole", "EncryptVolumes", "LetEc2UseTheKey"}
    assert more["GiveInstancesTheirRole"]["Resource"] == "arn:aws:iam::*:role/node"
    for sid in ("EncryptVolumes", "LetEc2UseTheKey"):
        assert more[sid]["Resource"] == resource
        assert ("kms:ResourceAliases" in str(more[sid].get("Condition"))) == key.startswith("alias/")


@pytest.mark.parametrize(("region", "partition"), [("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")])
def test_the_policy_names_the_partition_of_the_region(
    cloud_settings: Callable[..., CloudSettings], region: str, partition: str
) -> None:
    text = str(policy(cloud_settings(region=region, instance_profile="node", bucket="b")))
    assert f"arn:{partition}:ec2" in text
    assert "arn:aws:" not in text
    assert "arn:aws:" in str(policy(cloud_settings()))


def test_a_shared_folder_that_everybody_can_write_is_found(cloud_settings: Callable[..., CloudSettings]) -> None:
    settings = cloud_settings()
    (settings.share / "notices").mkdir(parents=True)
    assert "share" not in wrong(settings)
    (settings.share / "notices").chmod(0o777)
    assert "chmod o-w" in wrong(settings)["share"]


def test_the_image_may_be_one_that_a_parameter_names(cloud_settings: Callable[..., CloudSettings], ec2: Ec2) -> None:
    plain = cloud_settings()
    settings = cloud_settings(image="ssm:/lab/penstock/ami")
    assert "ParameterNotFound" in next(
        each.text for each in examine(settings, connect(settings), quotas(64.0), shipped(), lambda: True) if not each.ok
    )
    boto3.client("ssm", region_name="us-east-1", endpoint_url=ec2.s3_url, **KEYS).put_parameter(
        Name="/lab/penstock/ami", Value=plain.image, Type="String"
    )
    assert wrong(settings) == {}
    template = Ec2Region(connect(settings), settings, ssm=connect_ssm(settings)).templates.of_site()
    (made,) = ec2.direct().describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"]
    assert made["LaunchTemplateData"]["ImageId"] == plain.image
    rights = {each["Sid"]: each["Resource"] for each in policy(settings)["Statement"]}
    assert rights["LookUpTheImage"] == "arn:aws:ssm:*:*:parameter/lab/penstock/ami"
    assert "LookUpTheImage" not in {each["Sid"] for each in policy(plain)["Statement"]}


def test_groups_that_efa_cannot_work_with_are_found(cloud_settings: Callable[..., CloudSettings], ec2: Ec2) -> None:
    settings = cloud_settings(efa=True)
    (group,) = settings.security_groups
    client = ec2.direct()
    all_traffic = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    for allow in (client.authorize_security_group_ingress, client.authorize_security_group_egress):
        assert "one for outbound" in wrong(settings)["security groups"]
        allow(GroupId=group, IpPermissions=all_traffic)
    assert wrong(settings) == {}
