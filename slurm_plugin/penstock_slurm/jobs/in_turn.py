"""Whose jobs come first where an observation has time for a few commands only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock_slurm.gateway import SlurmJob


def in_turn(jobs: Iterable[SlurmJob], most: int) -> list[SlurmJob]:
    """The first job of each user, then the second of each, and so on: no user's many jobs keep those of others waiting."""
    seen = Counter[int]()
    ranked = list[tuple[int, SlurmJob]]()
    for job in jobs:
        ranked.append((seen[job.uid], job))
        seen[job.uid] += 1
    return [job for _, job in sorted(ranked, key=lambda each: each[0])[:most]]
