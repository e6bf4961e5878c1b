"""The nodes of the simulated cluster: which take new work, and what jobs hold there.

Jobs that arrive, and jobs that wait: all of them, or the front of the queue.

A policy that keeps all running jobs and starts others strictly in the order of submission decides by the free GPUs and
by the first waiting job alone. For such a policy the cluster can show just that: the GPUs of running jobs as held by
others, and the first few waiting jobs. The decisions are the same, and the cost of an observation does not depend on
how many jobs wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock_scheduler.model import JobId, Node, Placement, Share
from penstock_scheduler.simulator.jobs import SimulatedJob


class NodeBook:
    """GPUs, CPUs and memory that jobs hold.

    Args:
        nodes: all nodes.
        now_s: when counting begins.
    """

    def __init__(self, nodes: Sequence[Node], now_s: float) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._cloud: set[str] = set()
        """Nodes that are instances. Jobs on them hold nothing on site."""
        self.free = {node.name: node.gpus_for_us for node in nodes}
        self.total_gpus = sum(self.free.values())
        self.gpus_held = self.cpus_held = self.memory_held_mb = 0
        self.gpu_seconds = 0.0
        """GPU-seconds that jobs held until the last `count`. GPUs that jobs share count once."""
        self._counted_s = now_s
        self._taken = dict.fromkeys(self.nodes, 0)
        """GPUs that jobs hold, by node."""
        self._shown = dict(self.nodes)
        """Nodes with the GPUs of jobs counted as held by others."""
        self._as_shown: dict[tuple[str, bool, int], Node] = {}
        """(name, whether it takes new work, GPUs that jobs hold) -> the node as it is shown then."""
        self._changed: set[str] = set()
        """Nodes that have changed since they were shown."""

    @property
    def whole(self) -> bool:
        """Whether every node takes new work."""
        return all(node.may_start for node in self.nodes.values())

    def may_start(self, name: str) -> bool:
        """Whether there is such a node and it takes new work."""
        return name in self._cloud or (name in self.nodes and self.nodes[name].may_start)

    def add_instance(self, name: str, gpus: int) -> None:
        """Count an instance as a node from now on."""
        self._cloud.add(name)
        self.free[name] = gpus
        self._taken.setdefault(name, 0)

    def set_may_start(self, name: str, may_start: bool) -> None:
        """A node fails or is repaired."""
        self.nodes[name] = replace(self.nodes[name], may_start=may_start, state="IDLE" if may_start else "DOWN")
        self._changed.add(name)

    def take(self, node: str, gpus: int, now_s: float) -> None:
        """Count GPUs of a node as held from now on; negative: as free."""
        self.count(now_s)
        self.free[node] -= gpus
        self._taken[node] += gpus
        if node in self._cloud:
            return
        self.gpus_held += gpus
        self._changed.add(node)

    def take_all(self, placement: Placement, sign: int, now_s: float) -> None:
        """Count all GPUs of a placement as held from now on, or with -1 as free."""
        for share in placement.shares:
            self.take(share.node, sign * share.gpus, now_s)

    def hold(self, share: Share, sign: int) -> None:
        """Count CPUs and memory as held from now on, or with -1 as free."""
        self.cpus_held += sign * share.cpus
        self.memory_held_mb += sign * share.memory_mb

    def count(self, now_s: float) -> None:
        """Bring `gpu_seconds` to `now_s`."""
        self.gpu_seconds += self.gpus_held * (now_s - self._counted_s)
        self._counted_s = now_s

    def shown(self) -> tuple[Node, ...]:
        """The nodes, with the GPUs that jobs hold counted as held by others."""
        for name in self._changed:
            node = self.nodes[name]
            key = (name, node.may_start, self._taken[name])
            if key not in self._as_shown:
                self._as_shown[key] = replace(node, gpus_others=node.gpus_others + self._taken[name])
            self._shown[name] = self._as_shown[key]
        self._changed.clear()
        return tuple(self._shown.values())


class Arrivals:
    """Jobs in the order in which they arrive."""

    def __init__(self, jobs: Iterable[SimulatedJob]) -> None:
        self._jobs = sorted(jobs, key=lambda job: job.submit_s)
        self._times_s = [job.submit_s for job in self._jobs]
        self._arrived = 0

    @property
    def over(self) -> bool:
        """Whether all jobs have arrived."""
        return self._arrived == len(self._jobs)

    @property
    def next_s(self) -> float:
        """When the next job arrives; infinite: no more jobs will."""
        return math.inf if self.over else self._times_s[self._arrived]

    def until(self, now_s: float) -> list[SimulatedJob]:
        """Jobs that arrive at or before `now_s` and have not been returned yet."""
        arrived = bisect_right(self._times_s, now_s)
        jobs = self._jobs[self._arrived : arrived]
        self._arrived = arrived
        return jobs


class SimulatedQueue:
    """Waiting jobs in the order of their submission.

    Args:
        front: number of waiting jobs that are shown where only the front is; 0: all are shown.
    """

    def __init__(self, front: int) -> None:
        self.front = front
        self.passed_over = 0
        """Number of jobs of the front that fit on no node now. As many more are shown."""
        self.observe_again = False
        """Whether the front has changed so that the policy must see it again at once."""
        self._waiting: list[tuple[float, JobId]] = []
        self._unstarted = 0
        """Jobs of the front that was shown last which have not started."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> JobId:
        """The job that waits at the front."""
        return self._waiting[0][1]

    def add(self, job: SimulatedJob) -> None:
        """Add a job that waits from now on."""
        insort(self._waiting, (job.submit_s, job.id))

    def remove(self, job: SimulatedJob) -> None:
        """Remove a job that starts."""
        del self._waiting[bisect_left(self._waiting, (job.submit_s, job.id))]
        self._unstarted -= 1

    def pass_over(self, jobs: int) -> None:
        """Note that this many jobs of the front fit on no node."""
        self.observe_again |= jobs > self.passed_over
        self.passed_over = jobs

    def show(self) -> list[JobId]:
        """The jobs of the front."""
        front = [job for _, job in self._waiting[: self.front + self.passed_over]]
        self._unstarted = len(front)
        return front

    def acted(self) -> None:
        """Note that actions were carried out. If all jobs of the front that fit have started, the policy must see the
        next ones."""
        if self.front and self._unstarted <= self.passed_over < len(self._waiting):
            self.observe_again = True

    @property
    def full(self) -> bool:
        """Whether the front has so many jobs that a job which arrives now would not be shown."""
        return len(self._waiting) >= self.front + self.passed_over
