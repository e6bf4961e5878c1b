"""What every policy needs from a snapshot: which configurations exist, which jobs may have them, and which jobs stay."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.matrix import Configurations, look_up_all
from penstock_scheduler.model import (
    Adaptivity,
    Assignment,
    Batch,
    Configuration,
    Job,
    JobId,
    Node,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Share,
    Snapshot,
)
from penstock_scheduler.rounds.free_gpus import FreeGpus, changed_nodes, open_nodes


def configurations(
    nodes: Iterable[Node], sizes: Iterable[int] = (), most: int | None = None
) -> tuple[Configuration, ...]:
    """Sia's configurations: powers of two and the whole node on one node; whole nodes of one size on several nodes.

    A number in `sizes` that is none of these is divided equally among the fewest nodes possible: 10 GPUs on nodes of 8 GPUs
    are 5 and 5. Slurm gives a job the same number of GPUs on each of its nodes.

    GPUs that jobs hold count as well as free ones, so that a plan may move jobs out of the way. Nodes on which
    nothing may start do not count. There is no limit of 64 GPUs.

    Args:
        nodes: all nodes.
        sizes: further numbers of GPUs, for jobs that want exactly that many.
        most: GPUs of the largest configuration; None: no limit.

    Returns:
        The configurations, ordered by type, GPUs and nodes.
    """
    by_size: dict[tuple[str, int], int] = {}
    for node in nodes:
        if node.may_start:
            by_size[node.gpu_type, node.gpus] = by_size.get((node.gpu_type, node.gpus), 0) + 1
    return _configurations(tuple(by_size.items()), frozenset(sizes), most)


@functools.lru_cache(maxsize=256)
def _configurations(
    by_size: tuple[tuple[tuple[str, int], int], ...], sizes: frozenset[int], most: int | None
) -> tuple[Configuration, ...]:
    """`configurations` by ((GPU type, GPUs of a node), nodes), cached while the open nodes stay the same."""
    found: set[Configuration] = set()
    for (gpu_type, size), count in by_size:
        found.update(Configuration(1, 2**power, gpu_type) for power in range(size.bit_length()))
        found.update(Configuration(n, n * size, gpu_type) for n in range(1, count + 1))
        for gpus in sizes:
            nodes_of_it = next((n for n in range(-(-gpus // size), count + 1) if gpus % n == 0), None)
            if nodes_of_it is not None:
                found.add(Configuration(nodes_of_it, gpus, gpu_type))
    return tuple(
        sorted((c for c in found if most is None or c.gpus <= most), key=lambda c: (c.gpu_type, c.gpus, c.nodes))
    )


def is_regular(configuration: Configuration, sizes: Iterable[int]) -> bool:
    """Whether any job may have it: whole nodes of one of these sizes, or a power of two of GPUs on one node."""
    gpus, nodes = configuration.gpus, configuration.nodes
    return gpus // nodes in sizes or (nodes == 1 and gpus & (gpus - 1) == 0)


def allowed(job: Job, configuration: Configuration) -> bool:
    """Whether the job spec allows this configuration."""
    return job.spec.allows(configuration.gpu_type, configuration.gpus, configuration.nodes)


def on_one_node(job: Job, node: Node, gpus: int) -> Placement:
    """A placement of `gpus` GPUs on a node. If the job holds that many there, or is on its way to them, it keeps these.

    The node of a job that keeps its GPUs need not be in an open partition.
    """
    held = job.target if in_flight(job) else job.allocation
    partition = next((name for name in (*job.partitions, *node.partitions) if name in node.partitions), "")
    where = Placement(node.gpu_type, partition, (Share(node.name, gpus),))
    return held if held is not None and job.phase is not Phase.QUEUED and where.suits(held) else where


def in_flight(job: Job) -> bool:
    """Whether the job is on its way to the placement that an earlier round gave it."""
    return job.phase in (Phase.STARTING, Phase.STOPPING)


def pinned(snapshot: Snapshot) -> dict[JobId, Placement]:
    """Placements that this round does not change.

    They belong to running jobs that may not be moved, and to jobs on their way to a placement of an earlier round that
    still has room for them.
    """
    pins: dict[JobId, Placement] = {}
    if all(job.phase is Phase.QUEUED for job in snapshot.jobs):
        return pins
    free = FreeGpus(snapshot.nodes)
    for job in snapshot.jobs:
        if (held := job.running_on) is not None and not job.movable:
            pins[job.id] = held
            free.take_nodes(held, job.request)
    for job in snapshot.jobs:
        if (going := job.bound_for) is not None and free.has(going):
            pins[job.id] = going
            free.take_nodes(going, job.request)
    return pins


def pinned_assignment(job: Job, placement: Placement, snapshot: Snapshot) -> Assignment:
    """The assignment of a pinned job: what it has, or is about to have."""
    if job.phase is Phase.RUNNING:
        why = "it is fixed" if job.spec.adaptivity is Adaptivity.FIXED else "it is not preemptible"
        reason = Reason(ReasonCode.PINNED, f"keeps {placement.configuration}: {why}")
    else:
        reason = Reason(ReasonCode.IN_FLIGHT, f"on its way to {placement.configuration}")
    return assign(job, placement, reason, snapshot)


def left_free(nodes: Sequence[Node], snapshot: Snapshot, plan: Plan) -> FreeGpus:
    """The GPUs that a plan leaves free on these nodes."""
    free, jobs = FreeGpus(nodes, snapshot.limits), {job.id: job for job in snapshot.jobs}
    for job_id, assignment in plan.assignments.items():
        free.take(jobs[job_id], assignment.placement)
    return free


def keep(snapshot: Snapshot, free: FreeGpus) -> dict[JobId, Assignment]:
    """Assignments of all jobs that stay where they are, or are on their way. Takes their GPUs from `free`.

    For policies that move no job. A running job stays unless its GPUs are gone.
    """
    pins, kept = pinned(snapshot), {}
    for job in snapshot.jobs:
        if job.id in pins:
            free.take(job, pins[job.id])
            kept[job.id] = pinned_assignment(job, pins[job.id], snapshot)
    for job in snapshot.jobs:
        where = job.running_on
        if where is not None and job.id not in pins and free.may_stay(where):
            free.take(job, where)
            kept[job.id] = assign(job, where, Reason(ReasonCode.KEPT, f"keeps {where.configuration}"), snapshot)
    return kept


def options(snapshot: Snapshot, job: Job, most: int | None = None) -> Request:
    """Configurations on which a job makes progress -> its goodput there. `most`: largest number of GPUs; None: no limit."""
    shapes = configurations(open_nodes(snapshot.nodes, job), most=most)
    rates = {shape: rate(snapshot.facts[job.id].model, shape) for shape in shapes if allowed(job, shape)}
    return {shape: goodput for shape, goodput in rates.items() if goodput > 0 and math.isfinite(goodput)}


def waits(job: Job, text: str) -> Reason:
    """The reason of a job that waits for GPUs."""
    return Reason(ReasonCode.WAITING_CAPACITY, text, smallest_need(job))


def assign(
    job: Job, placement: Placement, reason: Reason, snapshot: Snapshot, goodput: float | None = None
) -> Assignment:
    """An assignment with the goodput (None: not yet known) and the batch that the job's model expects."""
    model, shape = snapshot.facts[job.id].model, placement.configuration
    if goodput is None:
        goodput = rate(model, shape)
    batch = model.best_batch(shape.gpu_type, shape.nodes, shape.gpus)
    advice = Batch(batch.atomic_batch, batch.accumulation_steps) if batch is not None else None
    return Assignment(placement, reason, goodput, advice)


def columns(options: Sequence[Configuration]) -> Configurations:
    """These configurations as columns of a matrix of goodputs."""
    return Configurations(
        tuple(option.gpu_type for option in options),
        tuple(option.nodes for option in options),
        tuple(option.gpus for option in options),
    )


def rate(model: AnyEstimator, configuration: Configuration) -> float:
    """Goodput on one configuration."""
    nodes, gpus = np.array([configuration.nodes]), np.array([configuration.gpus])
    return float(model.goodput(configuration.gpu_type, nodes, gpus)[0])


def look_up(snapshot: Snapshot, where: Iterable[tuple[JobId, Configuration]]) -> None:
    """Find the goodput and the batch of these jobs on these configurations in one pass, for `rate` and `assign`."""
    asked = list(where)
    look_up_all([snapshot.facts[job].model for job, _ in asked], columns([option for _, option in asked]))


def given(job: Job, placement: Placement, why: str) -> Reason:
    """The reason of a job that gets `placement`, compared with what it had before; `why` ends the sentence."""
    chosen, held = placement.configuration, job.running_on
    if held is None:
        return Reason(ReasonCode.CHOSEN, f"starts on {chosen}, {why}")
    if held.shares == placement.shares:
        return Reason(ReasonCode.KEPT, f"keeps {chosen}, {why}")
    if held.configuration == chosen:
        return Reason(ReasonCode.CHOSEN, f"keeps {chosen} on other nodes, {why}")
    return Reason(ReasonCode.CHOSEN, f"from {held.configuration} to {chosen}, {why}")


def rested(snapshot: Snapshot, job: JobId, interval_s: float) -> bool:
    """Whether the job has not been moved, packed or unpacked for `interval_s` seconds."""
    use = snapshot.sharing.uses.get(job) if snapshot.sharing is not None else None
    return use is None or use.moved_s is None or snapshot.time_s - use.moved_s >= interval_s


Request = dict[Configuration, float]
"""Configurations that a rigid policy may give a job, all of one size, the preferred first -> goodput. Empty: none exist."""


ALIKE = 1000
"""Number of different (job spec, model) pairs whose requests are cached."""


class Requests:
    """The fixed request of each job: the most GPUs that it asks for and that exist, on each type where it makes progress.

    Requests are cached: for each job while its job spec and model stay the same, and for all jobs with an equal job spec and
    model. A trace has thousands of such jobs.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[object, ...], tuple[Configuration, ...]] = {}
        self._nodes: tuple[Node, ...] = ()
        self._known: dict[JobId, tuple[Job, AnyEstimator, Request]] = {}
        self._alike: dict[tuple[object, ...], tuple[Job, AnyEstimator, Request]] = {}

    def of(self, snapshot: Snapshot) -> dict[JobId, Request]:
        """The request of every job."""
        changed = changed_nodes(self._nodes, snapshot.nodes)
        if changed is None or any(_frame(self._nodes[n]) != _frame(snapshot.nodes[n]) for n in changed):
            self._shapes, self._known, self._alike = {}, {}, {}
        self._nodes = snapshot.nodes
        known, self._known = self._known, {}
        for job in snapshot.jobs:
            model, last = snapshot.facts[job.id].model, known.get(job.id)
            same = last is not None and last[1] is model and _asks(last[0]) == _asks(job)
            self._known[job.id] = last if last is not None and same else self._of_alike(job, model)
        if len(self._alike) > max(ALIKE, len(snapshot.jobs)):
            self._alike = {}
        return {job: request for job, (_, _, request) in self._known.items()}

    def _of_alike(self, job: Job, model: AnyEstimator) -> tuple[Job, AnyEstimator, Request]:
        key = (
            id(job.spec),
            id(model),
            job.partitions,
            job.reservation,
            job.nodes,
        )  # the cache holds both objects, so their identities stay valid
        if key not in self._alike:
            self._alike[key] = (job, model, self._request(job, model))
        return self._alike[key]

    def _request(self, job: Job, model: AnyEstimator) -> Request:
        key = (job.partitions, job.reservation, job.nodes, job.spec.max_gpus)
        if key not in self._shapes:
            self._shapes[key] = configurations(open_nodes(self._nodes, job), {job.spec.max_gpus}, job.spec.max_gpus)
        fitting = sorted((option for option in self._shapes[key] if allowed(job, option)), key=lambda c: -c.gpus)
        types = job.spec.gpu_types or tuple(sorted({option.gpu_type for option in fitting}))
        request: Request = {}
        for option in fitting:
            if request and option.gpus < next(iter(request)).gpus:
                break
            goodput = rate(model, option)
            if goodput > 0 and math.isfinite(goodput):
                request[option] = goodput
        return dict(sorted(request.items(), key=lambda item: (types.index(item[0].gpu_type), item[0].nodes)))


def _frame(node: Node) -> tuple[object, ...]:
    """The facts of a node that requests depend on. The jobs that use it are not among them."""
    return node.name, node.gpu_type, node.gpus, node.may_start, node.partitions, node.reservation, node.features


def _asks(job: Job) -> tuple[object, ...]:
    return job.spec, job.partitions, job.reservation, job.nodes


def ran_s(snapshot: Snapshot, job: Job, gpus: int) -> float:
    """Seconds that the job would have run so far on `gpus` GPUs: its GPU-seconds divided by `gpus`."""
    return sum(snapshot.facts[job.id].attained_gpu_s.values()) / gpus


def remaining_s(snapshot: Snapshot, job: Job, option: Configuration, goodput: float) -> float | None:
    """Seconds that the job still needs on this configuration; None: the snapshot does not tell.

    The remaining work at this goodput, plus a restart if the job does not run there yet. If the remaining work is unknown,
    what is left of the running time that its user said, or of its time limit, whichever is shorter. A job that has run for longer
    than its user said is expected to run for as long again.
    """
    work = snapshot.facts[job.id].remaining_work
    if work is not None and goodput > 0:
        there = job.running_as == option
        return work / goodput + (0.0 if there else snapshot.facts[job.id].restart_cost_s)
    ran, said_s = ran_s(snapshot, job, option.gpus), job.spec.runtime_s
    left_s = [job.time_limit_s - ran] if job.time_limit_s is not None else []
    if said_s is not None:
        left_s.append(said_s - ran if ran < said_s else ran)
    return max(min(left_s), 0.0) if left_s else None


def smallest_need(job: Job) -> str:
    """The fewest GPUs that a job needs, in words."""
    spec = job.spec
    types = f"type {' or '.join(spec.gpu_types)}" if spec.gpu_types else "any type"
    if spec.excluded_gpu_types:
        types = f"any type but {', '.join(spec.excluded_gpu_types)}"
    return f"{spec.min_gpus} GPU{'s' if spec.min_gpus > 1 else ''} of {types}"


def others_have_them(snapshot: Snapshot, job: Job) -> Reason:
    """The reason of a job that gets nothing because other jobs get the GPUs, or because of its limits if it has some."""
    limited = any(limit.covers(job) for limit in snapshot.limits) or any(
        budget.covers(job.account) for budget in snapshot.budgets
    )
    text = "other jobs have the GPUs that it could use"
    if limited:
        text = "other jobs, or limits that it is under, leave it no configuration in this round"
    return Reason(ReasonCode.WAITING_CAPACITY, text, smallest_need(job))


def capacities(nodes: Sequence[Node], pins: Mapping[JobId, Placement]) -> dict[str, int]:
    """GPUs of each type that a round can allocate to jobs that are not pinned."""
    free = FreeGpus(nodes)
    for placement in pins.values():
        free.take_nodes(placement)
    return free.by_type()
