"""Grow and shrink: jobs that declared `grow_shrink` take GPUs that are idle, and give them back when others need them."""

from __future__ import annotations

from dataclasses import replace

from penstock_scheduler.model import Configuration, Pack, Phase, Stop, StopCode
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva.node import SharedNode
from penstock_scheduler.rounds.policies.gandiva.state import RoundState


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
