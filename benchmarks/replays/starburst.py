"""Starburst's public simulator again: rigid jobs on equal nodes, and the waiting policies of `model.waiting`.

It shows that the waiting policies are those of the paper, to the last digit (`benchmarks/starburst.py`). What a site may expect,
`penstock simulate run --cloud` says, which runs the burst manager itself (docs/decisions/0006 explains both). At each instant:

1. jobs that end free their GPUs, and reserved jobs that waited for these ends begin;
2. jobs whose wait ends now go to the cloud, even if GPUs are freed at this instant;
3. jobs that arrive join the queue, or go to the cloud at once;
4. queued jobs start in their order, up to the first that does not fit, or all that fit (`out_of_order`);
5. with `easy`, GPUs are reserved for the first job that does not fit, and others pass it if they end before;
6. while the queue is longer than `max_queue`, its last job goes to the cloud.

By default, this also reproduces the unexpected behaviour of the reference:

- The wait of a job that comes back from the cloud (star-wait) counts from its first arrival, so its first run is
  subtracted before `patience` multiplies. If the job then goes to the cloud for good, its first run there costs nothing.
- A job that comes back before any other job arrives may be in the queue again at once, as if it had not run in the
  cloud, if its first wait ended at the instant of its arrival.
- EASY reserves nodes with *exactly* as many free GPUs as needed, and a reservation may not begin after the end of the
  wait.

`corrected=True` counts the wait from the return, charges every cloud run, lets jobs continue from their last
checkpoint, and reserves nodes with at least as many free GPUs as needed.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from penstock_scheduler.burst.deciding.estimates import lost_s
from penstock_scheduler.model.waiting import CPUS_PER_GPU, Ask, Wait, WaitingPolicy
from penstock_scheduler.people.errors import ConfigError

Order = Literal["fifo", "sjf"]
"""Order of the queue: by arrival, or shortest job first."""


@dataclass(frozen=True, slots=True)
class RigidJob:
    """A job of a trace. `arrival_h` and `runtime_h` in hours, `gpus` >= 0; `cpus` only affect its cost."""

    arrival_h: float
    runtime_h: float
    gpus: int
    cpus: float = 0.0

    @property
    def cost_gpu_h(self) -> float:
        """Its cost in the cloud, GPU-hours."""
        return (self.gpus + self.cpus / CPUS_PER_GPU if self.cpus else self.gpus) * self.runtime_h


@dataclass(frozen=True, slots=True)
class SiteSpec:
    """The site and how it queues.

    Attributes:
        nodes: number of nodes, all equal.
        gpus_per_node: GPUs of each node.
        fit: node for a part of a node: the first that has room, or the fullest one.
        order: order of the queue.
        out_of_order: whether jobs behind one that does not fit may start.
        easy: EASY backfill instead.
        max_queue: number of jobs that may wait; None: any number.
        gravity_h: hours by which the transfer of data makes each cloud run longer and more expensive.
        corrected: see the module.
        checkpoint_h: with `corrected`, hours between two checkpoints; None: jobs write none.

    Raises:
        ConfigError: there are no GPUs, or both `out_of_order` and `easy` are on.
    """

    nodes: int
    gpus_per_node: int = 8
    fit: Literal["first", "best"] = "first"
    order: Order = "fifo"
    out_of_order: bool = False
    easy: bool = False
    max_queue: int | None = None
    gravity_h: float = 0.0
    corrected: bool = False
    checkpoint_h: float | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ConfigError(f"a site of {self.nodes} nodes with {self.gpus_per_node} GPUs: use at least 1 of each")
        if self.out_of_order and self.easy:
            raise ConfigError("out_of_order and easy exclude each other; choose one")


@dataclass(slots=True)
class _ReplayedJob:
    """A job and its state in the replay."""

    index: int
    job: RigidJob
    runtime_h: float
    """Time that is left to run: less than the job's own after a return with a checkpoint."""
    deadline_h: float = math.inf
    """When it would end if it began at the end of its wait. The end of the wait is computed from it, because the
    reference rounds so."""
    came_h: float = 0.0
    """When it arrived, or returned."""
    returned: bool = False
    start_h: float = math.nan
    in_cloud: bool = False
    on: dict[int, list[int]] = field(default_factory=dict)
    """Node -> its GPUs that it holds or has reserved."""

    @property
    def expires_h(self) -> float:
        return self.deadline_h - self.runtime_h

    @property
    def end_h(self) -> float:
        return self.start_h + self.runtime_h


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of each job, in the order of the trace.

    Attributes:
        jobs: the jobs.
        start_h: when the last run of each job began.
        cloud: whether that run was in the cloud.
        returned: whether the job had come back from the cloud before.
        allocation: node -> GPUs; empty for the cloud.
        ran_h: duration of the last run, data transfer included.
        cost_gpu_h: cost of each job in the cloud.
        spec: the site.
    """

    jobs: Sequence[RigidJob]
    start_h: list[float]
    cloud: list[bool]
    returned: list[bool]
    allocation: list[dict[int, list[int]]]
    ran_h: list[float]
    cost_gpu_h: list[float]
    spec: SiteSpec


def replay(jobs: Sequence[RigidJob], policy: WaitingPolicy, spec: SiteSpec) -> Outcomes:
    """Replay a trace.

    Raises:
        ConfigError: jobs are not in the order of their arrival.
    """
    if any(later.arrival_h < job.arrival_h for job, later in itertools.pairwise(jobs)):
        raise ConfigError("jobs out of order; sort them by arrival")
    return _Replay(jobs, policy, spec).run()


class _Replay:
    def __init__(self, jobs: Sequence[RigidJob], policy: WaitingPolicy, spec: SiteSpec) -> None:
        self._jobs, self._policy, self._spec = jobs, policy, spec
        self._runs = [_ReplayedJob(index, job, job.runtime_h, came_h=job.arrival_h) for index, job in enumerate(jobs)]
        self._fresh = deque(self._runs)
        self._back: deque[_ReplayedJob] = deque()
        self._free = [list(range(spec.gpus_per_node)) for _ in range(spec.nodes)]
        self._nodes_with = [0] * spec.gpus_per_node + [spec.nodes]
        """Number of nodes by free GPUs."""
        self._idle = spec.nodes * spec.gpus_per_node
        self._queue: list[tuple[float, int, _ReplayedJob]] = []
        self._new: list[tuple[float, int, _ReplayedJob]] = []
        self._admitted = 0
        self._waits: list[tuple[float, int, _ReplayedJob]] = []
        self._ends: list[tuple[float, int, _ReplayedJob]] = []
        self._begun = 0
        self._active: dict[int, _ReplayedJob] = {}
        self._reserved: dict[int, tuple[_ReplayedJob, int]] = {}
        """Index -> the job that has GPUs reserved, and the index of the job that must end first."""
        self._held: list[set[int]] = [set() for _ in range(spec.nodes)]
        """Reserved GPUs of each node."""
        self._first_run_gpu_h: dict[int, float] = {}
        self._freed = False

    def run(self) -> Outcomes:
        t = 0.0
        while self._fresh or self._back or self._queue or self._active:
            self._finish(t)
            self._expire(t)
            self._admit(t)
            self._place(t)
            if self._spec.easy and self._queue:
                self._backfill(t)
            if self._spec.max_queue is not None:
                while len(self._queue) > self._spec.max_queue:
                    self._leave(self._queue.pop()[2], t)
            t = self._next_h()
        return self._outcomes()

    def _next_h(self) -> float:
        while self._waits and not self._is_queued(self._waits[0]):
            heapq.heappop(self._waits)
        arrival_h = self._fresh[0].came_h if self._fresh else math.inf
        back_h = self._back[0].came_h if self._back else math.inf
        end_h = self._ends[0][0] if self._ends else math.inf
        wait_h = self._waits[0][0] if self._waits else math.inf
        return min(arrival_h, back_h, end_h, wait_h)

    @staticmethod
    def _is_queued(entry: tuple[float, int, _ReplayedJob]) -> bool:
        """Whether a wait still applies. A job that has started, left or returned since has another wait, or none."""
        return not entry[2].in_cloud and math.isnan(entry[2].start_h) and entry[2].expires_h == entry[0]

    # Ends, waits, arrivals.

    def _finish(self, t: float) -> None:
        ended = []
        while self._ends and self._ends[0][0] <= t:
            run = heapq.heappop(self._ends)[2]
            self._freed = True
            ended.append(run.index)
            del self._active[run.index]
            for node, gpus in run.on.items():
                self._resize(node, len(gpus))
                self._free[node] += gpus
                self._free[node].sort()
        if self._reserved:
            for index, (run, waits_for) in list(self._reserved.items()):
                if waits_for in ended:
                    del self._reserved[index]
                    for node, gpus in run.on.items():
                        self._held[node] -= set(gpus)
                    self._begin(run, run.start_h)

    def _expire(self, t: float) -> None:
        due = []
        while self._waits and self._waits[0][0] <= t:
            entry = heapq.heappop(self._waits)
            if self._is_queued(entry):
                due.append((self._key(entry[2]), entry[1], entry[2]))
        for entry in sorted(due):
            run = entry[2]
            del self._queue[bisect.bisect_left(self._queue, entry)]
            policy = self._policy
            if policy.kind is Wait.STAR and not run.returned and run.runtime_h > policy.t_max_h:
                self._take_back(run)
            else:
                self._leave(run, run.expires_h)

    def _take_back(self, run: _ReplayedJob) -> None:
        """The job runs in the cloud for `t_max_h` and then returns."""
        t_max_h = self._policy.t_max_h
        self._first_run_gpu_h[run.index] = run.job.cost_gpu_h / (run.job.runtime_h / t_max_h)
        run.came_h = run.expires_h + t_max_h
        run.returned = True
        if self._spec.corrected:
            run.runtime_h -= t_max_h - lost_s(t_max_h, self._spec.checkpoint_h)
        run.deadline_h = math.inf
        self._back.append(run)

    def _leave(self, run: _ReplayedJob, start_h: float) -> None:
        run.in_cloud, run.start_h = True, start_h

    def _admit(self, t: float) -> None:
        self._new = []
        while True:
            fresh_h = self._fresh[0].came_h if self._fresh else math.inf
            back_h = self._back[0].came_h if self._back else math.inf
            if not (self._fresh or self._back):
                return
            coming = self._fresh if fresh_h <= back_h else self._back
            early = coming[0].returned and coming[0].job.arrival_h == t and not self._spec.corrected
            if coming[0].came_h > t and not early:
                return
            run = coming.popleft()
            wait_h = self._policy.wait_h(Ask(run.job.gpus, run.job.runtime_h, run.job.cpus), returned=run.returned)
            if wait_h is None:
                self._leave(run, run.came_h)
                continue
            # Sums as in the reference: the end of a wait that differs in one bit falls to another event.
            if run.returned and not self._spec.corrected:
                bare_h = self._policy.factor * run.job.gpus
                late_h = run.job.arrival_h + bare_h + run.runtime_h - run.runtime_h - run.came_h
                run.deadline_h = run.came_h + run.runtime_h + self._policy.patience * max(0.0, late_h)
            elif self._policy.kind is Wait.STAR:
                run.deadline_h = run.came_h + run.runtime_h + wait_h
            else:
                run.deadline_h = run.came_h + wait_h + run.runtime_h
            waits_h = max(0.0, run.deadline_h - run.runtime_h - run.came_h)
            run.deadline_h = run.came_h + run.runtime_h + waits_h
            entry = (self._key(run), self._admitted, run)
            bisect.insort(self._queue, entry)
            self._new.append(entry)
            heapq.heappush(self._waits, (run.expires_h, self._admitted, run))
            self._admitted += 1

    def _key(self, run: _ReplayedJob) -> float:
        return run.came_h if self._spec.order == "fifo" else run.runtime_h

    # Room.

    def _place(self, t: float) -> None:
        """Start queued jobs. Out of order and with no GPUs freed since, only new jobs can fit."""
        if self._spec.out_of_order:
            tried = list(self._queue) if self._freed else sorted(self._new)
            for entry in tried:
                if self._idle == 0:
                    break
                self._try(entry, t)
        else:
            while self._queue and self._try(self._queue[0], t):
                pass
        self._freed = False

    def _try(self, entry: tuple[float, int, _ReplayedJob], t: float) -> bool:
        run = entry[2]
        found = self._find(run, t)
        if found is None:
            return False
        del self._queue[bisect.bisect_left(self._queue, entry)]
        run.on = found
        self._begin(run, t)
        return True

    def _begin(self, run: _ReplayedJob, t: float) -> None:
        run.start_h = t
        for node, gpus in run.on.items():
            taken = set(gpus)
            self._resize(node, -len(gpus))
            self._free[node] = [gpu for gpu in self._free[node] if gpu not in taken]
        self._active[run.index] = run
        heapq.heappush(self._ends, (run.end_h, self._begun, run))
        self._begun += 1

    def _resize(self, node: int, gpus: int) -> None:
        """Note that a node is about to have `gpus` more free GPUs."""
        before = len(self._free[node])
        self._nodes_with[before] -= 1
        self._nodes_with[before + gpus] += 1
        self._idle += gpus

    def _demands(self, gpus: int) -> list[int]:
        whole, rest = divmod(gpus, self._spec.gpus_per_node)
        return [self._spec.gpus_per_node] * whole + ([rest] if rest else [])

    def _find(self, run: _ReplayedJob, t: float) -> dict[int, list[int]] | None:
        if run.job.gpus > self._idle:
            return None
        demands = self._demands(run.job.gpus)
        if not any(self._nodes_with[demands[0] :]) or len(demands) > self._spec.nodes:
            return None
        free = self._free
        until_h = t + run.runtime_h
        late = [other for other, _ in self._reserved.values() if other.start_h < until_h]
        if late:
            free = [list(gpus) for gpus in free]
            for other in late:
                for node, kept in other.on.items():
                    free[node] = [gpu for gpu in free[node] if gpu not in kept]
        nodes: Iterable[int] = range(len(free))
        if self._spec.fit == "best":
            nodes = sorted(nodes, key=lambda node: len(free[node]))
        found: dict[int, list[int]] = {}
        for demand in demands:
            for node in nodes:
                if len(free[node]) >= demand and node not in found:
                    found[node] = free[node][:demand]
                    break
            else:
                return None
        return found

    def _backfill(self, t: float) -> None:
        if self._reserve(self._queue[0][2]):
            del self._queue[0]
        for entry in list(self._queue):
            self._try(entry, t)

    def _reserve(self, run: _ReplayedJob) -> bool:
        """Reserve GPUs for a job at the earliest end of a running job that leaves exactly what it needs."""
        demands = self._demands(run.job.gpus)
        free = [[gpu for gpu in gpus if gpu not in held] for gpus, held in zip(self._free, self._held, strict=True)]
        for other in sorted(self._active.values(), key=lambda other: other.end_h):
            if other.end_h > run.expires_h:
                return False
            for node, gpus in other.on.items():
                free[node] += [gpu for gpu in gpus if gpu not in self._held[node]]
            nodes: list[int] = []
            for demand in demands:
                enough = (n for n, gpus in enumerate(free) if self._suits(len(gpus), demand) and n not in nodes)
                nodes += list(itertools.islice(enough, 1))
            if len(nodes) == len(demands):
                run.on = {node: free[node][-demand:] for node, demand in zip(nodes, demands, strict=True)}
                for node, gpus in run.on.items():
                    self._held[node].update(gpus)
                self._reserved[run.index] = (run, other.index)
                run.start_h = other.end_h
                return True
        return False

    def _suits(self, free: int, demand: int) -> bool:
        return free >= demand if self._spec.corrected else free == demand

    def _outcomes(self) -> Outcomes:
        cost, ran = [], []
        for run in self._runs:
            job, first = run.job, self._first_run_gpu_h.get(run.index, 0.0)
            if not run.in_cloud:
                cost.append(first)
                ran.append(run.runtime_h)
                continue
            price = job.cost_gpu_h
            if self._spec.corrected and run.runtime_h != job.runtime_h:
                price *= run.runtime_h / job.runtime_h
            if self._spec.gravity_h:
                price *= 1 + self._spec.gravity_h / run.runtime_h
            cost.append(price + (first if self._spec.corrected else 0.0))
            ran.append(run.runtime_h + self._spec.gravity_h)
        return Outcomes(
            self._jobs,
            [run.start_h for run in self._runs],
            [run.in_cloud for run in self._runs],
            [run.returned for run in self._runs],
            [run.on for run in self._runs],
            ran,
            cost,
            self._spec,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """A replay in numbers, over the jobs between warm-up and cool-down. Times in hours, costs in GPU-hours."""

    total_cloud_cost: float
    avg_cloud_cost: float
    """GPU-hours in the cloud per hour."""
    avg_jct: float
    p90_jct: float
    p99_jct: float
    avg_wait: float
    """Time before the last run; a first run in the cloud that was lost counts as waiting."""
    p90_wait: float
    p99_wait: float
    cluster_utilization: float
    system_utilization: float
    cloud_jobs: int
    """Of all jobs, including warm-up and cool-down."""


def figures(outcomes: Outcomes, warmup_jobs: int = 0) -> Figures:
    """The figures as the reference counts them: without the first `warmup_jobs`, and without as many of the last but
    one.

    Raises:
        ConfigError: no jobs are left.
    """
    total = len(outcomes.jobs)
    if not 0 <= 2 * warmup_jobs < total:
        raise ConfigError(f"{warmup_jobs} jobs of warm-up and cool-down each leave none of {total}; use fewer")
    begin_h = outcomes.jobs[warmup_jobs].arrival_h
    end_h = outcomes.jobs[total - warmup_jobs - 1].arrival_h
    counted = range(warmup_jobs, min(total - warmup_jobs + 1, total))
    arrival = np.array([job.arrival_h for job in outcomes.jobs])
    gpus = np.array([job.gpus for job in outcomes.jobs])
    start, ran, cloud = np.array(outcomes.start_h), np.array(outcomes.ran_h), np.array(outcomes.cloud)
    inside = np.maximum(np.minimum(start + ran, end_h) - np.maximum(start, begin_h), 0.0) * gpus
    wait, jct = (start - arrival)[counted], (ran + start - arrival)[counted]
    # One by one in their order, as the reference sums, to the last bit.
    cost = sum(outcomes.cost_gpu_h[index] for index in counted)
    hours = max(end_h - begin_h, 1e-12)
    capacity = outcomes.spec.nodes * outcomes.spec.gpus_per_node * hours

    def quantile(values: np.ndarray, percent: int) -> float:
        return float(np.percentile(values, percent, method="nearest"))

    return Figures(
        total_cloud_cost=cost,
        avg_cloud_cost=cost / hours,
        avg_jct=float(np.mean(jct)),
        p90_jct=quantile(jct, 90),
        p99_jct=quantile(jct, 99),
        avg_wait=float(np.mean(wait)),
        p90_wait=quantile(wait, 90),
        p99_wait=quantile(wait, 99),
        cluster_utilization=float(inside[~cloud].sum() / capacity),
        system_utilization=float(inside.sum() / capacity),
        cloud_jobs=int(cloud.sum()),
    )
