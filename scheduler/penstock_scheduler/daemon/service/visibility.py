"""What a user may see of other users' jobs: the setting `[api] private_data`, in the manner of Slurm's PrivateData."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

PrivateData = Literal["jobs", "usage"]
"""`jobs`: who holds which GPUs, and who waits. `usage`: what others have used, and what it cost."""


def may_see(what: PrivateData, owner: str, caller: str, *, sees_all: bool, private: Collection[PrivateData]) -> bool:
    """Whether a caller may see this about the jobs of a user.

    Args:
        what: what it is about.
        owner: the user of the jobs.
        caller: the user that asks.
        sees_all: whether the caller's role sees everything: an operator or an admin.
        private: what the site keeps from others.
    """
    return sees_all or owner == caller or what not in private
