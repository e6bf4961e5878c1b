"""The cluster's side of the cloud: its cloud nodes, and what Slurm asks. Only the round loop's thread is here.

It changes no run, since the cloud's thread may be in the middle of one; it notes what that thread should know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from penstock_scheduler.api.ports import CloudNode, CloudNodes
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.burst.manager.share import NodeRequest, SharedFolder
from penstock_scheduler.model import Job, JobId, Phase

log = logging.getLogger(__name__)

UNASKED = "it requests cloud nodes itself; submit it to the site's partitions with --burst, and Penstock sends it to the cloud"
"""Message to the user of a job that was submitted to cloud nodes directly: Penstock has ordered no instance for it."""


class ClusterSide:
    """See the module. `meet` is called once a tick.

    Args:
        nodes: the cluster's part.
        share: the folder with Slurm's requests.
        runs_of: returns all runs of a job of this id, oldest first.
    """

    def __init__(self, nodes: CloudNodes, share: SharedFolder, runs_of: Callable[[JobId], Sequence[BurstRun]]) -> None:
        self._nodes, self._share, self._runs_of = nodes, share, runs_of
        self.nodes: dict[str, CloudNode] = {}
        """The cloud nodes, as of the newest tick."""
        self._unknown: frozenset[JobId] = frozenset()
        self._suspended: set[str] = set()
        self._to_power_down: dict[str, tuple[str, ...]] = {}
        self._powered_down: set[str] = set()
        self._last_used: dict[str, int] = {}
        """Node -> when it was let go, as a number that counts up."""

    @property
    def partition(self) -> str:
        """Name of the partition of these nodes."""
        return self._nodes.partition

    def cluster(self) -> str:
        """Which cluster this is. Raises ClusterAway."""
        return self._nodes.cluster()

    def reason(self, job: JobId) -> str:
        """The cluster's own reason why a job has not started; empty: there is none."""
        return self._nodes.reason(job)

    def meet(self, runs: Collection[BurstRun], jobs: Mapping[JobId, Job], unknown: Collection[JobId] = ()) -> None:
        """Tell the cluster what has changed, handle what Slurm asks, and look at the nodes. Raises ClusterAway.

        A request may be late, and meant for an earlier run of a node of that name. So it changes nothing where Slurm itself
        says otherwise: a suspend, while the run's job holds its nodes or Slurm has never used them for it; a resume, while
        its job holds others.

        Args:
            runs: the open runs.
            jobs: the jobs.
            unknown: jobs whose nodes are not known, because the record of their run cannot be read. They are left alone.
        """
        self._unknown = frozenset(unknown)
        self._share.say_alive()
        for id_, names in tuple(self._to_power_down.items()):
            self._nodes.power_down(names)
            self._powered_down.add(id_)
            del self._to_power_down[id_]
        known = {name: run for run in runs for name in run.nodes}
        for request in self._share.requests():
            if request.resume:
                wait = {self._nodes.job_of(number): names for number, names in request.jobs.items()} or self._on(
                    request
                )
                held = {job: _held(jobs.get(job)) for job in wait}
                wait = {job: names for job, names in wait.items() if not held[job] or held[job] & {*names}}
                self._send_back(wait, request.nodes, known, jobs)
            else:
                for run in (known[name] for name in request.nodes if name in known):
                    if (
                        run.state in ("booting", "running")
                        and run.asked
                        and not _held(jobs.get(run.job)) & {*run.nodes}
                    ):
                        self._suspended.add(run.id)
        self._refuse_strangers(known, jobs)
        self.look()
        self._refuse_late({run.job for run in runs} | self._unknown, jobs)

    def _on(self, request: NodeRequest) -> dict[JobId, Sequence[str]]:
        """The jobs that Slurm shows on a request's nodes."""
        there = self._nodes.jobs_on_instances().items()
        return {job: names for job, names in there if not {*names}.isdisjoint(request.nodes)}

    def look(self) -> None:
        """Look at the nodes, and change nothing."""
        self.nodes = {node.name: node for node in self._nodes.nodes()}

    def has(self, job: JobId | None, node: str | None) -> bool:
        """Whether this job of the cluster is on this cloud node."""
        return node in self._nodes.jobs_on_instances().get(job or "", ())

    def suspended(self, run: BurstRun) -> bool:
        """Whether Slurm does not need the run's nodes any more."""
        return run.id in self._suspended

    def power_down(self, run: BurstRun) -> bool:
        """Let the next tick tell the cluster that the run's instances are gone. Returns whether it has been told before."""
        self._to_power_down[run.id] = run.nodes
        return run.id in self._powered_down

    def forget(self, run: BurstRun) -> None:
        """The run is over: its nodes may be another's."""
        self._last_used |= dict.fromkeys(run.nodes, 1 + max(self._last_used.values(), default=0))
        self._suspended.discard(run.id)
        self._powered_down.discard(run.id)
        self._to_power_down.pop(run.id, None)

    def by_use(self, names: Iterable[str]) -> list[str]:
        """These nodes, the one that was used least recently first: what Slurm still asks of an earlier run passes by then."""
        return sorted(names, key=lambda name: (self._last_used.get(name, 0), name))

    def _send_back(
        self,
        wait: Mapping[JobId, Sequence[str]],
        nodes: Sequence[str],
        known: Mapping[str, BurstRun],
        jobs: Mapping[JobId, Job],
    ) -> None:
        """Refuse jobs that `wait` for nodes that were not ordered for them."""
        left_alone = {name for job, names in wait.items() if job in self._unknown for name in names}
        strangers = [
            job
            for job, names in wait.items()
            if job not in self._unknown and any(name not in known or known[name].job != job for name in names)
        ]
        unasked = [name for name in nodes if name not in known and name not in left_alone]
        if strangers or unasked:
            facts = {"nodes": ",".join(nodes), "jobs": ",".join(strangers)}
            log.warning("jobs on cloud nodes that were not ordered for them", extra=facts)
        for job in strangers:
            self._nodes.refuse(job, self._why(jobs.get(job), wait[job]))
        self._nodes.power_down(unasked)

    def _refuse_strangers(self, known: Mapping[str, BurstRun], jobs: Mapping[JobId, Job]) -> None:
        """Refuse jobs on another job's instances. Slurm does not request a node that is up already."""
        for job, names in self._nodes.jobs_on_instances().items():
            if any(name in known and known[name].job != job for name in names):
                self._nodes.refuse(job, self._why(jobs.get(job), names))

    def _refuse_late(self, away: Collection[JobId], jobs: Mapping[JobId, Job]) -> None:
        """Refuse jobs that run on cloud nodes after their run has ended. No request tells of a gateway, which is always up.

        Args:
            away: jobs whose run is open, or not known.
            jobs: the jobs.
        """
        for job in jobs.values():
            at = _held(job)
            late = job.phase is Phase.RUNNING and at and at <= self.nodes.keys() and job.id not in away
            if late and (why := self._why(job, sorted(at))) != UNASKED:
                self._nodes.refuse(job.id, why)

    def _why(self, job: Job | None, nodes: Sequence[str]) -> str:
        """Why a job may not have these nodes, for its user."""
        runs = [] if job is None else [run for run in self._runs_of(job.id) if run.ordered_s >= job.submit_s]
        if not runs:
            return UNASKED
        last, at = runs[-1], ", ".join(nodes)
        if last.state in ("ordered", "booting", "running"):
            return f"Slurm started it on {at}, but its instances are {', '.join(last.nodes)}; it is queued again"
        because = f" ({last.why})" if last.why else ""
        return f"Slurm started it on {at} after its run in the cloud had ended{because}; it is queued again"


def _held(job: Job | None) -> set[str]:
    """The nodes that a job holds."""
    return set() if job is None or job.allocation is None else {share.node for share in job.allocation.shares}
