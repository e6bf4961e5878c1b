"""The steps that change jobs with GPUs.

- Grow and shrink: jobs that declared `grow_shrink` take GPUs that are idle, and give them back when others need them.
- Migrate: off nodes with time slices, out of packs, and off a node that is emptied for a job (defragmentation).
- Pack: try two jobs on the same GPUs where jobs have time slices, and undo packs that do not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock_scheduler.model import Configuration, JobId, Pack, Phase, Stop, StopCode
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva.state import RoundState, SharedNode, tenant
from penstock_scheduler.rounds.sharing.packing import Measured, choose, undo


def grown(state: RoundState, shared: SharedNode) -> list[tuple[Pack, int]]:
    """Jobs that have grown on a node, and the number of GPUs that each can give back, the largest first."""
    found = []
    for pack in shared.packs:
        job = state.jobs[pack.jobs[0]]
        least = job.spec.min_gpus
        settled = job.id not in state.busy or job.phase is Phase.QUEUED
        larger = len(pack.jobs) == 1 and job.spec.grow_shrink and pack.gpus > least and settled
        allowed = common.allowed(job, Configuration(1, least, shared.node.gpu_type))
        if larger and allowed and state.may_be_on(job.id, shared):
            found.append((pack, pack.gpus - least))
    return sorted(found, key=lambda each: -each[1])


def give_back(state: RoundState, shared: SharedNode, pack: Pack, gpus: int) -> None:
    """Let a job give back some of the GPUs that it has grown by."""
    job = state.jobs[pack.jobs[0]]
    state.free.allowance.take(job, -gpus, shared.node.gpu_type)
    state.gpus[job.id] = pack.gpus - gpus
    shared.packs[shared.packs.index(pack)] = replace(pack, gpus=pack.gpus - gpus)
    state.busy.add(job.id)
    state.notes[job.id] = f"gives back {gpus} GPUs that others need"
    text = f"gives back {gpus} of its {pack.gpus} GPUs, by which it has grown, because other jobs need them"
    state.stops[job.id] = Stop(StopCode.PREEMPTED, text)


def shrink(state: RoundState, shared: SharedNode, free: int) -> None:
    """Let jobs that have grown shrink to what they asked for, until this many GPUs of the node are free."""
    for pack, gpus in grown(state, shared):
        if shared.gpus - shared.wanted < free:
            give_back(state, shared, pack, gpus)


def grow(state: RoundState) -> None:
    """While no job waits, let jobs that declared `grow_shrink` take GPUs of their node that have been idle for `idle_s`."""
    if state.job_waits():
        return
    for shared in state.nodes.values():
        idle = _idle(state, shared)
        for index, pack in enumerate(shared.packs):
            more = _growth(state, shared, pack, idle)
            if more > 0:
                job = state.jobs[pack.jobs[0]]
                idle -= more
                state.free.allowance.take(job, more, shared.node.gpu_type)
                state.gpus[job.id] = pack.gpus + more
                shared.packs[index] = replace(pack, gpus=pack.gpus + more)
                state.notes[job.id] = f"grows by {more} GPUs that no other job uses"


def _growth(state: RoundState, shared: SharedNode, pack: Pack, idle: int) -> int:
    """GPUs by which a pack grows, of the node's idle ones. A job grows by doubling."""
    job, gpu_type = state.jobs[pack.jobs[0]], shared.node.gpu_type
    if len(pack.jobs) > 1 or not job.spec.grow_shrink:
        return 0
    if not state.may_be_on(job.id, shared) or not state.rested(job.id, state.settings.interval_s):
        return 0
    gpus = pack.gpus
    while (
        2 * gpus - pack.gpus <= idle
        and common.allowed(job, Configuration(1, 2 * gpus, gpu_type))
        and state.free.allowance.refuses(job, 2 * gpus - pack.gpus, gpu_type) is None
    ):
        gpus *= 2
    return gpus - pack.gpus


def _idle(state: RoundState, shared: SharedNode) -> int:
    """GPUs of a node that no job has used for `idle_s`, and that this round gives to no job."""
    since_s = state.snapshot.idle_since_s.get(shared.node.name, ())
    long = sum(state.snapshot.time_s - each_s >= state.settings.idle_s for each_s in since_s)
    return min(long, shared.free)


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
    moves = _moves(state, source, others, gpus - source.free)
    if moves is None or state.migrations + len(moves) > MOST_MIGRATIONS:
        return None
    for pack, target in moves:
        state.move(pack, source, target, "makes room for a job that needs its GPUs on one node")
    return source


def _moves(
    state: RoundState, source: SharedNode, others: Sequence[SharedNode], missing: int
) -> list[tuple[Pack, SharedNode]] | None:
    """Packs of a node that others have room for, the largest first, until as many GPUs are free as were missing.

    Returns None if that is not enough.
    """
    free = {shared.node.name: shared.free for shared in others}
    moves: list[tuple[Pack, SharedNode]] = []
    for pack in sorted(source.packs, key=lambda pack: -pack.gpus):
        if missing <= 0:
            break
        fits = [s for s in others if free[s.node.name] >= pack.gpus and state.may_move(pack, s)]
        if fits:
            target = min(fits, key=lambda shared: free[shared.node.name])
            free[target.node.name] -= pack.gpus
            missing -= pack.gpus
            moves.append((pack, target))
    return None if missing > 0 else moves


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


def pack_jobs(state: RoundState) -> None:
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
