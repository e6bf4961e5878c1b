"""A simulated cluster behind the `Cluster` port: jobs arrive, learn, progress as the truth says, restart, fail and end.

Time comes from the clock that it is given. Whenever it is looked at, it first lives through the events since the last look, in
their order: a job ends, a node fails, a node is back. Between two events every running job progresses by `truth.advance`. A
job that starts, or goes on elsewhere, first spends the `restart_s` of its truth without progress; until then its phase is
STARTING, and policies leave it alone. Stopping takes no time: that cost is a part of `restart_s`, as it was measured.

At each look a running job does what the executor does on a real one: it reports its step times and gradient noise to its
`Learner`, and trains on with the batch size that is best by what is known now. A job without a learner reports nothing and
is not touched before something happens to it.

*The front of the queue.* A policy that keeps whoever runs and starts jobs strictly in the order of submission decides by the
free GPUs and by the first of the queue alone. For such a policy the cluster can show just that: GPUs of running jobs as held
by others, and the first few waiting jobs. What comes of it is the same, and a look costs the same however many wait.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from penstock_profiles.estimators import AnyEstimator, Batch
from penstock_profiles.matrix import Configurations, best_batches
from penstock_profiles.noise import GradientNoise
from penstock_profiles.sensitivity import SensitivityProfile
from penstock_profiles.wire import Report
from penstock_scheduler.model import (
    Action,
    ClusterState,
    Hold,
    Job,
    JobId,
    JobSpec,
    Node,
    Outcome,
    Phase,
    Placement,
    Progress,
    Share,
    SharedGpus,
    SharingState,
)
from penstock_scheduler.nodespec import parse_nodes
from penstock_scheduler.policies.tuning import Amount, NodeCapacity, relative_speed
from penstock_scheduler.ports import Clock
from penstock_scheduler.sharing.node import Group, without
from penstock_scheduler.simulator.agents import SimulatedAgents
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.latencies import Latencies
from penstock_scheduler.simulator.truth import JobTruth, Measurement, Shape, advance, rate_at


class Learner(Protocol):
    """What is known of a job while it runs: to itself, and to the scheduler."""

    @property
    def estimator(self) -> AnyEstimator:
        """What the scheduler knows. The same object until there is news."""
        ...

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """GPU types that its rounds are to measure it on: see `Snapshot.unmeasured`."""
        ...

    def saw(self, gpu_type: str, seen: Measurement | None, noise: GradientNoise | None) -> None:
        """Take in what the job has measured while it ran."""
        ...

    @property
    def own_estimator(self) -> AnyEstimator:
        """What the job itself chooses its batch by."""
        ...


@dataclass(slots=True)
class SimulatedRun:
    """A job's time on one placement."""

    start_s: float
    end_s: float
    placement: Placement
    ready_s: float
    """When the restart was over."""
    progress: float
    """Progress when it began."""
    rates: list[tuple[float, float]] = field(default_factory=list)
    """(from when on, progress per second), one for each batch size or epoch that was looked at."""

    @property
    def gpu_seconds(self) -> float:
        """GPUs held, times how long."""
        return self.placement.gpus * (self.end_s - self.start_s)


@dataclass(slots=True)
class SimulatedJob:
    """A job and what has become of it."""

    id: JobId
    name: str
    spec: JobSpec
    truth: JobTruth
    """How fast it really is."""
    submit_s: float
    learner: Learner | None = None
    """None: it measures nothing, and trains with the batch that its user asked for."""
    batch_size: int | None = None
    """Total batch that its user asked for, samples; None: the model's initial one."""
    user: str = "user"
    account: str = ""
    time_limit_s: float | None = None
    """What it asked the cluster to end it after, which backfill plans with; None: no limit. Nobody is ended here."""
    sensitivity: SensitivityProfile | None = None
    """What CPU and memory are worth to it; None: nothing, or nobody knows."""
    progress: float = 0.0
    """As of the last look; of a job without a learner as of when something last happened to it, or `SimulatedCluster.close`."""
    allocation: Placement | None = None
    starts: int = 0
    most_gpus: int = 0
    """Most GPUs that it has run on."""
    failures: int = 0
    """Times that a node failed under it."""
    finish_s: float | None = None
    runs: list[SimulatedRun] = field(default_factory=list)
    """One for each time that it held GPUs; the end of the last one is not known while it runs."""
    batch: Batch | None = None
    _shape: Shape = ()
    _speed: float = 1.0
    _settled_s: float = 0.0
    """`progress` is as of then."""
    _saved: float = 0.0
    """Progress in its last checkpoint."""
    _event: int = -1
    """Number of the event at which it ends, as things stand."""
    _known: tuple[AnyEstimator, str, Shape] | None = None
    """What the present batch was chosen by."""
    _view: Job | None = None
    _leaving: int = -1
    """Number of the event at which it leaves its GPUs; -1: it stays."""
    _trains_until_s: float = math.inf
    _startable_s: float = -math.inf

    @property
    def work(self) -> float:
        """Progress at which it is done."""
        return self.truth.work

    @property
    def restarts(self) -> int:
        """Times that it was stopped and started again."""
        return max(self.starts - 1, 0)

    @property
    def rate(self) -> float:
        """Progress per second once it trains, by the progress of the last look; 0 while it holds no GPU."""
        if self.allocation is None:
            return 0.0
        return self._speed * rate_at(self.truth, self.allocation.gpu_type, self._shape, self.batch, self.progress)


class Totals(NamedTuple):
    """The cluster in numbers."""

    jobs: int
    """That have come and not gone."""
    running: int
    """That train."""
    restarting: int
    gpus_held: int
    cpus_held: int
    memory_held_mb: int
    goodput_s: float
    """Share of a whole job done per second, summed over all jobs."""


class SimulatedCluster:
    """The cluster; see the module. Its nodes' partitions are `all` and one for each GPU type.

    Args:
        nodes: all nodes.
        jobs: all jobs that will ever come.
        clock: whose time it is.
        disturbances: what goes wrong; None: nothing.
        checkpoint_s: seconds of training between two checkpoints; a job on a failed node goes on from the last one.
        moves_are_free: as in Sia's artifact: other nodes of the same type and shape cost no restart.
        latencies: of starts and stops; None: there are none.
        front: how many of the queue are shown where its front alone is shown; 0: all jobs are, see the module.
        agents: by which jobs share GPUs; None: each has its own. Not with `front`.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        jobs: Iterable[SimulatedJob],
        clock: Clock,
        disturbances: Disturbances | None = None,
        checkpoint_s: float = 600.0,
        *,
        moves_are_free: bool = False,
        latencies: Latencies | None = None,
        front: int = 0,
        agents: SimulatedAgents | None = None,
    ) -> None:
        self._clock = clock
        self._agents = agents
        self._sharers: set[JobId] = set()
        """Jobs whose GPUs are a group's."""
        self._slices: dict[int, Group] = {}
        """Number of the event at which a slice ends -> whose."""
        self._reserved: dict[int, Group] = {}
        """Groups whose GPUs are taken, by identity."""
        self._wanted: tuple[SharedGpus, ...] = ()
        self._joins: dict[JobId, SharedGpus] = {}
        """The group that each job is to be in."""
        self._alone_since_s: dict[JobId, float] = {}
        self._disturbances = disturbances or Disturbances()
        self._checkpoint_s = checkpoint_s
        self._moves_are_free = moves_are_free
        self._latencies = latencies or Latencies()
        self._nodes = {node.name: node for node in nodes}
        self._free = {node.name: node.gpus_for_us for node in nodes}
        self._taken = dict.fromkeys(self._nodes, 0)
        """GPUs that jobs hold, by node."""
        self._total_gpus = sum(self._free.values())
        self._gpus_held = self._cpus_held = self._memory_held_mb = 0
        self.gpu_seconds = 0.0
        """GPUs held, times how long, until the last change or `close`: one that jobs share counts once."""
        self._counted_s = clock.now_s()
        self._failures = {name: self._disturbances.failures(name, math.inf) for name in self._nodes}
        self.jobs = {job.id: job for job in jobs}
        self._coming = sorted(self.jobs.values(), key=lambda job: job.submit_s)
        self._arrivals_s = [job.submit_s for job in self._coming]
        self._arrived = 0
        self._active: dict[JobId, SimulatedJob] = {}
        self._held: dict[JobId, SimulatedJob] = {}
        """Jobs that hold GPUs."""
        self._learning: dict[JobId, SimulatedJob] = {}
        """Those of them that have a learner."""
        self._restarting: dict[JobId, SimulatedJob] = {}
        """The others, until they train."""
        self._goodputs_s: dict[JobId, float] = {}
        """The others, once they train -> share of the job per second."""
        self._waiting: list[tuple[float, JobId]] = []
        """(submission, job) of those that have come and hold no GPUs, the first first."""
        self._front = front
        self._shown = dict(self._nodes)
        """Nodes as they are shown with the front of the queue."""
        self._with_taken: dict[tuple[str, bool, int], Node] = {}
        """A node's name, whether it is usable, and how many of its GPUs jobs hold -> the node as it is shown then."""
        self._restless: set[str] = set()
        """Nodes that have changed since then."""
        self._passed_over = 0
        self._unstarted = 0
        """Of the front that was shown last, those that have not started."""
        self._look_again = False
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, str]] = []
        """Heap of (when, number, what, whom): what is "end" or "leave" of a job, or "fail" or "repair" of a node."""
        for name in self._nodes:
            self._next_failure(name)

    @property
    def finished(self) -> bool:
        """Whether every job has come and gone."""
        return self._arrived == len(self._coming) and not self._active

    @property
    def expects_more(self) -> bool:
        """Whether jobs are still to come, as of the last look."""
        return self._arrived < len(self._coming)

    @property
    def whole(self) -> bool:
        """Whether every node is usable, as of the last look."""
        return all(node.usable for node in self._nodes.values())

    def totals(self) -> Totals:
        """The cluster now."""
        now_s = self._clock.now_s()
        for job in [job for job in self._restarting.values() if now_s >= job.runs[-1].ready_s]:
            del self._restarting[job.id]
            self._goodputs_s[job.id] = job.rate / job.work
        learning = [job for job in self._learning.values() if now_s >= job.runs[-1].ready_s]
        running = len(self._goodputs_s) + len(learning)
        goodput_s = sum(self._goodputs_s.values(), 0.0) + sum(job.rate / job.work for job in learning)
        held = (self._gpus_held, self._cpus_held, self._memory_held_mb)
        return Totals(len(self._active), running, len(self._held) - running, *held, goodput_s)

    def pass_over(self, jobs: int) -> None:
        """So many of the front are passed over, for the cluster has no room for them as it is: show as many others."""
        self._look_again |= jobs > self._passed_over
        self._passed_over = jobs

    def next_event_s(self) -> float:
        """When something happens next, if nobody acts: an arrival, an end, a failure or a repair; infinite: never."""
        while self._events and self._stale(self._events[0]):
            self._slices.pop(heapq.heappop(self._events)[1], None)
        arrival_s = self._arrivals_s[self._arrived] if self._arrived < len(self._coming) else math.inf
        event_s = self._events[0][0] if self._events else math.inf
        if self._look_again:
            return -math.inf
        if self._front and self._waiting and not self._passed_over and (room_s := self._room_s()) < math.inf:
            return room_s  # until then the first of the queue waits, and all others behind it
        if self._front and len(self._waiting) >= self._front + self._passed_over:
            return event_s  # who comes now would not be shown
        if self._front and not self._waiting and arrival_s < math.inf and self._disturbances.node_mtbf_h is None:
            return arrival_s  # nobody waits for the GPUs that come free until then
        return min(arrival_s, event_s)

    def _room_s(self) -> float:
        """When as many GPUs are free as the first of the queue needs at least, or a node fails or is back; infinite: never."""
        missing = self.jobs[self._waiting[0][1]].spec.min_gpus - (self._total_gpus - self._gpus_held)
        passed, found_s = [], math.inf
        while self._events and found_s == math.inf:
            passed.append(event := heapq.heappop(self._events))
            if self._stale(event):
                continue
            at_s, _, what, whom = event
            if what == "end" and (held := self.jobs[whom].allocation) is not None:
                missing -= held.gpus
            if what != "end" or missing <= 0:
                found_s = at_s
        for event in passed:
            heapq.heappush(self._events, event)
        return found_s

    def observe(self) -> ClusterState:
        """What is there now."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        self._train(now_s)
        self._look_again = False
        if self._front:
            return self._front_of_queue(now_s)
        return ClusterState(tuple(self._nodes.values()), tuple(self._view(job, now_s) for job in self._active.values()))

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """Everybody who has to leave leaves, then everybody who finds room starts."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        stays = {action.job for action in actions if not self._moves(action)}
        for action in actions:
            job = self.jobs[action.job]
            if action.job not in stays and job.allocation is not None:
                self._stop(job, now_s)
        outcomes = tuple(self._begin(action, now_s, stays) for action in actions)
        if self._wanted:
            self._regroup(now_s)
        if self._front and actions and self._unstarted <= self._passed_over < len(self._waiting):
            self._look_again = True  # all of the front that can start have done so: who is next?
        return outcomes

    def reports(self) -> Sequence[Report]:
        """None: what jobs measure goes straight to their learners."""
        return ()

    # Jobs that share GPUs: the port `Agents`.

    def sharing(self) -> SharingState:
        """See `ports.Agents`."""
        agents = self._with_agents()
        now_s = self._clock.now_s()
        for job_id, since_s in self._alone_since_s.items():
            since_s = max(since_s, self.jobs[job_id].runs[-1].ready_s)
            if now_s > since_s:
                agents.ran_alone(job_id, now_s - since_s, now_s)
                self._alone_since_s[job_id] = now_s
        return SharingState(
            tuple(group.order for group in agents.groups),
            {job_id: agents.use(job_id) for job_id in self._active},
            agents.take_seen(),
            (),
            agents.gpu_memory_mb,
        )

    def share(self, groups: Sequence[SharedGpus]) -> None:
        """See `ports.Agents`. A job joins as soon as it has started on the node."""
        self._wanted = tuple(groups)
        self._joins = {job_id: group for group in groups for job_id in group.jobs}
        now_s = self._clock.now_s()
        self._live_until(now_s)
        self._regroup(now_s)

    def _regroup(self, now_s: float) -> None:
        agents = self._with_agents()
        here = []
        for group in self._wanted:
            for job_id in group.jobs:
                if not self._is_on(job_id, group.node):
                    group = without(group, job_id)
            if group.packs:
                here.append(group)
        sharers = {job_id for group in here for job_id in group.jobs}
        if here == [group.order for group in agents.groups] and sharers == self._sharers:
            return
        running = {
            job_id: job_id not in self._sharers and self.jobs[job_id].runs[-1].start_s < now_s for job_id in sharers
        }
        for job_id in sharers - self._sharers:
            self._occupy(self.jobs[job_id], -1, now_s)
            self._alone(job_id, now_s)
        for job_id in self._sharers - sharers:
            if job_id in self._held:
                self._occupy(self.jobs[job_id], 1, now_s)
                self._alone_since_s[job_id] = now_s
        self._sharers = sharers
        fresh = agents.order(here, now_s, running)
        self._reserve_gpus(now_s)
        for group_now in fresh:
            self._next_slice(group_now, now_s)
        for job_id in list(self._held):
            self._change_speed(self.jobs[job_id], now_s)

    def _with_agents(self) -> SimulatedAgents:
        assert self._agents is not None, "only a cluster with agents is asked about sharing"
        return self._agents

    def _is_on(self, job_id: JobId, node: str) -> bool:
        job = self.jobs[job_id]
        return job.allocation is not None and job.allocation.nodes == (node,)

    def _occupy(self, job: SimulatedJob, sign: int, now_s: float) -> None:
        """Count a job's GPUs as its own from now on, or with -1 no longer."""
        assert job.allocation is not None, "it holds GPUs"
        for share in job.allocation.shares:
            self._take(share.node, sign * share.gpus, now_s)

    def _take(self, node: str, gpus: int, now_s: float) -> None:
        self._count(now_s)
        self._free[node] -= gpus
        self._taken[node] += gpus
        self._gpus_held += gpus
        self._restless.add(node)

    def _count(self, now_s: float) -> None:
        self.gpu_seconds += self._gpus_held * (now_s - self._counted_s)
        self._counted_s = now_s

    def _reserve_gpus(self, now_s: float) -> None:
        """Take the GPUs of the groups that there are, and give back those of groups that there were."""
        now = {id(group): group for group in self._with_agents().groups}
        for key, group in self._reserved.items():
            if key not in now:
                self._take(group.order.node, -group.order.gpus, now_s)
                group.event = -1
        for key, group in now.items():
            if key not in self._reserved:
                self._take(group.order.node, group.order.gpus, now_s)
        self._reserved = now

    def _next_slice(self, group: Group, now_s: float) -> None:
        group.event = self._push(now_s + group.order.slice_s, "slice", group.order.node)
        self._slices[group.event] = group

    def _alone(self, job_id: JobId, now_s: float) -> None:
        """Count the time that it has had its GPUs to itself."""
        since_s = self._alone_since_s.pop(job_id, now_s)
        since_s = max(since_s, self.jobs[job_id].runs[-1].ready_s)
        if now_s > since_s and self._agents is not None:
            self._agents.ran_alone(job_id, now_s - since_s, now_s)

    def _end_slice(self, number: int, at_s: float) -> None:
        group = self._slices.pop(number)
        self._with_agents().end_slice(group, at_s)
        self._next_slice(group, at_s)
        self._change_speeds(group, at_s)

    def _change_speeds(self, group: Group, now_s: float) -> None:
        for job_id in group.order.jobs:
            self._change_speed(self.jobs[job_id], now_s)

    def _leave_group(self, job: SimulatedJob, now_s: float) -> None:
        agents = self._with_agents()
        self._sharers.discard(job.id)
        group = agents.left(job.id, now_s, ended=job.finish_s is not None)
        self._reserve_gpus(now_s)
        if group is not None:
            self._next_slice(group, now_s)
            self._change_speeds(group, now_s)

    # What happens by itself.

    def _live_until(self, now_s: float) -> None:
        """Live through what has happened, in its order."""
        while self._events and self._events[0][0] <= now_s:
            event = heapq.heappop(self._events)
            if self._stale(event):
                self._slices.pop(event[1], None)
                continue
            at_s, _, what, whom = event
            if what == "end":
                self._end(self.jobs[whom], at_s)
            elif what == "leave":
                self._leave(self.jobs[whom], at_s)
            elif what == "slice":
                self._end_slice(event[1], at_s)
            elif what == "fail":
                self._fail(whom, at_s)
            else:
                self._repair(whom)
        arrived = bisect_right(self._arrivals_s, now_s)
        for job in self._coming[self._arrived : arrived]:
            self._active[job.id] = job
            self._queue(job)
        self._arrived = arrived

    def _stale(self, event: tuple[float, int, str, str]) -> bool:
        """Whether an end or a leave was foreseen that things have since changed."""
        _, number, what, whom = event
        if what == "leave":
            return self.jobs[whom]._leaving != number
        if what == "slice":
            return self._slices[number].event != number
        return what == "end" and self.jobs[whom]._event != number

    def _end(self, job: SimulatedJob, at_s: float) -> None:
        job.progress, job.finish_s, job.batch = job.work, at_s, None
        self._release(job, at_s)
        del self._active[job.id]

    def _fail(self, name: str, at_s: float) -> None:
        node = self._nodes[name]
        self._nodes[name] = _with_usable(node, usable=False)
        self._restless.add(name)
        for job in list(self._held.values()):
            if job.allocation is not None and name in job.allocation.nodes:
                self._settle(job, at_s)
                self._release(job, at_s)
                self._queue(job)
                job.progress = job._saved
                job.failures += 1

    def _repair(self, name: str) -> None:
        self._nodes[name] = _with_usable(self._nodes[name], usable=True)
        self._restless.add(name)
        self._next_failure(name)

    def _next_failure(self, name: str) -> None:
        for fails_s, back_s in itertools.islice(self._failures[name], 1):
            self._push(fails_s, "fail", name)
            self._push(back_s, "repair", name)

    def _push(self, at_s: float, what: str, whom: str) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (at_s, number, what, whom))
        return number

    # What jobs do.

    def _train(self, now_s: float) -> None:
        """Bring all progress up to date; let jobs report, and choose their batch sizes anew where there is news."""
        training = []
        for job in self._learning.values():
            assert job.allocation is not None, "they hold GPUs"
            assert job.learner is not None, "they learn"
            self._settle(job, now_s)
            if now_s <= job.runs[-1].ready_s:
                continue
            training.append(job)
            gpu_type, gpus = job.allocation.gpu_type, job.allocation.gpus
            seen = job.truth.seen(gpu_type, job._shape, job.batch)
            job.learner.saw(gpu_type, seen, job.truth.noise(job.batch, gpus, job.progress))
        for job in self._choose_batches(training):
            self._foresee(job)
        for job in training:
            run, rate = job.runs[-1], job.rate
            if not run.rates or run.rates[-1][1] != rate:
                run.rates.append((now_s if run.rates else run.ready_s, rate))

    def _choose_batches(self, jobs: Iterable[SimulatedJob]) -> list[SimulatedJob]:
        """Let jobs take the batch that they think best where they are; those of them that now have another one."""
        totals: list[tuple[SimulatedJob, int | None]] = []
        learning: list[tuple[SimulatedJob, AnyEstimator, str, Shape]] = []
        for job in jobs:
            assert job.allocation is not None, "only a job with GPUs trains"
            if job.learner is None:
                totals.append((job, job.batch_size))
                continue
            known = (job.learner.own_estimator, job.allocation.gpu_type, job._shape)
            if job._known is None or known[0] is not job._known[0] or known[1:] != job._known[1:]:
                job._known = known
                learning.append((job, *known))
        if not learning:
            return self._with_batches(totals)
        where = Configurations(
            tuple(gpu_type for *_, gpu_type, _ in learning),
            tuple(len(shape) for *_, shape in learning),
            tuple(sum(shape) for *_, shape in learning),
        )
        best = best_batches([estimator for _, estimator, *_ in learning], where)
        for (job, *_), batch, gpus in zip(learning, best, where.gpus, strict=True):
            totals.append((job, None if batch is None else gpus * batch.atomic_batch * (batch.accumulation_steps + 1)))
        return self._with_batches(totals)

    def _with_batches(self, totals: Iterable[tuple[SimulatedJob, int | None]]) -> list[SimulatedJob]:
        """Let jobs train with these total batches; those that now have another one than before."""
        changed = []
        for job, total in totals:
            assert job.allocation is not None, "only a job with GPUs trains"
            before, job.batch = job.batch, job.truth.batch(job.allocation.gpu_type, job._shape, total)
            if job.batch != before:
                changed.append(job)
        return changed

    def _settle(self, job: SimulatedJob, now_s: float) -> None:
        """Bring its progress to `now_s`, and what is in its last checkpoint."""
        ready_s = job.runs[-1].ready_s
        saved_s = ready_s + (now_s - ready_s) // self._checkpoint_s * self._checkpoint_s
        if saved_s > max(ready_s, job._settled_s):
            self._train_until(job, saved_s)
            job._saved = job.progress
        self._train_until(job, now_s)

    def _train_until(self, job: SimulatedJob, until_s: float) -> None:
        assert job.allocation is not None, "only a job with GPUs trains"
        seconds = min(until_s, job._trains_until_s) - max(job._settled_s, job.runs[-1].ready_s)
        if seconds > 0:
            gpu_type = job.allocation.gpu_type
            job.progress, _ = advance(job.truth, gpu_type, job._shape, job.batch, job.progress, seconds, job._speed)
        job._settled_s = until_s

    def _foresee(self, job: SimulatedJob) -> None:
        """Note when it will end if nothing changes."""
        assert job.allocation is not None, "only a job with GPUs ends"
        if job.progress >= job.work and job._event >= 0:
            return  # it is on its way out
        ready_s = max(job._settled_s, job.runs[-1].ready_s)
        gpu_type = job.allocation.gpu_type
        _, needed_s = advance(job.truth, gpu_type, job._shape, job.batch, job.progress, math.inf, job._speed)
        ends = needed_s < math.inf and ready_s + needed_s <= job._trains_until_s
        job._event = self._push(ready_s + needed_s + self._latencies.exit_s, "end", job.id) if ends else -1

    def _release(self, job: SimulatedJob, now_s: float) -> None:
        """Take its GPUs away."""
        assert job.allocation is not None, "nothing to take away"
        for share in job.allocation.shares:
            self._hold(share, -1)
        if job.id not in self._sharers:
            self._occupy(job, -1, now_s)
        self._alone(job.id, now_s)
        for table in (self._held, self._learning, self._restarting, self._goodputs_s):
            table.pop(job.id, None)
        job.runs[-1].end_s = now_s
        job.allocation, job._event, job._view = None, -1, None
        job._leaving, job._trains_until_s = -1, math.inf
        job._startable_s = now_s + self._latencies.pause_s
        if job.id in self._sharers:
            self._leave_group(job, now_s)
        self._disturb(now_s)

    def _hold(self, share: Share, sign: int) -> None:
        """Count the CPUs and memory that are held, or with -1 are no longer."""
        self._cpus_held += sign * share.cpus
        self._memory_held_mb += sign * share.memory_mb

    def _queue(self, job: SimulatedJob) -> None:
        """It waits from now on."""
        insort(self._waiting, (job.submit_s, job.id))

    # What is done to them.

    def _moves(self, action: Action) -> bool:
        """Whether an action takes a job from where it is: it may have been done already."""
        held = self.jobs[action.job].allocation
        return isinstance(action, Hold) or held is None or not action.placement.suits(held)

    def _stop(self, job: SimulatedJob, now_s: float) -> None:
        """It begins to save and leave, if it does not already."""
        if job._leaving >= 0:
            return
        if self._latencies.leave_s == 0:
            self._leave(job, now_s)
            return
        self._settle(job, now_s)
        leaves_s = now_s + self._latencies.leave_s
        job._trains_until_s = leaves_s - self._latencies.lost_s
        job._leaving = self._push(leaves_s, "leave", job.id)
        self._foresee(job)

    def _leave(self, job: SimulatedJob, now_s: float) -> None:
        """It has saved a checkpoint and leaves."""
        self._settle(job, now_s)
        self._release(job, now_s)
        self._queue(job)
        job._saved = job.progress

    def _begin(self, action: Action, now_s: float, stays: set[JobId]) -> Outcome:
        job = self.jobs[action.job]
        if job.finish_s is not None:
            return Outcome(action, Progress.DONE, "it has ended")
        if job._leaving >= 0:
            return Outcome(action, Progress.UNDER_WAY, "saves and leaves its GPUs")
        if action.job in stays or isinstance(action, Hold):
            return Outcome(action, Progress.DONE)
        if now_s < job._startable_s:
            return Outcome(action, Progress.UNDER_WAY, "pauses before it can start again")
        where = action.placement
        unusable = [share.node for share in where.shares if not self._usable(share.node)]
        if unusable:
            return Outcome(action, Progress.FAILED, f"node {unusable[0]} is not usable")
        if any(self._free[share.node] < self._needs(job.id, share) for share in where.shares):
            return Outcome(action, Progress.UNDER_WAY, "waits for GPUs that another job still holds")
        self._start(job, where, now_s)
        return Outcome(action, Progress.DONE)

    def _needs(self, job_id: JobId, share: Share) -> int:
        """GPUs that have to be free for a job to start: none where it joins others on GPUs that are reserved already."""
        group = self._joins.get(job_id)
        if group is None or group.node != share.node:
            return share.gpus
        reserved = not self._sharers.isdisjoint(group.jobs)
        return 0 if reserved else group.gpus

    def _usable(self, name: str) -> bool:
        return name in self._nodes and self._nodes[name].usable

    def _start(self, job: SimulatedJob, where: Placement, now_s: float) -> None:
        last = job.runs[-1] if job.runs else None
        shape = tuple(share.gpus for share in where.shares)
        free = (
            self._moves_are_free
            and last is not None
            and last.end_s == now_s
            and (last.placement.gpu_type, job._shape) == (where.gpu_type, shape)
        )
        for share in where.shares:
            self._hold(share, 1)
        del self._waiting[bisect_left(self._waiting, (job.submit_s, job.id))]
        self._unstarted -= 1
        self._held[job.id] = job
        (self._restarting if job.learner is None else self._learning)[job.id] = job
        if free and last is not None:
            ready_s = max(last.ready_s, now_s)
        else:
            ready_s = now_s + job.truth.restart_s
            if job.starts == 0:
                ready_s += self._disturbances.profiling_s(where.gpus, len({n.gpu_type for n in self._nodes.values()}))
            job.starts += 1
        job.most_gpus = max(job.most_gpus, where.gpus)
        job.allocation, job._shape, job._settled_s, job._view = where, shape, now_s, None
        job._speed = self._speed(job)
        job.runs.append(SimulatedRun(now_s, now_s, where, ready_s, job.progress))
        self._occupy(job, 1, now_s)
        if self._agents is not None:
            self._agents.started(job.id, where.gpu_type, now_s)
            self._alone_since_s[job.id] = now_s
            if job.id in self._joins:
                self._regroup(now_s)  # so that the next one finds these GPUs reserved
        self._choose_batches([job])
        self._foresee(job)
        self._disturb(now_s)

    # What disturbs them.

    def _speed(self, job: SimulatedJob) -> float:
        speed = self._share_speed(job) / self._disturbances.straggler(job.id, job.starts)
        if self._agents is not None:
            speed *= self._agents.factor(job.id)
        return speed * (1 - self._disturbances.interference) if self._interfered(job) else speed

    def _share_speed(self, job: SimulatedJob) -> float:
        """Speed with the CPUs and the memory that it has, relative to its GPUs' part of the node, which its truth is of."""
        if job.sensitivity is None or job.allocation is None or len(job.allocation.shares) > 1:
            return 1.0
        share = job.allocation.shares[0]
        table = job.sensitivity.at(share.gpus)
        if table is None or not share.cpus:
            return 1.0
        node = replace(self._nodes[share.node], cpus_others=0, memory_others_mb=0, usable=True)
        return relative_speed(table, share.gpus, NodeCapacity.of(node), Amount(share.cpus, share.memory_mb))

    def _interfered(self, job: SimulatedJob) -> bool:
        """Whether it and another job of several nodes share one."""
        if not self._disturbances.interference or len(job._shape) < 2 or job.allocation is None:
            return False
        mine = set(job.allocation.nodes)
        return any(
            other is not job
            and other.allocation is not None
            and len(other._shape) > 1
            and mine & set(other.allocation.nodes)
            for other in self._held.values()
        )

    def _disturb(self, now_s: float) -> None:
        """Whoever has got or lost a neighbour has another speed from now on."""
        if not self._disturbances.interference:
            return
        for job in self._held.values():
            self._change_speed(job, now_s)

    def _change_speed(self, job: SimulatedJob, now_s: float) -> None:
        """Let it go on as fast as it is now."""
        if (speed := self._speed(job)) == job._speed:
            return
        self._settle(job, now_s)
        job._speed = speed
        if job.id in self._goodputs_s:
            self._goodputs_s[job.id] = job.rate / job.work
        self._foresee(job)

    # What others see of them.

    def _front_of_queue(self, now_s: float) -> ClusterState:
        for name in self._restless:
            node = self._nodes[name]
            key = (name, node.usable, self._taken[name])
            if key not in self._with_taken:
                self._with_taken[key] = replace(node, gpus_others=node.gpus_others + self._taken[name])
            self._shown[name] = self._with_taken[key]
        self._restless.clear()
        front = self._waiting[: self._front + self._passed_over]
        self._unstarted = len(front)
        return ClusterState(
            tuple(self._shown.values()), tuple(self._view(self.jobs[job_id], now_s) for _, job_id in front)
        )

    def _view(self, job: SimulatedJob, now_s: float) -> Job:
        phase = Phase.QUEUED
        if job.allocation is not None:
            launch_s, run = self._latencies.launch_s, job.runs[-1]
            started_s = run.ready_s if launch_s is None else run.start_s + launch_s
            phase = Phase.STARTING if now_s < started_s else Phase.RUNNING
            if job._leaving >= 0:
                phase = Phase.STOPPING
        if job._view is None or job._view.phase is not phase:
            job._view = Job(
                id=job.id,
                name=job.name,
                user=job.user,
                account=job.account,
                spec=job.spec,
                partitions=("all",),
                phase=phase,
                submit_s=job.submit_s,
                restarts=job.restarts,
                allocation=job.allocation,
                time_limit_s=job.time_limit_s,
            )
        return job._view

    def close(self) -> None:
        """Bring all jobs up to date: for who looks at them before all have ended."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        self._count(now_s)
        for job in self._held.values():
            self._settle(job, now_s)
            job.runs[-1].end_s = now_s


def _with_usable(node: Node, *, usable: bool) -> Node:
    return replace(node, usable=usable, state="IDLE" if usable else "DOWN")


def nodes_from_spec(spec: str) -> tuple[Node, ...]:
    """Nodes from a spec such as `t4:6x4,rtx:3x8:48c:256g`, of 64 CPUs where it names none. Raises SpecError with the bad part."""
    return tuple(
        Node(
            node.name,
            node.gpu_type,
            node.gpus,
            ("all", node.gpu_type),
            cpus=64 if node.cpus is None else node.cpus,
            state="IDLE",
            memory_mb=node.memory_mb or 0,
        )
        for node in parse_nodes(spec)
    )
