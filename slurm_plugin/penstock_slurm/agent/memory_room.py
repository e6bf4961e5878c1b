"""Host memory that a process may still take before its cgroup's limit: what Slurm's `--mem` leaves it.

A checkpoint moves GPU memory into the process's own host memory. Beyond the limit, the kernel would end the job.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

MIB = 2**20
V1 = re.compile(r"^\d+:(?:[^:\n]*,)?memory(?:,[^:\n]*)?:(/.*)$", re.MULTILINE)
V2 = re.compile(r"^0::(/.*)$", re.MULTILINE)
FILES = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
"""Cached files, which the kernel drops first."""


def room_mb(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that the process may still take, MB; inf: no cgroup limits it. Raises OSError if the process is gone."""
    text = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
    room = math.inf
    if (v1 := V1.search(text)) is not None:
        room = _least(cgroups / "memory", v1[1], "memory.limit_in_bytes", "memory.usage_in_bytes")
    if (v2 := V2.search(text)) is not None:
        for mount in (cgroups, cgroups / "unified"):
            room = min(room, _least(mount, v2[1], "memory.max", "memory.current"))
    return room


def _least(mount: Path, cgroup: str, limit: str, usage: str) -> float:
    """The least room in a cgroup and those around it."""
    folder, room = Path(f"{mount}{cgroup}"), math.inf
    while folder != mount:
        limit_b, used_b = _number(folder / limit), _number(folder / usage)
        if limit_b is not None and used_b is not None:
            try:
                files = FILES.findall((folder / "memory.stat").read_text(encoding="ascii"))
            except OSError:
                files = []
            room = min(room, (limit_b - used_b + max(map(int, files), default=0)) / MIB)
        folder = folder.parent
    return room


def _number(path: Path) -> int | None:
    """The number in a file; None: there is none, or it says `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
