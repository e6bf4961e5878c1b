"""Launch templates of one region of EC2: what all instances of the site have in common, and what those of one run have.

The user data of an instance: a script that finds the instance's identity, ends an abandoned instance, and joins Slurm or
runs one job.

All instances that join Slurm have the same text. Their differences are in their tags, which they read from the metadata
service. Even without the daemon, three things end an instance from inside: the end of its longest life, the daemon's silence,
and the end of slurmd or of the job.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from typing import Any

from penstock_cloud.images import AskEc2, PinnedImage
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed

TAG = "penstock:"
"""Prefix of Penstock's tags."""

VERSION = "1"
"""The version of a template that is launched: the one that Penstock has made. Whoever changes the default changes nothing."""


class Templates:
    """See the module. Every method raises LaunchFailed.

    Args:
        ask: calls EC2.
        settings: the settings as they are in this region.
        image: the AMI.
    """

    def __init__(self, ask: AskEc2, settings: CloudSettings, image: PinnedImage) -> None:
        self._ask, self._settings, self._image = ask, settings, image
        self._of_site: dict[int, str] = {}
        self._making: set[int] = set()
        self._efa: dict[str, int] = {}

    def of_site(self, efa: int = 0) -> str:
        """Id of the launch template for these settings, with this number of EFA interfaces. It is created if it does not
        exist. Its name has a hash of its contents."""
        if efa in self._making:
            raise LaunchFailed(Kind.THROTTLED, "", "another order is making the launch template")
        if efa not in self._of_site:
            self._making.add(efa)
            try:
                data = self._data(user_data(self._settings).encode())
                if efa:
                    del data["SecurityGroupIds"]  # EC2 wants them in each interface then
                    data["NetworkInterfaces"] = self.interfaces(efa)
                digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
                self._of_site[efa] = self._make(digest, data, same=("ImageId", "UserData"))
            finally:
                self._making.discard(efa)
        return self._of_site[efa]

    def forget(self) -> None:
        """Look for the templates of the site again, or make them anew, at the next order: one has been deleted."""
        self._of_site.clear()

    def efa(self, instance_type: str) -> int:
        """Number of EFA interfaces of a type: one for each of its network cards that has one; 0: none, or not wanted."""
        if not self._settings.efa:
            return 0
        if instance_type not in self._efa:
            (found,) = self._ask("describe_instance_types", InstanceTypes=[instance_type])["InstanceTypes"]
            self._efa[instance_type] = found["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
        return self._efa[instance_type]

    def interfaces(self, efa: int) -> list[dict[str, Any]]:
        """The network interfaces of an instance with EFA. Only the first card's may have device index 0."""
        return [
            {
                "DeviceIndex": min(card, 1),
                "NetworkCardIndex": card,
                "InterfaceType": "efa",
                "Groups": list(self._settings.security_groups),
                "DeleteOnTermination": True,
            }
            for card in range(efa)
        ]

    def of_run(self, run: str, text: bytes) -> str:
        """Id of the launch template for one run, with its own user data. It is created if it does not exist."""
        return self._make(run, self._data(text))

    def drop(self, run: str) -> None:
        """Delete a run's launch template."""
        try:
            self._ask("delete_launch_template", LaunchTemplateName=self._name(run))
        except LaunchFailed as error:
            if error.code != "InvalidLaunchTemplateName.NotFoundException":
                raise

    def _name(self, what: str) -> str:
        return f"penstock-{self._settings.site}-{what}"

    def _make(self, what: str, data: Mapping[str, Any], same: Collection[str] = ()) -> str:
        """Id of a template. If one of that name exists, its first version must have the `same` data."""
        name = self._name(what)
        tags = [{"ResourceType": "launch-template", "Tags": ec2_tags(mine(self._settings))}]
        try:
            made = self._ask(
                "create_launch_template", LaunchTemplateName=name, LaunchTemplateData=data, TagSpecifications=tags
            )
            return str(made["LaunchTemplate"]["LaunchTemplateId"])
        except LaunchFailed as error:
            if error.code != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise
        found = self._ask("describe_launch_template_versions", LaunchTemplateName=name, Versions=[VERSION])
        for made in found["LaunchTemplateVersions"]:
            if all(made["LaunchTemplateData"].get(key) == data[key] for key in same):
                return str(made["LaunchTemplateId"])
        words = f"the launch template {name} is not as Penstock made it; delete it, and Penstock makes it anew"
        raise LaunchFailed(Kind.CAPACITY, "", words)

    def _data(self, text: bytes) -> dict[str, Any]:
        settings = self._settings
        image = self._image.id()
        images = self._ask("describe_images", ImageIds=[image])["Images"]
        if not images:
            words = f"{image}, [cloud] image={settings.image!r}, does not exist"
            if self._image.looked_up:
                words += "; `penstock cloud accept-image` pins the one that the parameter names now"
            raise LaunchFailed(Kind.CONFIG, "InvalidAMIID.NotFound", words)
        volume: dict[str, Any] = {
            "Encrypted": True,
            "DeleteOnTermination": True,
            "VolumeType": "gp3",
            "VolumeSize": settings.volume_gb,
        }
        if settings.kms_key is not None:
            volume["KmsKeyId"] = settings.kms_key
        data: dict[str, Any] = {
            "ImageId": image,
            "SecurityGroupIds": list(settings.security_groups),
            "UserData": base64.b64encode(text).decode(),
            # A shutdown from inside terminates the instance, so that it can end itself when the daemon is silent.
            "InstanceInitiatedShutdownBehavior": "terminate",
            # Only IMDSv2, and not from containers. The tags tell a node its name.
            "MetadataOptions": {
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": 1,
                "InstanceMetadataTags": "enabled",
            },
            "BlockDeviceMappings": [{"DeviceName": images[0].get("RootDeviceName", "/dev/sda1"), "Ebs": volume}],
            # CreateFleet tags instances alone; those of a template reach their volumes.
            "TagSpecifications": [{"ResourceType": "volume", "Tags": ec2_tags(mine(self._settings))}],
        }
        if settings.instance_profile is not None:
            data["IamInstanceProfile"] = {"Name": settings.instance_profile}
        return data


def ec2_tags(named: Mapping[str, str]) -> list[dict[str, str]]:
    """Penstock's tags, as EC2 takes them."""
    return [{"Key": TAG + key, "Value": value} for key, value in sorted(named.items())]


def mine(settings: CloudSettings) -> dict[str, str]:
    """Tags of everything that a site creates."""
    return {"site": str(settings.site), "cluster": settings.name}


LINGER_S = 600.0
"""How long an instance waits for its termination after the detached job has ended, so that its end is not taken for a loss."""

SAVE_S = 60.0
"""How long a detached job may save after a request to stop. EC2 reclaims the instance after 120 s, and files must be
uploaded."""


def user_data(settings: CloudSettings) -> str:
    """A shell script for cloud-init."""
    given = [_set("share", str(settings.share)), _set("silent_s", f"{settings.silent_s:.0f}")]
    return _script("node.sh", [*given, *mounts(settings)])


def detached(settings: CloudSettings, links: Mapping[str, str], nodes: Sequence[str] = ()) -> bytes:
    """The user data of one detached run, compressed: EC2 accepts 16 KB, and the links are long but similar. cloud-init unpacks
    it.

    Args:
        links: `get_WHAT` and `put_WHAT` of the instance's objects, and `get_alive`.
        nodes: names of the run's nodes, the first one first. An instance of several finds its own in its tags.
    """
    given = {
        "silent_s": f"{settings.silent_s:.0f}",
        "linger_s": f"{LINGER_S:.0f}",
        "save_s": f"{SAVE_S:.0f}",
        "user": settings.detached_user,
    }
    lines = [*(_set(name, value) for name, value in (given | dict(links)).items()), *mounts(settings)]
    lines.append(f"nodes=({' '.join(map(shlex.quote, nodes))})")
    return gzip.compress(_script("detached.sh", lines).encode(), mtime=0)


def mounts(settings: CloudSettings) -> list[str]:
    """Lines that define the shell function `mount_all`, which mounts the folders of `[cloud] mounts`, or calls `end`."""
    if not settings.mounts:
        return ["mount_all() { :; }"]
    each = " ".join(shlex.quote(f"{at} {what}") for at, what in settings.mounts.items())
    return [f"mounts=({each})", (files("penstock_cloud") / "data" / "mounts.sh").read_text(encoding="utf-8")]


def _script(name: str, lines: list[str]) -> str:
    body = (files("penstock_cloud") / "data" / name).read_text(encoding="utf-8")
    return "\n".join(["#!/bin/bash", *lines, body.split("\n", 1)[1]])


def _set(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}"
