"""Checks the section `[cloud]` before jobs depend on it. Each finding tells what is wrong and how to fix it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from penstock_cloud.catalogue import Catalogue
from penstock_cloud.ec2 import Ec2, connect_ssm
from penstock_cloud.failures import ask
from penstock_cloud.images import LOOK_UP
from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import StagingBucket
from penstock_cloud.templates import VERSION
from penstock_scheduler.burst.manager.provider import LaunchFailed
from penstock_scheduler.burst.manager.share import SharedFolder
from penstock_scheduler.safety import children

QUOTAS = {
    ("g", "on-demand"): "L-DB2E81BA",
    ("g", "spot"): "L-3819A6DF",
    ("p", "on-demand"): "L-417A185B",
    ("p", "spot"): "L-7212CCBC",
    **{(letter, "on-demand"): "L-1216C47A" for letter in "acdhimrtz"},
    **{(letter, "spot"): "L-34B43A08" for letter in "acdhimrtz"},
}
"""(first letter of the family, market) -> AWS's code for the quota in vCPUs. Source: AWS, "Amazon EC2 service quotas"."""


@dataclass(frozen=True, slots=True)
class CloudFinding:
    """The result of one check. `remedy` is empty if the check passed."""

    check: str
    text: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check passed."""
        return not self.remedy


def policy(settings: CloudSettings) -> dict[str, Any]:
    """The least-privilege IAM policy for these settings, limited to what has this site's UUID.

    The profile and the key have statements only where they are set.

    The statements for the key are those of AWS, "Requirements for Amazon EBS encryption".
    """
    text = (files("penstock_cloud") / "data" / "iam-policy.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.replace("SITE", str(settings.site)))
    if settings.instance_profile is not None:
        found["Statement"].append(
            {
                "Sid": "GiveInstancesTheirRole",
                "Effect": "Allow",
                "Action": ["iam:PassRole"],
                "Resource": f"arn:aws:iam::*:role/{settings.instance_profile}",
                "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
            }
        )
    if settings.image.startswith(LOOK_UP):
        parameter = f"arn:aws:ssm:*:*:parameter/{settings.image.removeprefix(LOOK_UP).lstrip('/')}"
        found["Statement"].append(
            {"Sid": "LookUpTheImage", "Effect": "Allow", "Action": ["ssm:GetParameter"], "Resource": parameter}
        )
    if settings.kms_key is not None:
        found["Statement"] += _key_statements(settings.kms_key)
    if settings.bucket is not None:
        found["Statement"] += _staging_statements(settings)
    return _in_partition(found, settings.region)


def _in_partition(policy: dict[str, Any], region: str) -> dict[str, Any]:
    """The policy as the region's part of AWS names things. GovCloud and China have names of their own.

    Source: AWS, "Amazon Resource Names (ARNs)"; AWS China, "Amazon Resource Names and service principals".
    """
    text = json.dumps(policy)
    if region.startswith("us-gov-"):
        text = text.replace("arn:aws:", "arn:aws-us-gov:")
    elif region.startswith("cn-"):
        text = text.replace("arn:aws:", "arn:aws-cn:").replace('"ec2.amazonaws.com"', '"ec2.amazonaws.com.cn"')
    found: dict[str, Any] = json.loads(text)
    return found


def _staging_statements(settings: CloudSettings) -> list[dict[str, Any]]:
    """For detached runs: only this site's objects in S3, and a launch template for each run."""
    bucket = f"arn:aws:s3:::{settings.bucket}"
    return [
        {
            "Sid": "PassWorkAndResults",
            "Effect": "Allow",
            "Action": ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
            "Resource": f"{bucket}/{settings.site}/*",
        },
        {
            "Sid": "SeeWhatIsThere",
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": f"{settings.site}/*"}},
        },
        {
            "Sid": "DropTemplatesOfRuns",
            "Effect": "Allow",
            "Action": ["ec2:DeleteLaunchTemplate"],
            "Resource": "arn:aws:ec2:*:*:launch-template/*",
            "Condition": {"StringEquals": {"aws:ResourceTag/penstock:site": str(settings.site)}},
        },
    ]


def _key_statements(key: str) -> list[dict[str, Any]]:
    """For a key, given as ARN, id or alias (`alias/NAME`, also as ARN). IAM itself identifies keys only by ARN."""
    which: dict[str, dict[str, Any]] = {}
    resource = key if key.startswith("arn:") else f"arn:aws:kms:*:*:key/{key}"
    if "alias/" in key:
        resource = "arn:aws:kms:*:*:key/*"
        which = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": key[key.index("alias/") :]}}
    use = [
        "kms:Decrypt",
        "kms:DescribeKey",
        "kms:GenerateDataKeyWithoutPlaintext",
        "kms:ReEncryptFrom",
        "kms:ReEncryptTo",
    ]
    statement = {"Sid": "EncryptVolumes", "Effect": "Allow", "Action": use, "Resource": resource}
    grant = {
        "Sid": "LetEc2UseTheKey",
        "Effect": "Allow",
        "Action": ["kms:CreateGrant"],
        "Resource": resource,
        "Condition": {"Bool": {"kms:GrantIsForAWSResource": "true"}} | which,
    }
    return [statement | ({"Condition": which} if which else {}), grant]


def examine(
    settings: CloudSettings,
    ec2: Any,
    quotas: Any,
    catalogue: Catalogue | None,
    share_writable: Callable[[], bool],
    s3: Any = None,
) -> Iterator[CloudFinding]:
    """All checks, ordered so that each check relies only on earlier ones.

    Args:
        ec2: boto3's client of EC2.
        quotas: boto3's client of Service Quotas.
        share_writable: whether `[cloud] share` can be written here.
        s3: boto3's client of S3, if detached runs are set up.
    """
    yield _subnets(settings, ec2)
    yield _image(settings, ec2)
    yield _groups(settings, ec2)
    yield from _types(settings, ec2, catalogue)
    yield _permission(settings, ec2)
    if settings.reservations:
        yield _reservations(settings, ec2)
    if settings.bucket is not None and s3 is not None:
        yield _bucket(settings, settings.bucket, s3)
    yield from _quotas(settings, quotas, catalogue)
    budget = settings.budget
    caps = (budget.site.usd_total, budget.site.usd_per_month)
    if all(cap == 0 for cap in caps if cap is not None):
        yield CloudFinding(
            "budget", "the site's cap is $0, so no job may burst", "set [cloud.budget.site] usd_per_month or usd_total"
        )
    else:
        yield CloudFinding("budget", "a cap is set")
    if share_writable() and (why := SharedFolder(settings.share, settings.share_users).trouble()):
        yield CloudFinding("share", *why.split("; ", 1))
    elif share_writable():
        yield CloudFinding("share", f"{settings.share} can be written")
    else:
        remedy = (
            "make the folder, on a file system that the cloud nodes mount, and let penstockd and slurmctld write it"
        )
        yield CloudFinding("share", f"{settings.share} cannot be written", remedy)


LEAST_SUSPEND_S = 30.0
"""SuspendTimeout below which Slurm uses a node's name again before its last instance has surely ended: Slurm's default."""

HOLDS = ("21.08", "22.05")
"""Slurm before 23.02 keeps a job's addresses "TBD" when the job leaves nodes that boot, and cannot start it on site with them."""


def judge_timeouts(config: Mapping[str, str], boot_timeout_s: float) -> Iterator[CloudFinding]:
    """Slurm's time-outs against ours.

    Args:
        config: `scontrol show config`.
        boot_timeout_s: `[cloud] boot_timeout_s`.
    """
    if config.get("ResumeProgram", "(null)") == "(null)":
        yield CloudFinding("slurm.conf", "no ResumeProgram is set", "add the lines of docs/admin/bursting.md")
        return
    for key, least_s, why in (
        ("ResumeTimeout", boot_timeout_s, "so Slurm gives up nodes that penstockd still waits for (boot_timeout_s)"),
        ("SuspendTimeout", LEAST_SUSPEND_S, "so Slurm may use a node's name again while its last instance still ends"),
    ):
        number = config.get(key, "").split(" ")[0]
        if number.isdigit() and float(number) < least_s:
            yield CloudFinding(key, f"{key} is {number} s, {why}", f"set {key}={least_s:.0f} or more in slurm.conf")
        else:
            yield CloudFinding(key, config.get(key, "not known"))
    version = config.get("SLURM_VERSION", "")
    spared = "cloud_dns" in config.get("SlurmctldParameters", "") or "/" in config.get("PrologSlurmctld", "")
    if version.startswith(HOLDS) and not spared:
        why = f'Slurm {version} holds a job ("launch failed requeued held") that starts on site after its instance did not boot'
        yield CloudFinding(
            "Slurm", why, "set a PrologSlurmctld, such as /bin/true, in slurm.conf; or use Slurm 23.02 or newer"
        )


def slurms_timeouts(boot_timeout_s: float, partition: str) -> Iterator[CloudFinding]:
    """The same of the Slurm of this machine. The line of the cloud partition goes before the rest of slurm.conf."""
    config: dict[str, str] = {}
    for asked in ("show config", f"show partition {partition}"):
        try:
            done = children.run([children.program("scontrol"), *asked.split(" ")], env=os.environ, timeout_s=20.0)
        except children.ChildError as error:
            yield CloudFinding("slurm.conf", f"scontrol {asked}: {error.text}", "run this where Slurm's commands are")
            return
        if done.returncode != 0:
            yield CloudFinding(
                "slurm.conf", f"scontrol {asked}: {done.err.strip()}", "run this while slurmctld answers"
            )
            return
        parts = done.out.splitlines() if asked == "show config" else done.out.split()
        pairs = (part.partition("=") for part in parts)
        config |= {key.strip(): value.strip() for key, _, value in pairs if value.strip() not in ("", "GLOBAL")}
    yield from judge_timeouts(config, boot_timeout_s)


def _refused(check: str, error: LaunchFailed, remedy: str) -> CloudFinding:
    """The remedy for an error code that means the same in every check, or else the check's own remedy."""
    known = {
        "UnauthorizedOperation": "give penstockd's role the policy that `penstock cloud policy` prints",
        "AccessDeniedException": "give penstockd's role the policy that `penstock cloud policy` prints",
        "AuthFailure": "give penstockd valid credentials: an instance profile, or ~/.aws/credentials of its user",
        "OptInRequired": "this account may not use this region: enable it in the account's settings, or change [cloud] region",
    }
    if error.code == "" and "credentials" in error.words.lower():
        remedy = known["AuthFailure"]
    if error.code == "" and "endpoint" in error.words.lower():
        remedy = "[cloud] region is misspelt, or this machine cannot reach it: see `aws ec2 describe-regions`"
    return CloudFinding(check, str(error), known.get(error.code, remedy))


def _subnets(settings: CloudSettings, ec2: Any) -> CloudFinding:
    remedy = f"name subnets of {settings.region} in [cloud] subnets; EC2 does not find ids of other regions"
    if not settings.subnets:
        return CloudFinding("subnets", "none is set", remedy)
    try:
        found = ask(ec2.describe_subnets, SubnetIds=list(settings.subnets))["Subnets"]
    except LaunchFailed as error:
        return _refused("subnets", error, remedy)
    full = [each["SubnetId"] for each in found if each.get("AvailableIpAddressCount", 1) < 1]
    if full:
        return CloudFinding(
            "subnets", f"no free address in {', '.join(full)}", "name larger subnets in [cloud] subnets"
        )
    return CloudFinding("subnets", ", ".join(f"{each['SubnetId']} in {each['AvailabilityZone']}" for each in found))


def _image(settings: CloudSettings, ec2: Any) -> CloudFinding:
    remedy = f"name an AMI of {settings.region} in [cloud] image: AMIs differ from region to region"
    if not settings.image:
        return CloudFinding("image", "none is set", remedy)
    try:
        image = Ec2(ec2, settings, ssm=connect_ssm(settings)).image.id()
        found = ask(ec2.describe_images, ImageIds=[image])["Images"]
    except LaunchFailed as error:
        return _refused("image", error, remedy)
    if not found:
        return CloudFinding("image", f"{image} does not exist", remedy)
    return CloudFinding("image", f"{image} ({found[0].get('Name', 'without a name')})")


def _groups(settings: CloudSettings, ec2: Any) -> CloudFinding:
    remedy = "name groups of the subnets' VPC in [cloud] security_groups, which let slurmctld and the nodes talk"
    if not settings.security_groups:
        return CloudFinding("security groups", "none is set", remedy)
    try:
        found = ask(ec2.describe_security_groups, GroupIds=list(settings.security_groups))["SecurityGroups"]
    except LaunchFailed as error:
        return _refused("security groups", error, remedy)
    if settings.efa and not any(_open_among_members(each) for each in found):
        text = "[cloud] efa needs a group that allows all traffic to and from its own members, and none does"
        return CloudFinding(
            "security groups", text, "add such a rule for inbound and one for outbound traffic to one of them"
        )
    return CloudFinding("security groups", ", ".join(settings.security_groups))


def _open_among_members(group: Mapping[str, Any]) -> bool:
    """Whether a security group allows all traffic to and from itself. EFA asks for such rules, not for wider ones."""

    def allows(rules: Iterable[Mapping[str, Any]]) -> bool:
        return any(
            rule.get("IpProtocol") == "-1"
            and any(pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", ()))
            for rule in rules
        )

    return allows(group.get("IpPermissions", ())) and allows(group.get("IpPermissionsEgress", ()))


def _types(settings: CloudSettings, ec2: Any, catalogue: Catalogue | None) -> Iterator[CloudFinding]:
    if catalogue is None:
        text = f"no instance types are known in {settings.region}"
        yield CloudFinding("prices", text, "run `penstock cloud refresh`")
        return
    catalogue = catalogue.with_prices(settings, datetime.now(UTC).timestamp())
    unpriced = [name for name in settings.instance_types if catalogue.usd_per_h(name, "on-demand", ()) is None]
    if unpriced:
        remedy = "take them out of [cloud] instance_types, or run `penstock cloud refresh`"
        yield CloudFinding("prices", f"no price is known for {', '.join(unpriced)}", remedy)
    elif old := catalogue.expired(datetime.now(UTC).timestamp(), settings):
        remedy = "run `penstock cloud refresh` with permission to read prices (pricing:GetProducts)"
        yield CloudFinding("prices", old, remedy)
    else:
        oldest = min(catalogue.as_of(name, "on-demand") for name in settings.instance_types)
        yield CloudFinding("prices", f"as of {oldest:%Y-%m-%d} or later")
    try:
        pages = ask(ec2.describe_instance_type_offerings, LocationType="region")["InstanceTypeOfferings"]
    except LaunchFailed as error:
        yield _refused("instance types", error, "check that EC2 answers")
        return
    offered = {each["InstanceType"] for each in pages}
    missing = [name for name in settings.instance_types if name not in offered]
    if missing and offered:
        remedy = "take them out of [cloud] instance_types, or choose another region"
        yield CloudFinding("instance types", f"{settings.region} does not offer {', '.join(missing)}", remedy)
    else:
        yield CloudFinding("instance types", ", ".join(settings.instance_types))


def _permission(settings: CloudSettings, ec2: Any) -> CloudFinding:
    """A launch with DryRun. EC2 says whether it would be allowed."""
    remedy = "read EC2's message, and change [cloud]"
    try:
        template = Ec2(ec2, settings, ssm=connect_ssm(settings)).templates.of_site()
        subnet = settings.subnets[0] if settings.subnets else ""
        launch = {"LaunchTemplateId": template, "Version": VERSION}
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "penstock:site", "Value": str(settings.site)}]}]
        ask(
            ec2.run_instances,
            DryRun=True,
            LaunchTemplate=launch,
            InstanceType=settings.instance_types[0],
            SubnetId=subnet,
            MinCount=1,
            MaxCount=1,
            TagSpecifications=tags,
        )
    except LaunchFailed as error:
        if error.code == "DryRunOperation":
            return CloudFinding("permission", "penstockd may launch instances")
        return _refused("permission", error, remedy)
    return CloudFinding("permission", "penstockd may launch instances")


def _reservations(settings: CloudSettings, ec2: Any) -> CloudFinding:
    remedy = "name reservations of this region that are active, of types in instance_types and in the zones of subnets"
    try:
        fleet = Ec2(ec2, settings)
        zones, found = set(fleet.zones().values()), fleet.reservations()
    except LaunchFailed as error:
        return _refused("reservations", error, remedy)
    usable = {each.id for each in found if each.zone in zones and each.instance_type in settings.instance_types}
    unusable = [name for name in settings.reservations if name not in usable]
    if unusable:
        return CloudFinding("reservations", f"no orders can use {', '.join(unusable)}", remedy)
    return CloudFinding("reservations", ", ".join(f"{each.id}: {each.instance_type} in {each.zone}" for each in found))


def _bucket(settings: CloudSettings, bucket: str, s3: Any) -> CloudFinding:
    policy_remedy = "give penstockd's role the policy that `penstock cloud policy` prints"
    remedy = f"create the bucket {bucket} in {settings.region}, and {policy_remedy}"
    staging = StagingBucket(s3, bucket, str(settings.site))
    try:
        staging.stop("doctor")
        seen = staging.has("doctor", "stop")
        staging.clear("doctor")
    except LaunchFailed as error:
        return CloudFinding("bucket", str(error), remedy)
    if not seen:
        return CloudFinding("bucket", f"an object written to {bucket} cannot be found", remedy)
    if "X-Amz-Security-Token" in staging.alive_link(60):
        text = "penstockd's credentials belong to a session, and links for runs that outlast the session stop working"
        return CloudFinding("bucket", text, "give penstockd the keys of an IAM user that has only that policy")
    return CloudFinding("bucket", f"{bucket} can be written and read")


def _quotas(settings: CloudSettings, quotas: Any, catalogue: Catalogue | None) -> Iterator[CloudFinding]:
    need: dict[tuple[str, str], int] = {}
    for name in settings.instance_types:
        known = catalogue.types.get(name) if catalogue is not None else None
        for market in settings.markets:
            key = name[0], market
            need[key] = max(need.get(key, 0), known.vcpus if known is not None else 1)
    for (letter, on), vcpus in need.items():
        code, check = QUOTAS.get((letter, on)), f"quota of {letter.upper()} instances, {on}"
        if code is None:
            continue
        try:
            value = ask(quotas.get_service_quota, ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
        except LaunchFailed as error:
            yield _refused(check, error, f"look up the quota {code} in the AWS console: Service Quotas, Amazon EC2")
            continue
        if value < vcpus:
            remedy = f"ask AWS to raise {code} to at least {vcpus} vCPUs: Service Quotas, Amazon EC2"
            yield CloudFinding(check, f"{value:.0f} vCPUs, but the largest type needs {vcpus}", remedy)
        else:
            yield CloudFinding(check, f"{value:.0f} vCPUs")
