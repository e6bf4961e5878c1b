"""How the daemon reads an agent's status, and its orders for a job that Slurm does not describe completely."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock_scheduler.api.agent_messages import CarriedJob, NodeOrder, NodeStatus, OrderedJob, State
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.model import JobId, JobUse
from penstock_slurm.gateway import SlurmNode
from penstock_slurm.share.agents import SlurmAgents
from penstock_slurm.share.gpu_reservation import GpuReservations
from penstock_slurm.share.node_sharing import NodeScene, ordered_jobs

JOB = JobId("7")


@pytest.fixture
def agents(tmp_path: Path) -> SlurmAgents:
    return SlurmAgents(cast(GpuReservations, None), tmp_path, WallClock())


@pytest.mark.parametrize(
    ("state", "devices", "ready"), [("waiting", (), True), ("waiting", (0,), False), ("running", (0,), False)]
)
def test_a_job_starts_when_the_agent_waits_for_this_run_of_it(
    agents: SlurmAgents, state: State, devices: tuple[int, ...], ready: bool
):
    carried = CarriedJob(job=JOB, state=state, devices=devices, use=JobUse("k"))
    status = NodeStatus(node="n", order=1, time_s=time.time(), history="h", jobs=(carried,))
    agents._statuses, agents._stands = {"n": status}, {"n": True}
    assert (agents.keeps_back(JOB, "n") == "") == ready


def test_a_job_whose_gpus_slurm_does_not_tell_for_a_moment_stays_in_the_order():
    mine = OrderedJob(job=JOB, slurm_job=7, uid=1, gpus=1, running=True, own_devices=(2,))
    order = NodeOrder(node="n", number=1, written_s=0, jobs=(mine,))

    def ordered(number: int) -> tuple[OrderedJob, ...]:
        unknown: Any = SimpleNamespace(cleared=False, devices=None, slurm=SimpleNamespace(number=number))
        here = {JOB: unknown}
        return ordered_jobs(NodeScene(cast(SlurmNode, None), (), here, here, order=order))

    assert ordered(7) == (mine,)
    assert ordered(8) == ()
