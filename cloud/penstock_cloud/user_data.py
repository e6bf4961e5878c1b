"""The user data of an instance: a script that finds the instance's identity, ends an abandoned instance, and joins Slurm or
runs one job.

All instances that join Slurm have the same text. Their differences are in their tags, which they read from the metadata
service. Even without the daemon, three things end an instance from inside: the end of its longest life, the daemon's silence,
and the end of slurmd or of the job.
"""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files

from penstock_cloud.settings import CloudSettings

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
