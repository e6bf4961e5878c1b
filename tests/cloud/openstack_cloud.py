"""`examples/bursting/openstack.py` as a site sets it up, with `nova.py` for a cloud."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from penstock_cloud.command import Command, CommandClient, CommandSettings
from tests.cloud.nova import Nova

EXAMPLE = Path(__file__).parents[2] / "examples" / "bursting"


class OpenStackCloud:
    """The command, and its cloud. The settings are those of the example, with the paths and the address of this test."""

    def __init__(self, folder: Path, nova: Nova) -> None:
        self.nova, self.folder, self.settings = nova, folder, folder / "openstack.toml"
        text = (EXAMPLE / "openstack.toml").read_text(encoding="utf-8")
        text = re.sub('(memory|join) = "/[^"]*/', rf'\1 = "{folder}/', text)
        text = text.replace("https://keystone.example.org:5000", nova.url).replace('"gpu.a10"', '"g5.xlarge"')
        self.settings.write_text(re.sub("usd_per_h = [0-9.]+", "usd_per_h = 1.0", text).replace('"a10"', '"a10g"'))
        (folder / "openstack-node.sh").write_text("#!/bin/sh\nshutdown -P +$((@LIFETIME_S@ / 60))\nslurmd -N @NODE@\n")

    def provider(self, site: str) -> Command:
        """The place, as penstockd opens it."""
        command = (sys.executable, str(EXAMPLE / "openstack.py"), str(self.settings))
        return Command("openstack", site, CommandClient("openstack", CommandSettings(command=command)), 31.0)
