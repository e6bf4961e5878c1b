"""Jobs that Slurm does not start where they are sent: each is sent to other nodes, and waits twice as long each time.

A plan cannot know all that Slurm knows, and a job that it sends in vain in every round keeps its GPUs from others for ever. But
Slurm may be able to start the job on some node: if these nodes lack something, the job tries the others one after the other.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock_scheduler.model import Job, JobId, Node, NodeChoice, Phase, Placement
from penstock_scheduler.people.units import clock
from penstock_scheduler.safety.back_off import back_off_s

MOST_S = 1800.0
"""Longest time between two attempts, s."""

AT_ONCE = 10
"""Most attempts without a wait in between."""

ELSEWHERE = 2
"""Attempts. For their time after its pause, a job is offered only nodes on which it has not been tried: a round has to decide,
and Slurm gets the time of one attempt to start it."""


@dataclass(frozen=True, slots=True)
class _Attempts:
    """Attempts in vain, one after the other."""

    count: int
    waits: int
    """Those after which the job waits, if it is not the first one."""
    last_s: float
    until_s: float
    """When the job may be sent again."""
    why: str
    placement: Placement
    """The newest attempt's."""
    nodes: frozenset[str]
    """Where they were, since the last time when no other nodes were left."""


class Unstarted:
    """What the daemon remembers of such jobs. After a restart it tries each of them again.

    Args:
        first_s: how long a job waits after the second attempt in vain, s; after the first it is sent again at once, since
            another place may do. It is also the least time between two attempts on the same nodes that count.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._jobs: dict[JobId, _Attempts] = {}
        self._others: set[JobId] = set()
        """Those with nodes that have not been tried, as last seen."""

    def refused(self, job_id: JobId, placement: Placement, why: str, now_s: float, *, nodes_lack: bool = False) -> None:
        """An attempt was in vain.

        Args:
            job_id: the job.
            placement: where it was sent.
            why: Slurm's reason, as a sentence.
            now_s: s since 1970.
            nodes_lack: whether Slurm says that these nodes lack something. Then the job need not wait for an attempt on others.
        """
        before = self._jobs.get(job_id)
        if before is not None and now_s - before.last_s < self._first_s and before.nodes.issuperset(placement.nodes):
            return
        count, waits, tried = (
            (1, 0, frozenset[str]()) if before is None else (before.count + 1, before.waits, before.nodes)
        )
        goes_on = nodes_lack and job_id in self._others and not tried.issuperset(placement.nodes) and count % AT_ONCE
        waits += 0 if goes_on else 1
        pause_s = 0.0 if goes_on or waits == 1 else back_off_s(min(self._first_s, MOST_S), waits - 1, MOST_S)
        nodes = frozenset(placement.nodes) | (tried if job_id in self._others else frozenset())
        self._jobs[job_id] = _Attempts(count, waits, now_s, now_s + pause_s, why, placement, nodes)

    def elsewhere(self, jobs: Mapping[JobId, Job], nodes: Sequence[Node], now_s: float) -> dict[JobId, Job]:
        """The jobs that are to start on other nodes than those of their attempts so far, with node choices without these.

        There have to be enough such nodes. If they have no room for the time of `ELSEWHERE` attempts after its pause, a job may
        start on any node again.
        """
        found: dict[JobId, Job] = {}
        self._others &= self._jobs.keys()
        for job_id, each in self._jobs.items():
            job = jobs.get(job_id)
            if job is None or job.phase is Phase.RUNNING:
                continue
            gpus = each.placement.shares[0].gpus
            others = [node for node in nodes if node.name not in each.nodes and _could_hold(node, job, gpus)]
            if len(others) < len(each.placement.nodes):
                self._others.discard(job_id)
                continue
            self._others.add(job_id)
            if now_s < each.until_s + ELSEWHERE * self._first_s:
                found[job_id] = replace(job, nodes=replace(job.nodes or NodeChoice(), tried=each.nodes))
        return found

    def paused(self, jobs: Mapping[JobId, Job], others: Container[JobId], now_s: float) -> dict[JobId, str]:
        """Jobs that are not sent now, and for what they wait, as a sentence without its subject.

        Args:
            jobs: all that a round may place or stop. Those that run begin anew.
            others: jobs that wait for something else. Nobody gets an attempt by holding and releasing a job.
            now_s: s since 1970.
        """
        waits = (Phase.QUEUED, Phase.STARTING)
        self._jobs = {
            job_id: attempts
            for job_id, attempts in self._jobs.items()
            if job_id in others or ((job := jobs.get(job_id)) is not None and job.phase in waits)
        }
        return {
            job_id: f"waits until {clock(each.until_s)} to be sent again, after {each.count} attempts in vain: {each.why}"
            for job_id, each in self._jobs.items()
            if now_s < each.until_s and job_id in jobs
        }


def _could_hold(node: Node, job: Job, gpus: int) -> bool:
    """Whether a node has this many GPUs for the job if no other job holds them."""
    return (
        node.may_start
        and node.gpus >= gpus
        and job.spec.allows_type(node.gpu_type)
        and not set(node.partitions).isdisjoint(job.partitions)
        and node.reservation in ("", job.reservation)
        and (job.nodes is None or job.nodes.admits(node))
    )
