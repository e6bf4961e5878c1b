"""Migration: off nodes with time slices, out of packs, and off a node that is emptied for a job (defragmentation)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_scheduler.model import Pack
from penstock_scheduler.rounds.policies.gandiva.node import SharedNode
from penstock_scheduler.rounds.policies.gandiva.state import RoundState

MOST_MIGRATIONS = 4
"""Most migrations in one round: each stops a job for a restart, and the next round sees how it went."""


def migrate(state: RoundState) -> None:
    """Move packs off nodes with time slices; then, while no job waits, move jobs out of packs to free GPUs."""
    for source in sorted(state.nodes.values(), key=lambda shared: (-shared.height, shared.node.name)):
        while source.packs and source.sliced and state.migrations < MOST_MIGRATIONS:
            if not _relieve(state, source):
                break
    if not state.job_waits():
        for source in list(state.nodes.values()):
            _unpack(state, source)


def _relieve(state: RoundState, source: SharedNode) -> bool:
    """Move one pack off a node with time slices. Returns whether there was a better node for one."""
    for pack in sorted(source.packs, key=lambda pack: (pack.priority, len(pack.jobs), pack.gpus)):
        target = _better(state, source, pack)
        if target is not None:
            state.move(pack, source, target, f"leaves {source.node.name}, where jobs get time slices")
            return True
    return False


def _better(state: RoundState, source: SharedNode, pack: Pack) -> SharedNode | None:
    """The node on which a pack shares GPUs least: one with free GPUs, or one with a height lower by at least half."""
    if not all(state.rested(job, state.settings.interval_s) for job in pack.jobs):
        return None
    most = source.height - 0.5
    found = [
        shared
        for shared in state.nodes.values()
        if shared is not source
        and shared.gpus >= pack.gpus
        and (shared.free >= pack.gpus or (shared.wanted + pack.gpus) / shared.gpus <= most)
        and state.may_move(pack, shared)
    ]
    return min(found, key=lambda s: ((s.wanted + pack.gpus) / s.gpus, s.free, s.node.name), default=None)


def _unpack(state: RoundState, source: SharedNode) -> None:
    """Let the second job of each pack have free GPUs of its own, on this node or another."""
    for pack in [pack for pack in source.packs if len(pack.jobs) > 1]:
        job = pack.jobs[-1]
        alone = Pack((job,), state.gpus[job], pack.priority)
        targets = [s for s in state.nodes.values() if s.free >= alone.gpus and state.may_move(alone, s)]
        if targets and state.migrations < MOST_MIGRATIONS:
            state.split(source, set(pack.jobs))
            state.busy.discard(job)
            single = next(each for each in source.packs if each.jobs == (job,))
            best = min(targets, key=lambda shared: (shared is not source, shared.free, shared.node.name))
            if best is not source:
                state.move(single, source, best, "leaves its pack for GPUs of its own")


def defragment(state: RoundState, gpus: int, nodes: Sequence[SharedNode]) -> SharedNode | None:
    """Move packs from the node with most free GPUs to nodes with fewer, so that a job finds this many GPUs on one node.

    Returns that node. If this makes no room for the job, nothing moves, and the result is None.
    """
    if sum(shared.free for shared in nodes) < gpus:
        return None
    able = (shared for shared in nodes if shared.packs and shared.gpus >= gpus)
    source = max(able, key=lambda shared: shared.free, default=None)
    if source is None or source.sliced:
        return None
    others = [shared for shared in nodes if shared is not source and shared.packs]
    free = {shared.node.name: shared.free for shared in others}
    moves: list[tuple[Pack, SharedNode]] = []
    missing = gpus - source.free
    for pack in sorted(source.packs, key=lambda pack: -pack.gpus):
        if missing <= 0:
            break
        fits = [s for s in others if free[s.node.name] >= pack.gpus and state.may_move(pack, s)]
        if fits:
            target = min(fits, key=lambda shared: free[shared.node.name])
            free[target.node.name] -= pack.gpus
            missing -= pack.gpus
            moves.append((pack, target))
    if missing > 0 or state.migrations + len(moves) > MOST_MIGRATIONS:
        return None
    for pack, target in moves:
        state.move(pack, source, target, "makes room for a job that needs its GPUs on one node")
    return source
