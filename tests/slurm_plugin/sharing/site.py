"""A site in place of Slurm for tests of the daemon's side of shared GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from penstock_scheduler.api.agent_messages import (
    CarriedGroup,
    CarriedJob,
    Contained,
    NodeOrder,
    NodeStatus,
    NumberedPack,
    XidSeen,
    order_file,
    status_file,
)
from penstock_scheduler.model import Job, JobSpec, JobUse, Pack, PackSeen, Phase, Placement, Share, SharedGpus, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_slurm.gateway import SlurmJob, SlurmNode
from penstock_slurm.share.agents import SlurmAgents
from penstock_slurm.share.gpu_reservation import NAME, GpuReservations
from tests.scheduler.builders import job, on
from tests.slurm_plugin.test_cluster import pending


def start(job_id: str, gpus: int = 1) -> Start:
    """A start of a job on node n0."""
    return Start(job_id, 1, Placement("t4", "gpu", (Share("n0", gpus),)))


class Commands:
    """The commands of Slurm that the GPU reservation uses: it records the requests, and answers from a table."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.indexes: dict[str, tuple[int, ...]] = {}
        self.error: Exception | None = None

    def gpu_indexes(self, job_id: str, node: str) -> tuple[int, ...]:
        del node
        self.asked.append(("gpu_indexes", job_id))
        if self.error is not None:
            raise self.error
        return self.indexes.get(job_id, ())

    def submit_placeholder(self, name: str, node: str, partition: str, note: str, after: int | None) -> str:
        self.asked.append(("submit_placeholder", node, after))
        return str(900 + len(self.asked))

    def cancel(self, job_id: str) -> None:
        self.asked.append(("cancel", job_id))

    def set_comment(self, job_id: str, note: str) -> None:
        self.asked.append(("set_comment", job_id))

    def no_time_limit(self, job_id: str) -> None:
        self.asked.append(("no_time_limit", job_id))


class Site:
    """One node, `n0`, with four GPUs, and managed jobs on it."""

    def __init__(self, spool: Path) -> None:
        self.spool, self.commands, self.clock = spool, Commands(), SimulatedClock()
        self.begin()

    def begin(self) -> None:
        """A daemon that has just started."""
        self.agents = SlurmAgents(GpuReservations(self.commands), self.spool, self.clock)  # type: ignore[arg-type]

    def told(
        self,
        *jobs: CarriedJob,
        order: int = 0,
        history: str = "h",
        news: int = 0,
        links: tuple[tuple[int, ...], ...] = (),
        groups: Sequence[tuple[SharedGpus, Sequence[Pack]]] = (),
    ) -> None:
        """Write the agent's status, with this many packs, containments and GPU errors. It keeps the last three.

        Args:
            groups: each with its packs that run now.
        """
        numbers = range(max(news - 2, 1), news + 1)
        status = NodeStatus(
            node="n0",
            order=order,
            time_s=self.clock.now_s(),
            history=history,
            groups=tuple(CarriedGroup(shared=shared, running=tuple(running)) for shared, running in groups),
            jobs=jobs,
            packs=tuple(NumberedPack(number=number, seen=PackSeen(("7", "8"), "t4", (0.8, 0.7))) for number in numbers),
            contained=tuple(
                Contained(number=number, job="7", time_s=1.0, cause="died", text=f"{number}", killed=False)
                for number in numbers
            ),
            xids=tuple(XidSeen(number=number, time_s=1.0, device=0, xid=79) for number in numbers),
            links=links,
        )
        path = status_file(self.spool, "n0")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(status.model_dump_json())

    def observe(self, *found: tuple[Job, SlurmJob], others: tuple[SlurmJob, ...] = (), used: int = 0) -> None:
        """Observe managed jobs, with cleared GRES if they have no GPUs, and other jobs: placeholder jobs and departing jobs."""
        node = SlurmNode("n0", {"t4": 4}, {"t4": used}, frozenset({"IDLE"}), ("gpu",), 16, 0, 64_000, 0)
        self.agents.reservations.saw([*(each for _, each in found), *others])
        cleared = {each.id for each, slurm_job in found if slurm_job.gpus_per_node is None}
        jobs, slurm_jobs = {each.id: each for each, _ in found}, {each.id: each for _, each in found}
        self.agents.saw([node], jobs, slurm_jobs, cleared, ["gpu"], {"n0": "t4"})

    def order(self) -> NodeOrder:
        return NodeOrder.model_validate_json(order_file(self.spool, "n0").read_bytes())


def runs(number: str, gpus: int | None = 1, **fields: object) -> tuple[Job, SlurmJob]:
    """A job that runs on `n0`. None: without GPUs from Slurm."""
    here = {"id": number, "number": int(number), "state": "RUNNING", "nodes": ("n0",), "gpus_per_node": gpus}
    return job(number, phase=Phase.RUNNING, allocation=on("t4", n0=gpus or 1)), pending("gpu", **here | fields)


def placeholder(number: str, node: str = "n0") -> SlurmJob:
    fields = {"id": number, "number": int(number), "name": NAME, "uid": os.geteuid(), "comment": json.dumps({})}
    return pending("gpu", **fields | {"state": "RUNNING", "nodes": (node,)})


def carried(number: str, *devices: int, state: str = "running", kind: str = "k") -> CarriedJob:
    return CarriedJob(job=number, state=state, devices=devices, use=JobUse(kind))  # type: ignore[arg-type]


def group(*jobs: str) -> SharedGpus:
    return SharedGpus("n0", 1, tuple(Pack((each,)) for each in jobs))


def bound(number: str, gpus: int | None = None, *, leaves: bool = False, **spec: object) -> tuple[Job, SlurmJob]:
    """A running job, such as a departing one."""
    found, slurm_job = runs(number, gpus)
    phase = Phase.STOPPING if leaves else Phase.RUNNING
    return dataclasses.replace(found, phase=phase, spec=JobSpec.model_validate({"max_gpus": 1} | spec)), slurm_job


def taken(site: Site) -> tuple[int, list[int], list[tuple[str, int]]]:
    """Packs, containments and errors that an observation reports."""
    site.observe()
    packs = len(site.agents.sharing().seen)
    contained = [each.number for each in site.agents.take_contained()]
    return packs, contained, [(node, each.number) for node, each in site.agents.take_xids()]
