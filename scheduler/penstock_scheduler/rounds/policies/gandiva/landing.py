"""Landing: a place for each job of the queue (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock_scheduler.model import Configuration, Job, Phase, Reason, ReasonCode
from penstock_scheduler.rounds.free_gpus import FreeGpus, is_open, open_nodes
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva.moves import defragment, give_back, grown, shrink
from penstock_scheduler.rounds.policies.gandiva.state import RoundState, SharedNode
from penstock_scheduler.rounds.policies.never_fits import never_fits
from penstock_scheduler.rounds.sharing.gandiva import land as landing

Way = Callable[[RoundState, int, Sequence[SharedNode]], SharedNode | None]
"""A way to find a place: returns the one of these nodes on which a job of this many GPUs may land; None: none of them."""


def land(state: RoundState, *, introspective: bool) -> None:
    """Give each job of the queue a place, or a reason to wait."""
    refused: set[object] = set()
    queue = sorted(state.queue, key=lambda job: (-job.sharing_priority, *state.trials.came(job)))
    for job in [job for job in queue if not _go_on(state, job)]:
        request = _request(state, job)
        movable = job.movable
        key = (
            tuple(request),
            movable,
            job.partitions,
            job.reservation,
            job.nodes,
            job.request,
            job.user,
            job.account,
            job.qos,
        )
        if not request:
            state.waiting[job.id] = never_fits(job, state.snapshot.nodes)
        elif key in refused or not _find(state, job, request, introspective=introspective):
            refused.add(key)
            if job.id not in state.waiting:
                most = state.max_height if movable else 1.0
                text = f"waits for {next(iter(request)).gpus} GPUs" + (
                    f": on each node jobs want {most:g} times the GPUs that are there" if most > 1 else ""
                )
                state.waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))


def _go_on(state: RoundState, job: Job) -> bool:
    """Let a job between two runs go to where an earlier round sent it, if there is room. Returns whether it goes."""
    going = job.target if job.phase is Phase.QUEUED else None
    if going is None or len(going.shares) > 1 or not job.movable:
        return False
    shared, option = state.nodes.get(going.nodes[0]), going.configuration
    if (
        shared is None
        or shared.free < option.gpus
        or not (common.allowed(job, option) and is_open(shared.node, job))
        or state.free.allowance.refuses(job, option.gpus, option.gpu_type) is not None
        or not state.amounts.has(shared.node.name, job.request, option.gpus)
    ):
        return False
    state.place(job, option, shared)
    return True


def _request(state: RoundState, job: Job) -> common.Request:
    """What a job asks for. A job that grows and shrinks asks for its least, and grows into what is idle."""
    request = state.requests[job.id]
    least = job.spec.min_gpus
    if not job.spec.grow_shrink or not request or next(iter(request)).gpus == least:
        return request
    types = dict.fromkeys(option.gpu_type for option in request)
    smaller = {Configuration(1, least, gpu_type): 0.0 for gpu_type in types}
    allowed = {option: 0.0 for option in smaller if common.allowed(job, option)}
    return allowed or request


def _find(state: RoundState, job: Job, request: common.Request, *, introspective: bool) -> bool:
    """Give a job a place, by the first way that finds one. Returns whether there is a place."""
    options = _within_limits(state, job, request)
    there = [state.nodes[node.name] for node in open_nodes(state.snapshot.nodes, job) if node.may_start]
    single = {
        option: [
            shared
            for shared in there
            if shared.node.gpu_type == option.gpu_type
            and shared.gpus > 0
            and state.amounts.has(shared.node.name, job.request, option.gpus)
        ]
        for option in options
        if option.nodes == 1
    }
    ways: list[Way] = [_free, _freed]
    if introspective:
        ways.append(defragment)
    if job.movable:
        ways.append(_sliced)
    for way in ways:
        for option, nodes in single.items():
            shared = way(state, option.gpus, nodes)
            if shared is not None:
                state.place(job, option, shared)
                return True
    if any(_whole_nodes(state, job, option) for option in options if option.nodes > 1):
        return True
    if introspective:
        _gather(state, single)
    return False


def _free(state: RoundState, gpus: int, nodes: Sequence[SharedNode], most: float = 1.0) -> SharedNode | None:
    """Algorithm 1, up to `most` times the GPUs of a node, on the nodes that are ready soonest."""
    for boot_s in sorted({shared.node.boot_s for shared in nodes}):
        there = [shared.view() for shared in nodes if shared.node.boot_s == boot_s]
        if (found := landing(gpus, there, most, spread=False)) is not None:
            return state.nodes[found.shares[0][0]]
    return None


def _freed(state: RoundState, gpus: int, nodes: Sequence[SharedNode]) -> SharedNode | None:
    """The node on which jobs that have grown need to give back the fewest GPUs."""
    back = [(sum(more for _, more in grown(state, shared)), shared) for shared in nodes]
    able = [shared for more, shared in back if more > 0 and shared.free + more >= gpus]
    if not able:
        return None
    found = max(able, key=lambda shared: shared.free)
    shrink(state, found, gpus)
    return found


def _sliced(state: RoundState, gpus: int, nodes: Sequence[SharedNode]) -> SharedNode | None:
    """Algorithm 1, with time slices."""
    return _free(state, gpus, nodes, state.max_height)


def _whole_nodes(state: RoundState, job: Job, option: Configuration) -> bool:
    """Give a job of several nodes empty nodes, which no other job may join."""
    empty = [shared.node for shared in state.nodes.values() if not shared.packs and shared.gpus == shared.node.gpus]
    where = FreeGpus(empty).find(job, [option])
    if where is None:
        return False
    state.take_whole(job, where)
    return True


def _gather(state: RoundState, single: Mapping[Configuration, Sequence[SharedNode]]) -> None:
    """Let jobs that have grown give back GPUs on several nodes. In later rounds, migration frees them on one node."""
    for option, nodes in single.items():
        pieces = sum(shared.free + sum(gpus for _, gpus in grown(state, shared)) for shared in nodes)
        if pieces >= option.gpus:
            for shared in nodes:
                shrink(state, shared, shared.gpus)


def _within_limits(state: RoundState, job: Job, request: common.Request) -> list[Configuration]:
    """What the limits let a job have. If necessary, other jobs under the same limit give back what they have grown by."""
    allowed, refused = state.free.allowance.within(job, request)
    if not refused:
        return list(allowed)
    first = next(iter(request))
    limit = state.free.allowance.refuses(job, first.gpus, first.gpu_type)
    assert limit is not None, "it refuses all"
    tried, back = state.free.allowance.copy(), []
    for shared in state.nodes.values():
        for pack, gpus in grown(state, shared):
            other = state.jobs[pack.jobs[0]]
            if not limit.covers(other) or not limit.counts(shared.node.gpu_type):
                continue
            tried.take(other, -gpus, shared.node.gpu_type)
            back.append((shared, pack, gpus))
            allowed, _ = tried.within(job, request)
            if allowed:
                for each in back:
                    give_back(state, *each)
                return list(allowed)
    state.waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, refused, common.smallest_need(job))
    return []
