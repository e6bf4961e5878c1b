"""Cloud nodes: which of them a cloud may fill with an instance, and how Slurm learns that an instance is gone.

Nodes with State=CLOUD are the instances themselves. Other nodes are *gateways*: nodes on site that stand for an instance without
a network connection to the site. A job's cloud runner runs on the gateway, and the gateway stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

from penstock_scheduler.api.ports import CloudNode
from penstock_scheduler.model import JobId, Stop, StopCode
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import CliGateway, JobGone, Refused, SlurmError, SlurmJob, SlurmNode, Write
from penstock_slurm.jobs.holds import mark
from penstock_slurm.jobs.notes import with_message
from penstock_slurm.jobs.states import HOLDING

log = logging.getLogger(__name__)

DOWN = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN"})

NOT_UP = DOWN | {"POWERING_UP", "POWER_UP", "NOT_RESPONDING", "DOWN", "UNKNOWN", "FUTURE"}
"""States of a node whose slurmd has not joined, or does not answer."""

BUSY = frozenset(
    {"ALLOCATED", "MIXED", "COMPLETING", "POWERING_UP", "POWERING_DOWN", "POWER_UP", "POWER_DOWN", "DRAIN", "MAINT"}
)
"""States in which Slurm or an admin needs a node that is powered down for something else."""


class SlurmCloudNodes:
    """The nodes of one partition, as of the last observation; see `ports.CloudNodes`."""

    def __init__(self, partition: str, gateway: CliGateway, spool: Spool) -> None:
        self._partition = partition
        self._gateway = gateway
        self._spool = spool
        self._nodes: dict[str, SlurmNode] = {}
        self._jobs: dict[JobId, SlurmJob] = {}
        self._stopped: dict[JobId, Stop] = {}
        self._cluster = ""

    @property
    def partition(self) -> str:
        """Name of the partition of these nodes."""
        return self._partition

    def cluster(self) -> str:
        """See `CloudNodes`. Slurm is asked once."""
        if not self._cluster:
            try:
                self._cluster = self._gateway.controller()
            except SlurmError as error:
                raise ClusterAway(str(error)) from error
        return self._cluster

    def saw(self, nodes: Iterable[SlurmNode], jobs: Iterable[SlurmJob]) -> None:
        """Take over an observation: the cluster's cloud nodes, and all jobs."""
        self._nodes = {node.name: node for node in nodes}
        self._jobs = {job.id: job for job in jobs}

    def nodes(self) -> tuple[CloudNode, ...]:
        """See `ports.CloudNodes`."""
        begins = {name for job in self._jobs.values() if job.state == "CONFIGURING" for name in job.nodes}
        return tuple(
            CloudNode(
                name=node.name,
                gpu_type="+".join(sorted(name or "gpu" for name in node.gpus)),
                gpus=sum(node.gpus.values()),
                cpus=node.cpus,
                memory_mb=node.memory_mb,
                free=_free(node),
                up=not node.state & NOT_UP and node.name not in begins,
            )
            for node in self._nodes.values()
        )

    def reason(self, job: JobId) -> str:
        """See `ports.CloudNodes`."""
        known = self._jobs.get(job)
        return "" if known is None else known.reason

    def jobs_on_instances(self) -> dict[JobId, tuple[str, ...]]:
        """See `ports.CloudNodes`."""
        clouds = {name for name, node in self._nodes.items() if "CLOUD" in node.state}
        found = {
            job.id: tuple(sorted(clouds.intersection(job.nodes))) for job in self._jobs.values() if job.state in HOLDING
        }
        return {job: names for job, names in found.items() if names}

    def job_of(self, number: str) -> JobId:
        """See `ports.CloudNodes`. Elements of an array have numbers of their own."""
        return next((job.id for job in self._jobs.values() if str(job.number) == number), number)

    def power_down(self, nodes: Sequence[str]) -> None:
        """See `ports.CloudNodes`. Gateways, and nodes that are powered down or powering down, are left alone.

        Slurm requeues a job that it is booting them for, and would start it there again; it is held first.
        """
        known = [self._nodes[name] for name in nodes if name in self._nodes]
        up = [node.name for node in known if "CLOUD" in node.state and not node.state & DOWN]
        if not up:
            return
        log.info("power down nodes", extra={"nodes": ",".join(up)})
        try:
            for job in self._jobs.values():
                if job.state == "CONFIGURING" and job.priority and not set(up).isdisjoint(job.nodes):
                    self._hold(job)
            self._gateway.power_down(up)
        except Refused as refused:  # a repeated request changes nothing; Slurm suspends them itself after SuspendTime
            log.warning("Slurm does not power nodes down", extra={"nodes": ",".join(up), "text": str(refused)})
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def refuse(self, job: JobId, text: str) -> None:
        """See `ports.CloudNodes`. A job that cannot be requeued (srun, --no-requeue) is cancelled.

        A job whose nodes boot is held, and requeued by Slurm when they are powered down: Slurm 22.05.8 would start it without
        GPUs if it were requeued there (docs/developer/slurm-gateway.md).
        """
        known = self._jobs.get(job)
        boots = known if known is not None and known.requeue and self._boots(known) else None
        if boots is not None and boots.priority == 0:
            return  # it is held, and waits until its nodes are powered down
        log.warning("job sent back to the queue", extra={"job": job, "text": text})
        try:
            if boots is not None:
                self._hold(boots)
            else:
                if known is not None:
                    mark(self._spool, known, known.restarts + 1)
                self._gateway.requeue_hold(job)
                self._gateway.hold(job)
            self._stopped[job] = Stop(StopCode.RECALL, text)
            self._say(job, text)
        except JobGone:
            return
        except Refused as refused:
            self._cancel(job, text, refused)
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def take_stops(self) -> dict[JobId, Stop]:
        """The jobs that were sent back since the last call, and why."""
        taken, self._stopped = self._stopped, {}
        return taken

    def _boots(self, job: SlurmJob) -> bool:
        """Whether Slurm boots cloud nodes for a job."""
        its = (self._nodes[name] for name in job.nodes if name in self._nodes)
        return job.state == "CONFIGURING" and any("CLOUD" in node.state and node.state & NOT_UP for node in its)

    def _hold(self, job: SlurmJob) -> None:
        """Let a job that Slurm boots nodes for be held when Slurm requeues it.

        A refusal is logged: the job has ended, and else the next tick holds it.
        """
        mark(self._spool, job, job.restarts + 1, holding=job.restarts)
        kinds: tuple[Literal["split", "hold"], ...] = ("hold",) if job.requeue else ("split", "hold")
        for kind in kinds:
            (error,) = self._gateway.write([Write(job.id, kind)])
            if isinstance(error, JobGone | Refused):
                log.warning("cannot hold a job", extra={"job": job.id, "text": str(error)})
            elif error is not None:
                raise error

    def _cancel(self, job: JobId, text: str, refused: Refused) -> None:
        log.warning("job cannot be requeued and is cancelled", extra={"job": job, "text": str(refused)})
        try:
            self._say(job, f"cancelled: {text}")  # before it ends: Slurm takes no comment on a job that has
            self._gateway.cancel(job)
            why = f"{text}; Slurm cannot requeue it, so it was cancelled"
            self._stopped[job] = Stop(StopCode.RECALL, why)
        except JobGone:
            return
        except Refused as error:
            log.warning("job cannot be cancelled", extra={"job": job, "text": str(error)})
        except SlurmError as error:
            raise ClusterAway(str(error)) from error

    def _say(self, job: JobId, text: str) -> None:
        known = self._jobs.get(job)
        comment = None if known is None else with_message(known, text)
        if comment is None:
            return
        try:
            self._gateway.set_admin_comment(job, comment)
        except Refused as error:
            log.warning("no message to the job's user", extra={"job": job, "text": str(error)})


def _free(node: SlurmNode) -> bool:
    if "CLOUD" in node.state:
        return "POWERED_DOWN" in node.state and not node.state & BUSY
    return "IDLE" in node.state and not node.state & (BUSY | NOT_UP)
