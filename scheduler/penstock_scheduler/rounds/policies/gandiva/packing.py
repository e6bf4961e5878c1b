"""Packing: try two jobs on the same GPUs where jobs have time slices, and undo packs that do not pay."""

from __future__ import annotations

from penstock_scheduler.model import JobId
from penstock_scheduler.rounds.policies.gandiva.node import tenant
from penstock_scheduler.rounds.policies.gandiva.state import RoundState
from penstock_scheduler.rounds.sharing.packing import Measured, choose, undo


def undo_packs(state: RoundState) -> None:
    """Take apart the packs that are no better than time slices, and the worst of the others while GPUs are idle."""
    assert state.sharing is not None, "packs are of a cluster with agents"
    by_node: dict[str, list[Measured]] = {}
    newest = {frozenset(seen.jobs): seen for seen in state.sharing.seen}
    for seen in newest.values():
        if len(seen.jobs) != 2 or any(job not in state.node_of for job in seen.jobs):
            continue
        shared = state.node_of[seen.jobs[0]]
        if any(set(pack.jobs) == set(seen.jobs) for pack in shared.packs):
            one, other = (tenant(state.jobs[job], state.gpus[job], state.sharing) for job in seen.jobs)
            measured = Measured((one, other), (seen.speeds[0], seen.speeds[1]))
            by_node.setdefault(shared.node.name, []).append(measured)
    for name, all_measured in by_node.items():
        shared = state.nodes[name]
        spare = 0 if state.queue else shared.free
        for measured in undo(all_measured, spare, state.settings.packing):
            state.split(shared, {one.job for one in measured.pack})


def pack(state: RoundState) -> None:
    """On nodes where jobs have time slices, pack the pairs of jobs with the largest expected gain."""
    assert state.sharing is not None, "packs are of a cluster with agents"
    for shared in state.nodes.values():
        if not shared.sliced:
            continue
        tenants = [
            tenant(state.jobs[pack.jobs[0]], pack.gpus, state.sharing)
            for pack in shared.packs
            if len(pack.jobs) == 1 and pack.jobs[0] not in state.busy and _profiled(state, pack.jobs[0])
        ]
        gpu_type = shared.node.gpu_type
        pairs = choose(
            tenants,
            shared.wanted - shared.gpus,
            state.known,
            gpu_type,
            state.sharing.gpu_memory_mb.get(gpu_type, 0),
            state.snapshot.time_s,
            state.settings.packing,
        )
        for one, other in pairs:
            shared.packs = [pack for pack in shared.packs if pack.jobs[0] not in (one.job, other.job)]
            state.add(shared, (one.job, other.job))


def _profiled(state: RoundState, job: JobId) -> bool:
    assert state.sharing is not None, "agents measure jobs"
    return state.sharing.use(job).profiled
