"""The user data of an instance: it finds out who it is, ends itself when nobody cares for it, and joins Slurm or
runs one job.

Those that join have the same text: what differs is in the instance's tags, which the metadata service tells it. Three things
end an instance from inside, should the daemon be gone for good: its longest life, the daemon's silence, and the end of slurmd or
of the job.
"""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Mapping
from importlib.resources import files

from penstock_cloud.settings import CloudSettings

ALIVE = "alive"
"""The daemon's sign of life, in the share: its time of change counts."""

LINGER_S = 600.0
"""How long an instance whose detached job is over waits to be ended: so that nobody takes its end for a loss."""

SAVE_S = 60.0
"""How long a detached job that is asked to stop may save: EC2 takes an instance after 120 s, and what it leaves must be sent."""

NOTICES = "notices"
"""Folder in the share: a file named for each node whose instance EC2 will take back."""


def user_data(settings: CloudSettings) -> str:
    """A shell script for cloud-init."""
    slurm_conf = f"export SLURM_CONF={shlex.quote(settings.slurm_conf)}"
    return _script(
        "node.sh", [_set("share", str(settings.share)), _set("silent_s", f"{settings.silent_s:.0f}"), slurm_conf]
    )


def detached(settings: CloudSettings, links: Mapping[str, str]) -> bytes:
    """The same for one detached run, packed: EC2 takes 16 KB, cloud-init unpacks it, and links are long but alike.

    Args:
        links: `get_WHAT` and `put_WHAT` of the instance's objects, and `get_alive`.
    """
    given = {
        "silent_s": f"{settings.silent_s:.0f}",
        "linger_s": f"{LINGER_S:.0f}",
        "save_s": f"{SAVE_S:.0f}",
        "user": settings.detached_user,
    }
    lines = [_set(name, value) for name, value in (given | dict(links)).items()]
    return gzip.compress(_script("detached.sh", lines).encode(), mtime=0)


def _script(name: str, lines: list[str]) -> str:
    body = (files("penstock_cloud") / "data" / name).read_text(encoding="utf-8")
    return "\n".join(["#!/bin/bash", *lines, body.split("\n", 1)[1]])


def _set(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}"
