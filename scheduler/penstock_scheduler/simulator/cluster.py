"""A simulated cluster behind the `Cluster` port: jobs arrive, learn, progress as the truth says, restart, fail and end.

The clock argument gives the time. At each observation, the cluster first processes the events since the last
observation in their order: a job ends, a node fails, a node is repaired. Between two events every running job
progresses by `truth.advance`. A job that starts, or continues elsewhere, first spends the `restart_s` of its truth
without progress. Until then its phase is STARTING, and policies do not move it. Stopping takes no time: the measured
`restart_s` includes that cost.

At each observation a running job does what the executor does on a real cluster: it reports its step times and gradient
noise to its `Learner`, and continues with the batch size that is best by what is known now. A job without a learner
reports nothing, and does not change until an event concerns it.

Modules: `jobs` (the jobs), `events` (future events), `node_book` (what jobs hold), `queue_front` (arriving and waiting
jobs) and `cluster_sharing` (jobs that share GPUs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.wire import Report
from penstock_scheduler.api.ports import Clock, ClusterParts, Leadership, SpecCheck
from penstock_scheduler.model import (
    Action,
    ClusterState,
    Hold,
    Job,
    JobId,
    Node,
    Outcome,
    Phase,
    Placement,
    Progress,
    Share,
    SharedGpus,
    SharingState,
)
from penstock_scheduler.model.nodespec import DEFAULT_SPEC, parse_nodes
from penstock_scheduler.rounds.policies.tuning import Amount, NodeCapacity, relative_speed
from penstock_scheduler.rounds.settings import Settings
from penstock_scheduler.simulator.agents import SimulatedAgents
from penstock_scheduler.simulator.cloud import SimulatedCloud
from penstock_scheduler.simulator.cluster_sharing import ClusterSharing
from penstock_scheduler.simulator.disturbances import Disturbances, Latencies
from penstock_scheduler.simulator.jobs import Event, Events, SimulatedJob, SimulatedRun, choose_batches
from penstock_scheduler.simulator.node_book import Arrivals, NodeBook, SimulatedQueue


class Totals(NamedTuple):
    """Figures of the whole cluster."""

    jobs: int
    """Jobs that have arrived and not ended."""
    running: int
    """Jobs that train."""
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
        jobs: all jobs that will ever arrive.
        clock: tells the time.
        disturbances: what goes wrong; None: nothing.
        checkpoint_s: seconds of training between two checkpoints; a job on a failed node continues from the last one.
        moves_are_free: as in Sia's artifact: other nodes of the same type and shape cost no restart.
        latencies: of starts and stops; None: there are none.
        front: number of waiting jobs to show where only the front of the queue is shown (`queue_front`); 0: all jobs
            are shown. Not with `cloud`.
        agents: agents by which jobs share GPUs; None: each job has its own. Not with `front`.
        cloud: the cloud whose instances are further nodes of the cluster; None: there is none.
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
        cloud: SimulatedCloud | None = None,
    ) -> None:
        self._clock = clock
        self._cloud = cloud
        self._disturbances = disturbances or Disturbances()
        self._checkpoint_s = checkpoint_s
        self._moves_are_free = moves_are_free
        self._latencies = latencies or Latencies()
        self._book = NodeBook(nodes, clock.now_s())
        self._failures = {node.name: self._disturbances.failures(node.name, math.inf) for node in nodes}
        self.jobs = {job.id: job for job in jobs}
        self._arrivals = Arrivals(self.jobs.values())
        self._queue = SimulatedQueue(front)
        self._active: dict[JobId, SimulatedJob] = {}
        """Jobs that have arrived and not ended."""
        self._held: dict[JobId, SimulatedJob] = {}
        """Jobs that hold GPUs."""
        self._learning: dict[JobId, SimulatedJob] = {}
        """Jobs that hold GPUs and have a learner."""
        self._restarting: dict[JobId, SimulatedJob] = {}
        """Jobs that hold GPUs, have no learner and do not train yet."""
        self._goodputs_s: dict[JobId, float] = {}
        """Jobs without a learner that train -> share of the job per second."""
        self._events = Events(self._is_stale, self._drop)
        self._sharing: ClusterSharing | None = None
        if agents is not None:
            self._sharing = ClusterSharing(agents, self.jobs, self._held, self._book, self._events, self._change_speed)
        for name in self._book.nodes:
            self._next_failure(name)
        if cloud is not None:
            cloud.lose, cloud.held = self._lose, self._held_from

    @property
    def finished(self) -> bool:
        """Whether every job has arrived and ended."""
        return self._arrivals.over and not self._active

    @property
    def expects_more(self) -> bool:
        """Whether more jobs will arrive, as of the last observation."""
        return not self._arrivals.over

    @property
    def whole(self) -> bool:
        """Whether every node takes new work, as of the last observation."""
        return self._book.whole

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds that jobs held until the last change or `close`. GPUs that jobs share count once."""
        return self._book.gpu_seconds

    def totals(self) -> Totals:
        """The cluster now."""
        now_s = self._clock.now_s()
        for job in [job for job in self._restarting.values() if now_s >= job.runs[-1].ready_s]:
            del self._restarting[job.id]
            self._goodputs_s[job.id] = job.rate / job.work
        learning = [job for job in self._learning.values() if now_s >= job.runs[-1].ready_s]
        running = len(self._goodputs_s) + len(learning)
        goodput_s = sum(self._goodputs_s.values(), 0.0) + sum(job.rate / job.work for job in learning)
        held = (self._book.gpus_held, self._book.cpus_held, self._book.memory_held_mb)
        return Totals(len(self._active), running, len(self._held) - running, *held, goodput_s)

    def pass_over(self, jobs: int) -> None:
        """Note that this many jobs of the front fit on no node now, and show as many others."""
        self._queue.pass_over(jobs)

    def next_event_s(self) -> float:
        """When something happens next without any action: an arrival, an end, a failure or a repair; infinite:
        never."""
        event_s, arrival_s, queue = self._events.next_s(), self._arrivals.next_s, self._queue
        if queue.observe_again:
            return -math.inf
        if queue.front:
            if queue and not queue.passed_over and (room_s := self._room_s()) < math.inf:
                return room_s  # until then the first of the queue waits, and all others behind it
            if queue.full:
                return event_s
            if not queue and arrival_s < math.inf and self._disturbances.node_mtbf_h is None:
                return arrival_s  # no job waits for the GPUs that are freed until then
        return min(arrival_s, event_s)

    def _room_s(self) -> float:
        """When as many GPUs are free as the first waiting job needs at least, or a node fails or is repaired; infinite:
        never."""
        missing = self.jobs[self._queue.first].spec.min_gpus - (self._book.total_gpus - self._book.gpus_held)

        def enough(event: Event) -> bool:
            nonlocal missing
            if event.what == "end" and (held := self.jobs[event.subject].allocation) is not None:
                missing -= held.gpus
            return event.what != "end" or missing <= 0

        return self._events.first_s(enough)

    def observe(self) -> ClusterState:
        """The cluster now."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        self._train(now_s)
        self._queue.observe_again = False
        if self._queue.front:
            front = [self.jobs[job_id] for job_id in self._queue.show()]
            return ClusterState(self._book.shown(), tuple(self._view(job, now_s) for job in front))
        jobs = tuple(self._view(job, now_s) for job in self._active.values())
        return ClusterState(tuple(self._book.nodes.values()), jobs)

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """Let all departing jobs leave, then start the jobs that find free GPUs."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        stays = {action.job for action in actions if not self._moves(action)}
        for action in actions:
            job = self.jobs[action.job]
            if action.job not in stays and job.allocation is not None:
                self._stop(job, now_s)
        outcomes = tuple(self._begin(action, now_s, stays) for action in actions)
        if self._sharing is not None:
            self._sharing.acted(now_s)
        if actions:
            self._queue.acted()
        return outcomes

    def reports(self) -> Sequence[Report]:
        """None: jobs report what they measure directly to their learners."""
        return ()

    # Jobs that share GPUs: the port `Agents`.

    def sharing(self) -> SharingState:
        """See `ports.Agents`."""
        return self._with_sharing().state(self._active, self._clock.now_s())

    def share(self, groups: Sequence[SharedGpus], actions: Sequence[Action]) -> None:
        """See `ports.Agents`. A job joins as soon as it has started on the node."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        self._with_sharing().share(groups, now_s)

    def _with_sharing(self) -> ClusterSharing:
        assert self._sharing is not None, "only a cluster with agents is asked about sharing"
        return self._sharing

    # Events.

    def _live_until(self, now_s: float) -> None:
        """Process the events until now, in their order."""
        while (event := self._events.pop(now_s)) is not None:
            if event.what == "end":
                self._end(self.jobs[event.subject], event.at_s)
            elif event.what == "leave":
                self._leave(self.jobs[event.subject], event.at_s)
            elif event.what == "slice":
                self._with_sharing().end_slice(event)
            elif event.what == "fail":
                self._fail(event.subject, event.at_s)
            else:
                self._book.set_may_start(event.subject, may_start=True)
                self._next_failure(event.subject)
        for job in self._arrivals.until(now_s):
            self._active[job.id] = job
            self._queue.add(job)

    def _is_stale(self, event: Event) -> bool:
        """Whether changes since the event was foreseen prevent it."""
        if event.what == "leave":
            return self.jobs[event.subject].leave_event != event.number
        if event.what == "slice":
            return self._with_sharing().is_stale(event)
        return event.what == "end" and self.jobs[event.subject].end_event != event.number

    def _drop(self, event: Event) -> None:
        if event.what == "slice":
            self._with_sharing().drop(event)

    def _end(self, job: SimulatedJob, at_s: float) -> None:
        job.progress, job.finish_s, job.batch = job.work, at_s, None
        self._release(job, at_s)
        del self._active[job.id]
        if self._cloud is not None:
            self._cloud.ended(job)

    def _fail(self, name: str, at_s: float) -> None:
        self._book.set_may_start(name, may_start=False)
        self._lose([name], at_s)

    def _lose(self, names: Sequence[str], at_s: float | None = None) -> None:
        """Jobs on nodes that are gone wait again, with the work of their last checkpoint. `at_s`: when; None: now."""
        at_s = self._clock.now_s() if at_s is None else at_s
        for job in list(self._held.values()):
            if job.allocation is not None and not set(names).isdisjoint(job.allocation.nodes):
                job.settle(at_s, self._checkpoint_s)
                self._release(job, at_s)
                self._queue.add(job)
                job.progress = job.saved
                job.failures += 1

    def _held_from(self, job_id: JobId) -> tuple[Placement, float] | None:
        """What a job holds, and when it begins to train there; None: nothing, or it has ended."""
        job = self.jobs[job_id]
        return None if job.allocation is None else (job.allocation, job.runs[-1].ready_s)

    def _next_failure(self, name: str) -> None:
        for fails_s, back_s in itertools.islice(self._failures[name], 1):
            self._events.push(fails_s, "fail", name)
            self._events.push(back_s, "repair", name)

    # What jobs do.

    def _train(self, now_s: float) -> None:
        """Bring all progress up to date, let jobs report, and let jobs with new measurements choose their batch sizes."""
        training = []
        for job in self._learning.values():
            assert job.learner is not None, "they learn"
            job.settle(now_s, self._checkpoint_s)
            if now_s <= job.runs[-1].ready_s:
                continue
            training.append(job)
            seen = job.truth.seen(job.held.gpu_type, job.shape, job.batch)
            job.learner.saw(job.held.gpu_type, seen, job.truth.noise(job.batch, job.held.gpus, job.progress))
        for job in choose_batches(training):
            self._foresee(job)
        for job in training:
            run, rate = job.runs[-1], job.rate
            if not run.rates or run.rates[-1][1] != rate:
                run.rates.append((now_s if run.rates else run.ready_s, rate))

    def _foresee(self, job: SimulatedJob) -> None:
        """Note when it will end if nothing changes."""
        if job.progress >= job.work and job.end_event >= 0:
            return  # it is about to end
        done_s = job.done_s()
        ends = done_s < math.inf
        job.end_event = self._events.push(done_s + self._latencies.exit_s, "end", job.id) if ends else -1

    def _release(self, job: SimulatedJob, now_s: float) -> None:
        """Take its GPUs away."""
        shared = self._sharing is not None and job.id in self._sharing
        for share in job.held.shares:
            self._book.hold(share, -1)
        if not shared:
            self._book.take_all(job.held, -1, now_s)
        if self._sharing is not None:
            self._sharing.count_alone(job.id, now_s)
        for table in (self._held, self._learning, self._restarting, self._goodputs_s):
            table.pop(job.id, None)
        job.runs[-1].end_s = now_s
        job.allocation, job.end_event, job.view = None, -1, None
        job.leave_event, job.trains_until_s = -1, math.inf
        job.startable_s = now_s + self._latencies.pause_s
        if self._sharing is not None and shared:
            self._sharing.left(job, now_s)
        self._disturb(now_s)

    # What actions do to jobs.

    def _moves(self, action: Action) -> bool:
        """Whether an action moves a job from where it is. The action may be complete already."""
        held = self.jobs[action.job].allocation
        return isinstance(action, Hold) or held is None or not action.placement.suits(held)

    def _stop(self, job: SimulatedJob, now_s: float) -> None:
        """Let a job save a checkpoint and leave, unless it already does."""
        if job.leave_event >= 0:
            return
        if self._latencies.leave_s == 0:
            self._leave(job, now_s)
            return
        job.settle(now_s, self._checkpoint_s)
        leaves_s = now_s + self._latencies.leave_s
        job.trains_until_s = leaves_s - self._latencies.lost_s
        job.leave_event = self._events.push(leaves_s, "leave", job.id)
        self._foresee(job)

    def _leave(self, job: SimulatedJob, now_s: float) -> None:
        """Let a job leave, after it has saved a checkpoint."""
        job.settle(now_s, self._checkpoint_s)
        self._release(job, now_s)
        self._queue.add(job)
        job.saved = job.progress

    def _begin(self, action: Action, now_s: float, stays: set[JobId]) -> Outcome:
        job = self.jobs[action.job]
        if job.finish_s is not None:
            return Outcome(action, Progress.DONE, "it has ended")
        if job.leave_event >= 0:
            return Outcome(action, Progress.UNDER_WAY, "saves and leaves its GPUs")
        if action.job in stays or isinstance(action, Hold):
            return Outcome(action, Progress.DONE)
        if now_s < job.startable_s:
            return Outcome(action, Progress.UNDER_WAY, "pauses before it can start again")
        where = action.placement
        run = None if self._cloud is None else self._cloud.run_at(where)
        for share in where.shares if run is not None else ():
            self._book.add_instance(share.node, share.gpus)
        closed = [share.node for share in where.shares if not self._book.may_start(share.node)]
        if closed:
            return Outcome(action, Progress.FAILED, f"node {closed[0]} takes no new work")
        if any(self._book.free[share.node] < self._needs(job.id, share) for share in where.shares):
            return Outcome(action, Progress.UNDER_WAY, "waits for GPUs that another job still holds")
        self._start(job, where, now_s)
        return Outcome(action, Progress.DONE)

    def _needs(self, job_id: JobId, share: Share) -> int:
        """GPUs that must be free for a job to start."""
        return share.gpus if self._sharing is None else self._sharing.needs(job_id, share)

    def _start(self, job: SimulatedJob, where: Placement, now_s: float) -> None:
        last = job.runs[-1] if job.runs else None
        shape = tuple(share.gpus for share in where.shares)
        free = (
            self._moves_are_free
            and last is not None
            and last.end_s == now_s
            and (last.placement.gpu_type, job.shape) == (where.gpu_type, shape)
        )
        for share in where.shares:
            self._book.hold(share, 1)
        self._queue.remove(job)
        self._held[job.id] = job
        (self._restarting if job.learner is None else self._learning)[job.id] = job
        if free and last is not None:
            ready_s = max(last.ready_s, now_s)
        else:
            ready_s = now_s + job.truth.restart_s
            if self._cloud is not None and (run := self._cloud.run_at(where)) is not None:
                ready_s = max(ready_s, self._cloud.works_s(run))
            if job.starts == 0:
                types = len({node.gpu_type for node in self._book.nodes.values()})
                ready_s += self._disturbances.profiling_s(where.gpus, types)
            job.starts += 1
        job.most_gpus = max(job.most_gpus, where.gpus)
        job.allocation, job.shape, job.settled_s, job.view = where, shape, now_s, None
        job.speed = self._speed(job)
        job.runs.append(SimulatedRun(now_s, now_s, where, ready_s, job.progress))
        self._book.take_all(where, 1, now_s)
        if self._sharing is not None:
            self._sharing.started(job, now_s)
        choose_batches([job])
        self._foresee(job)
        self._disturb(now_s)

    # What disturbs jobs.

    def _speed(self, job: SimulatedJob) -> float:
        speed = self._share_speed(job) / self._disturbances.straggler(job.id, job.starts)
        if self._sharing is not None:
            speed *= self._sharing.agents.factor(job.id)
        return speed * (1 - self._disturbances.interference) if self._interfered(job) else speed

    def _share_speed(self, job: SimulatedJob) -> float:
        """Speed with its CPUs and memory, relative to the proportional share, for which its truth holds."""
        if job.sensitivity is None or job.allocation is None or len(job.allocation.shares) > 1:
            return 1.0
        share = job.allocation.shares[0]
        table = job.sensitivity.at(share.gpus)
        if table is None or not share.cpus:
            return 1.0
        if share.node not in self._book.nodes:
            return 1.0  # on an instance, of which it has all
        node = replace(self._book.nodes[share.node], cpus_others=0, memory_others_mb=0, may_start=True)
        return relative_speed(table, share.gpus, NodeCapacity.of(node), Amount(share.cpus, share.memory_mb))

    def _interfered(self, job: SimulatedJob) -> bool:
        """Whether it and another job of several nodes share a node."""
        if not self._disturbances.interference or len(job.shape) < 2 or job.allocation is None:
            return False
        mine = set(job.allocation.nodes)
        return any(
            other is not job
            and other.allocation is not None
            and len(other.shape) > 1
            and mine & set(other.allocation.nodes)
            for other in self._held.values()
        )

    def _disturb(self, now_s: float) -> None:
        """Change the speed of jobs that have gained or lost a neighbour."""
        if not self._disturbances.interference:
            return
        for job in self._held.values():
            self._change_speed(job, now_s)

    def _change_speed(self, job: SimulatedJob, now_s: float) -> None:
        """Let a job continue at its present speed."""
        if (speed := self._speed(job)) == job.speed:
            return
        job.settle(now_s, self._checkpoint_s)
        job.speed = speed
        if job.id in self._goodputs_s:
            self._goodputs_s[job.id] = job.rate / job.work
        self._foresee(job)

    # What the scheduler sees of jobs.

    def _view(self, job: SimulatedJob, now_s: float) -> Job:
        phase = Phase.QUEUED
        if job.allocation is not None:
            launch_s, run = self._latencies.launch_s, job.runs[-1]
            started_s = run.ready_s if launch_s is None else run.start_s + launch_s
            phase = Phase.STARTING if now_s < started_s else Phase.RUNNING
            if job.leave_event >= 0:
                phase = Phase.STOPPING
        if job.view is None or job.view.phase is not phase:
            job.view = Job(
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
                stopped_s=job.runs[-1].end_s if phase is Phase.QUEUED and job.runs else None,
                time_limit_s=job.time_limit_s,
            )
        return job.view

    def close(self) -> None:
        """Bring all jobs up to date, so that their figures are right even if not all have ended."""
        now_s = self._clock.now_s()
        self._live_until(now_s)
        self._book.count(now_s)
        for job in self._held.values():
            job.settle(now_s, self._checkpoint_s)
            job.runs[-1].end_s = now_s


def nodes_from_spec(spec: str) -> tuple[Node, ...]:
    """Nodes from a spec such as `t4:6x4,rtx:3x8:48c:256g`. A part that names no CPUs has 64. Raises SpecError, which
    names the invalid part."""
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


class SimulatedSettings(BaseModel):
    """Section `[simulated]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: str = Field(default=DEFAULT_SPEC, description="Nodes as TYPE:NODESxGPUS,... such as t4:6x4,a100:2x8.")


def open_cluster(settings: Settings, clock: Clock, check: SpecCheck, leadership: Leadership) -> ClusterParts:
    """An empty simulated cluster."""
    del check, leadership  # users submit no job specs to a simulated cluster
    nodes = nodes_from_spec(settings.section(SimulatedSettings).nodes)
    return ClusterParts(SimulatedCluster(nodes, (), clock))
