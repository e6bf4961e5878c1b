"""Ends a site's instances whose longest life is over: an AWS Lambda function, for when penstockd and the instances cannot.

docs/admin/bursting.md, "A switch outside the instances", has the commands that install it. Lambda has boto3. The function
needs `SITE`, the site's identity, and `REGIONS`, the regions with spaces between them, in its environment.
"""

from __future__ import annotations

import os
import time
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

GRACE_S = 600.0
"""How long after its longest life an instance is ended: penstockd and the instance itself come first."""

LIFETIME = "penstock:lifetime_s"
"""The tag with the longest life of an instance, s."""


def end_overdue(ec2: Any, site: str, now_s: float, ended: list[str]) -> list[str]:
    """End the site's instances whose longest life is over, and add their ids to `ended`. Returns those that do not end."""
    alive = [
        {"Name": "tag:penstock:site", "Values": [site]},
        {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]},
    ]
    left = []
    for page in ec2.get_paginator("describe_instances").paginate(Filters=alive):
        for each in (instance for group in page["Reservations"] for instance in group["Instances"]):
            tags, id_ = {tag["Key"]: tag["Value"] for tag in each["Tags"]}, each["InstanceId"]
            try:
                if now_s > each["LaunchTime"].timestamp() + float(tags[LIFETIME]) + GRACE_S:
                    ec2.terminate_instances(InstanceIds=[id_])
                    ended.append(id_)
            except (ClientError, KeyError, ValueError) as error:
                left.append(f"{id_}: {error!r}")
    return left


def handler(event: object, context: object) -> list[str]:
    """Do that in each region. Returns the ids. Raises RuntimeError if instances are left, so that Lambda counts an error."""
    ended: list[str] = []
    left: list[str] = []
    for region in os.environ["REGIONS"].split():
        try:
            left += end_overdue(boto3.client("ec2", region_name=region), os.environ["SITE"], time.time(), ended)
        except (BotoCoreError, ClientError) as error:
            left.append(f"{region}: {error!r}")
    print(f"ended: {ended}")  # noqa: T201
    if left:
        raise RuntimeError(f"instances may cost money: {'; '.join(left)}")
    return ended
