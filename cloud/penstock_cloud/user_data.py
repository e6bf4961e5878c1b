"""The user data of a cloud node: it finds out who it is, ends itself when nobody cares for it, and joins Slurm.

The same text for all nodes: what differs is in the instance's tags, which the metadata service tells it. Three things end an
instance from inside, should the daemon be gone for good: its longest life, the daemon's silence, and slurmd's end.
"""

from __future__ import annotations

import shlex
from importlib.resources import files

from penstock_cloud.settings import CloudSettings

ALIVE = "alive"
"""The daemon's sign of life, in the share: its time of change counts."""

NOTICES = "notices"
"""Folder in the share: a file named for each node whose instance EC2 will take back."""


def user_data(settings: CloudSettings) -> str:
    """A shell script for cloud-init."""
    head = "\n".join(
        [
            "#!/bin/bash",
            f"share={shlex.quote(str(settings.share))}",
            f"silent_s={settings.silent_s:.0f}",
            f"export SLURM_CONF={shlex.quote(settings.slurm_conf)}",
        ]
    )
    body = (files("penstock_cloud") / "data" / "node.sh").read_text(encoding="utf-8")
    return head + "\n" + body.split("\n", 1)[1]
