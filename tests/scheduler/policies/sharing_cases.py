"""Snapshots with shared GPUs, for tests of the policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from penstock_scheduler.model import (
    Job,
    JobUse,
    KnownPair,
    PackSeen,
    Phase,
    Plan,
    SharedGpus,
    SharingState,
    Snapshot,
)
from tests.scheduler.builders import job, on

# Gandiva, worked by hand.


def shared(state: Snapshot, *groups: SharedGpus, seen: Iterable[PackSeen] = (), **its_uses: JobUse) -> Snapshot:
    known = {each.id: JobUse("any", 0.5, 1000, 600.0, None) for each in state.jobs} | its_uses
    return dataclasses.replace(state, sharing=SharingState(groups, known, tuple(seen)))


def running(job_id: str, node: str, gpus: int = 1, **more: object) -> Job:
    held = on("t4", **{node.replace("-", "_"): gpus})
    fields = {"min_gpus": gpus, "max_gpus": gpus} | more
    return job(job_id, phase=Phase.RUNNING, allocation=held, **fields)  # type: ignore[arg-type]


def with_memory(state: Snapshot, memory_mb: int, *pairs: KnownPair) -> Snapshot:
    """With GPUs of so much memory."""
    assert state.sharing is not None
    told = dataclasses.replace(state.sharing, gpu_memory_mb={"t4": memory_mb}, pairs=(*state.sharing.pairs, *pairs))
    return dataclasses.replace(state, sharing=told)


def limits_mb(plan: Plan) -> list[tuple[int, ...]]:
    """Of each pack of several jobs."""
    packs = [pack for group in plan.shared for pack in group.packs if len(pack.jobs) > 1]
    return [tuple(pack.limit(each).memory_mb for each in pack.jobs) for pack in packs]


def known_pair(mine: str, theirs: str, share: float) -> KnownPair:
    return KnownPair("t4", mine, theirs, share)


def paired_jobs(plan: Plan) -> set[tuple[str, ...]]:
    return {pack.jobs for group in plan.shared for pack in group.packs if len(pack.jobs) > 1}
