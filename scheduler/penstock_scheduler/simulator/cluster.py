"""A simulated cluster behind the `Cluster` port: jobs arrive, progress at their model's goodput, restart and end.

Time comes from the clock that it is given. Between two looks every running job progresses at the goodput of its
allocation; a job that is started or moved first spends `restart_s` of its own without progress. Stopping takes no time.
A later issue makes it event-driven with failures and measured tables; the port stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.wire import Report
from penstock_scheduler.model import (
    Action,
    ClusterState,
    Hold,
    Job,
    JobId,
    JobWish,
    Node,
    Outcome,
    Phase,
    Placement,
    Progress,
)
from penstock_scheduler.nodespec import parse_nodes
from penstock_scheduler.ports import Clock


@dataclass(slots=True)
class SimulatedJob:
    """A job and what has become of it."""

    id: JobId
    name: str
    wish: JobWish
    truth: AnyEstimator
    """How fast it really is."""
    work: float
    """Progress at which it is done, in the unit of `truth` times seconds."""
    submit_s: float
    restart_s: float = 30.0
    user: str = "user"
    progress: float = 0.0
    allocation: Placement | None = None
    pause_s: float = 0.0
    """What is left of the present restart."""
    starts: int = 0
    finish_s: float | None = None
    runs: list[tuple[float, float, Placement]] = field(default_factory=list)
    """(from, to, where), one for each time that it held GPUs; the last one grows."""


class SimulatedCluster:
    """The cluster; see the module. Its nodes' partitions are `all` and one for each GPU type."""

    def __init__(self, nodes: Sequence[Node], jobs: Iterable[SimulatedJob], clock: Clock) -> None:
        self._nodes = tuple(nodes)
        self._clock = clock
        self._seen_s = clock.now_s()
        self.jobs = {job.id: job for job in jobs}

    @property
    def finished(self) -> bool:
        """Whether every job has come and gone."""
        return all(job.finish_s is not None for job in self.jobs.values())

    def observe(self) -> ClusterState:
        """What is there now."""
        self._advance()
        now_s = self._clock.now_s()
        jobs = [self._view(job) for job in self.jobs.values() if job.finish_s is None and job.submit_s <= now_s]
        return ClusterState(self._nodes, tuple(jobs))

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """Every action is done at once, or fails because GPUs are taken."""
        self._advance()
        return tuple(self._apply(action) for action in actions)

    def reports(self) -> Sequence[Report]:
        """None: simulated jobs do not report yet."""
        return ()

    def _view(self, job: SimulatedJob) -> Job:
        return Job(
            id=job.id,
            name=job.name,
            user=job.user,
            wish=job.wish,
            partitions=("all",),
            phase=Phase.QUEUED if job.allocation is None else Phase.RUNNING,
            submit_s=job.submit_s,
            restarts=max(job.starts - 1, 0),
            allocation=job.allocation,
        )

    def _apply(self, action: Action) -> Outcome:
        job = self.jobs[action.job]
        if job.finish_s is not None:
            return Outcome(action, Progress.DONE, "it has ended")
        now_s = self._clock.now_s()
        if isinstance(action, Hold):
            job.allocation = None
            return Outcome(action, Progress.DONE)
        free = {node.name: node.gpus_for_us for node in self._nodes}
        for other in self.jobs.values():
            if other is not job and other.allocation is not None:
                for share in other.allocation.shares:
                    free[share.node] -= share.gpus
        if any(free.get(share.node, 0) < share.gpus for share in action.placement.shares):
            return Outcome(action, Progress.UNDER_WAY, "waits for GPUs that another job still holds")
        job.allocation = action.placement
        job.pause_s = job.restart_s
        job.starts += 1
        job.runs.append((now_s, now_s, action.placement))
        return Outcome(action, Progress.DONE)

    def _advance(self) -> None:
        now_s = self._clock.now_s()
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        for job in self.jobs.values():
            if job.allocation is None:
                continue
            shape = job.allocation.configuration
            rate = float(job.truth.goodput(shape.gpu_type, np.array([shape.nodes]), np.array([shape.gpus]))[0])
            paused_s = min(job.pause_s, passed_s)
            job.pause_s -= paused_s
            needed_s = (job.work - job.progress) / rate if rate > 0 else float("inf")
            worked_s = min(passed_s - paused_s, needed_s)
            job.progress += worked_s * rate
            begun_s, _, where = job.runs[-1]
            job.runs[-1] = (begun_s, now_s - passed_s + paused_s + worked_s, where)
            if worked_s == needed_s:
                job.progress = job.work
                job.finish_s = job.runs[-1][1]
                job.allocation = None


def nodes_from_spec(spec: str) -> tuple[Node, ...]:
    """Nodes with 64 CPUs each from a spec such as `t4:6x4,rtx:3x8`. Raises SpecError, quoting the bad part."""
    return tuple(
        Node(node.name, node.gpu_type, node.gpus, ("all", node.gpu_type), cpus=64, state="IDLE")
        for node in parse_nodes(spec)
    )
