"""The other processes of a run on this node. One that is killed leaves no word, and the others fail because it is gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLLOWS = re.compile(r"gloo|nccl|connection|broken pipe|closed by peer", re.IGNORECASE)
"""Errors of a process that has lost another one."""

PATIENCE_S = 2.0
"""The most seconds for a process to be gone after its connections: the kernel frees its memory meanwhile."""


def killed(rank: int, host: str, number: int) -> str:
    """What people read of a process that a signal has ended."""
    return f"rank {rank} on {host} was killed by signal {number}" + "; often out of memory" * (number == signal.SIGKILL)


class Place(NamedTuple):
    """Where a process of the run is."""

    host: str
    namespace: int
    """Process ids mean something only in the same one."""
    pid: int
    began: str


class Siblings:
    """Made in all processes of a run at once.

    Args:
        rank: of this process.
        gather: gives each rank's value.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        pid = os.getpid()
        fields = _stat(pid)  # only Linux has them
        namespace = Path("/proc/self/ns/pid").stat().st_ino if fields else 0
        own = Place(socket.gethostname(), namespace, pid, fields[19] if fields else "")
        places = enumerate(Place(*each) for each in gather(tuple(own)))
        self._others = {n: each for n, each in places if fields and n != rank and each[:2] == own[:2]}

    def cause(self, error: BaseException) -> str:
        """Of an error that may only follow from the end of another process: that end, or "" if it is not known."""
        if not isinstance(error, RuntimeError | OSError) or not FOLLOWS.search(str(error)):
            return ""
        until_s = time.monotonic() + PATIENCE_S
        while not (found := [text for n, each in self._others.items() if (text := _end(n, each))]):
            if time.monotonic() > until_s:
                return ""
            time.sleep(0.05)
        return found[0]


def _end(rank: int, place: Place) -> str:
    """How the process was killed, or "" if it lives or has ended by itself."""
    fields = _stat(place.pid)
    if fields is None or fields[19] != place.began:
        return f"rank {rank} on {place.host} ended without an error of its own, as if killed by signal 9; often out of memory"
    status = int(fields[49])
    return killed(rank, place.host, os.WTERMSIG(status)) if fields[0] == "Z" and os.WIFSIGNALED(status) else ""


def _stat(pid: int) -> list[str] | None:
    """The fields of the process in the kernel's list, from its state on (proc(5)). After its end there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
