"""The limit on open files (RLIMIT_NOFILE). Each connection of a client takes one, and so does each pipe to a command of Slurm."""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

WANTED = 65_536
"""No more than this is asked for: enough for any number of connections that the API serves."""

LOW = 4096
"""A lower limit is a warning of `penstock doctor`. The usual soft limit is 1,024, and the usual hard limit is 524,288."""

MUCH = 0.8
"""A larger share of the limit in use is a warning, too."""


@dataclass(frozen=True)
class OpenFiles:
    """How many files this process has open, and how many it may have."""

    open: int
    limit: int
    program: str

    @property
    def warning(self) -> str:
        """That the limit is low, or will be reached, with the remedy; empty: neither."""
        if self.limit < LOW:
            return (
                f"{self.program} may open only {self.limit:,} files, so few clients are served at once; set "
                f"LimitNOFILE={WANTED} in its unit"
            )
        if self.open > MUCH * self.limit:
            return (
                f"{self.program} has {self.open:,} of {self.limit:,} files open; look for clients with many connections"
            )
        return ""


_found: int | None = None
"""The soft limit before it was raised; None: it was not."""


def raise_limit() -> None:
    """Raise this process's soft limit to its hard limit, or to `WANTED` if that is less. Never lowers it."""
    global _found
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _found = soft


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def count(program: str) -> OpenFiles:
    """Count this process's open files. `program` is its name, for people."""
    return OpenFiles(sum(1 for _ in Path("/proc/self/fd").iterdir()), limit(), program)


def limit_as_found() -> int:
    """The soft limit of before `raise_limit`; -1: none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if _found is None else _found


def as_found() -> tuple[str, ...]:
    """The words before a command that is to have the soft limit of before `raise_limit`.

    sbatch gives its own limits to the job (PropagateResourceLimits in slurm.conf), and a job must not notice that penstockd
    raised its limit.
    """
    return () if _found is None else ("prlimit", f"--nofile={_found}:", "--")


class Places:
    """Places that clients share: a client may hold as many as are free.

    One client gets half of all places at most, and always leaves as many for others; a second client gets half of the rest.
    So no client needs a limit of its own, and a site with one client, such as a service that submits for all, is not slowed.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str) -> bool:
        """Take a place. Returns whether there was one for this client."""
        if self._held[client] >= self.total - self.taken:
            if not self._held[client]:
                del self._held[client]
            return False
        self._held[client] += 1
        self.taken += 1
        return True

    def give_back(self, client: str) -> None:
        """Give a place back."""
        self._held[client] -= 1
        self.taken -= 1
        if not self._held[client]:
            del self._held[client]  # clients of the past take no memory

    def held(self, client: str) -> int:
        """How many places a client holds."""
        return self._held.get(client, 0)
