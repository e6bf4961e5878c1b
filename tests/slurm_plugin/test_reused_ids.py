"""Slurm gives the id of a job that it has forgotten to another job: that one inherits nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_profiles.wire import ControlMessage, Ended, Report, Request, Started, reports_file
from penstock_scheduler.model import Hold, Phase, Placement, Share, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.jobs.holds import HoldFiles
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, cluster, pending, told

__all__ = ["cluster", "told"]

THERE = Placement("t4", "gpu", (Share("n0", 1),))
FORMER = ControlMessage(
    job_id="7",
    epoch=3,
    round=5,
    nodes=1,
    gpus=4,
    shares=True,
    request=Request(id="5-3", asked_s=90.0),
    submitted_s=50.0,
    submitted_to="debug",
    pauses_s=(30.0,),
    time_limit_s=10.0,
    time_limit_restarts=0,
    holds=2,
)
NEW = {"submit_s": 100.0, "user": "other", "uid": 4242, "restarts": 0}


def again(told: Told, spool: Path) -> SlurmCluster:
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=spool)
    return SlurmCluster(told, told, Spool(spool, alone=True), SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """With the former job's control message, and what its last run reported."""
    folder = tmp_path / "spool"
    Spool(folder).tell(FORMER)
    bodies = (Started(gpu_type="t4", gpu_ids={"n0": (0,)}, progress=40.0), Ended(outcome="completed", progress=50.0))
    lines = [
        Report(job_id="7", epoch=3, sequence=at, time_s=80.0, body=body).model_dump_json()
        for at, body in enumerate(bodies)
    ]
    reports_file(folder, "7", 3).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_the_former_job_is_gone_before_the_new_one_is_shown(told: Told, spool: Path) -> None:
    """Also for a daemon that has just started. The new job has its own time, partition, requests, GPUs and epoch."""
    told.listed = [pending("gpu", **NEW)]
    site = again(told, spool)
    state = site.observe()
    assert (state.jobs, state.waiting, state.replaced) == ((), (), {"7"})
    site.reports()
    state = site.observe()
    (job,) = state.jobs
    assert not state.replaced
    assert (job.phase, job.submit_s, job.partitions, job.pauses_s) == (Phase.QUEUED, 100.0, ("gpu", "debug"), ())
    control = Spool(spool).control("7")
    assert control is not None
    assert (control.epoch, control.submitted_s, control.submitted_to, control.request) == (4, 100.0, "gpu", None)
    assert (control.shares, control.gpus, control.time_limit_s) == (False, None, None)
    assert site.reports() == []
    assert site.observe().jobs == (job,)


def test_it_starts_with_an_epoch_above_those_of_the_former_job(told: Told, spool: Path) -> None:
    told.listed = [pending("gpu", **NEW)]
    site = again(told, spool)
    site.observe()
    site.observe()
    site.apply([Start("7", 6, THERE)])
    control = Spool(spool).control("7")
    assert control is not None
    assert (control.epoch, control.submitted_s) == (5, 100.0)


def test_a_job_of_the_last_observation_that_was_never_sent_is_told_apart_too(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [pending("gpu", submit_s=50.0)]
    assert [job.submit_s for job in cluster.observe().jobs] == [50.0]
    told.listed = [pending("gpu", **NEW)]
    state = cluster.observe()
    assert (state.jobs, state.replaced) == ((), {"7"})
    (job,) = cluster.observe().jobs
    assert (job.user, job.submit_s) == ("other", 100.0)


def test_a_requeued_job_is_the_same_job(told: Told, spool: Path) -> None:
    """Slurm changes its SubmitTime. A slurmctld that was killed forgets the requeue, and shows the first time again."""
    told.listed = [pending("gpu", submit_s=50.0)]
    site = again(told, spool)
    for restarts, submit_s in ((0, 50.0), (1, 100.0), (2, 200.0), (0, 50.0), (1, 300.0)):
        told.listed = [pending("gpu", submit_s=submit_s, restarts=restarts)]
        state = site.observe()
        assert not state.replaced
        assert [job.submit_s for job in (*state.jobs, *(each.job for each in state.waiting))] == [50.0]


def test_a_plain_job_with_such_an_id_is_a_plain_job(told: Told, spool: Path) -> None:
    """And not one whose AdminComment somebody overwrote. Nothing is written for it."""
    told.listed = [pending("gpu", comment="", **NEW)]
    site = again(told, spool)
    for _ in range(3):
        assert site.observe().refused == ()
    assert Spool(spool).control("7") == FORMER


def test_a_job_that_names_its_nodes_is_refused_whoever_had_its_id(told: Told, spool: Path) -> None:
    told.listed = [pending("gpu", required_nodes=("n0",), **NEW)]
    site = again(told, spool)
    site.observe()
    for _ in range(2):
        assert "--nodelist" in site.observe().refused[0].text


def test_a_hold_of_the_former_job_ends_with_it(told: Told, spool: Path) -> None:
    HoldFiles(spool).hold("7", "alice", admin=True)
    told.listed = [pending("gpu", submit_s=50.0)]
    site = again(told, spool)
    assert [each.job.id for each in site.observe().waiting] == ["7"]
    told.listed = [pending("gpu", **NEW)]
    site.observe()
    assert [job.id for job in site.observe().jobs] == ["7"]
    assert list((spool / "holds").iterdir()) == []


def test_a_job_that_runs_already_keeps_the_epoch_that_it_has_claimed(told: Told, spool: Path) -> None:
    """Slurm started it by itself while penstockd was away: an epoch above its own would end it."""
    reports_file(spool, "7", 4).touch()
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), start_s=101.0, priority=9, **NEW)]
    site = again(told, spool)
    site.observe()
    (job,) = site.observe().jobs
    assert job.phase is Phase.RUNNING
    control = Spool(spool).control("7")
    assert control is not None
    assert control.epoch == 4
    site.apply([Hold("7", 6)])
    told_now = Spool(spool).control("7")
    assert told_now is not None
    assert told_now.request is not None
    assert told_now.request.id == "6-4"
