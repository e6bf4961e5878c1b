"""Jobs that somebody changes between Penstock's look and its command, on a real Slurm."""

from __future__ import annotations

import pytest

from penstock_loopback import wait_for
from penstock_slurm.gateway import HeldMeanwhile, JobPlacement, NotWaiting, PlainShape, Write
from tests.slurm_plugin.gateway.test_contract import gateway, held, job, place, wait_state

__all__ = ["gateway"]
pytestmark = pytest.mark.slurm


def test_a_job_that_has_started_meanwhile_keeps_its_nodes(gateway, loopback):
    """Slurm takes an update of the nodes of a running job as an order to shrink it. A job that waited when it was read may run by
    now: an admin has requeued it, and Slurm has started it."""
    job_id = loopback.command(
        "sbatch", "--parsable", "-N2", "--gres=gpu:1", "--output=/dev/null", "--wrap", "srun sleep 300"
    ).stdout.strip()
    wait_state(gateway, job_id, "RUNNING")
    wait_for(lambda: f"{job_id}.0" in loopback.command("squeue", "-h", "-s", "-o", "%i").stdout, 120, "its step")
    before = job(gateway, job_id)
    first = JobPlacement(before.partition[0], before.nodes[:1], 1, 1, 1)
    assert gateway.write([Write(job_id, "hold")]) == (None,)
    with pytest.raises(NotWaiting):
        place(gateway, job_id, first)
    with pytest.raises(NotWaiting):
        gateway.leave_to_slurm(job_id, PlainShape(before.partition[0], 1, 1, None), 1, 60.0)
    gateway.name_no_nodes([job_id])
    after = job(gateway, job_id)
    assert (after.state, after.nodes, after.start_s) == ("RUNNING", before.nodes, before.start_s)
    assert len(before.nodes) == 2
    gateway.release(job_id)
    gateway.cancel(job_id)
    wait_state(gateway, job_id, "CANCELLED")


def test_an_admins_hold_that_came_meanwhile_stays(gateway, loopback):
    """Of a waiting job, of one that Slurm is about to start, and of a running one. A release by an admin lifts it."""
    waiting, runs = held(loopback), held(loopback)
    gateway.release(runs)
    wait_state(gateway, runs, "RUNNING")
    there = JobPlacement("all", ("t4-00",), 1, 1, 1)
    loopback.command("scontrol", "hold", f"{waiting},{runs}")
    for write in (
        Write(waiting, "hold"),
        Write(waiting, "place", there),
        Write(waiting, "release"),
        Write(runs, "release"),
    ):
        assert [type(error) for error in gateway.write([write])] == [HeldMeanwhile]
    with pytest.raises(HeldMeanwhile):
        gateway.leave_to_slurm(waiting, PlainShape("all", 1, 1, None), 1, 60.0)
    assert [type(error) for error in gateway.write([Write(runs, "requeue_hold")])] == [HeldMeanwhile]
    assert {job(gateway, each).reason for each in (waiting, runs)} == {"JobHeldAdmin"}
    assert job(gateway, runs).state == "RUNNING"
    both = [Write(waiting, "release", admin_holds=True), Write(runs, "requeue_hold", admin_holds=True)]
    assert gateway.write(both) == (None, None)
    wait_state(gateway, waiting, "RUNNING")
    for each in (waiting, runs):
        gateway.cancel(each)
        wait_state(gateway, each, "CANCELLED")
