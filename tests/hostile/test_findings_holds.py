"""What a user can do against admins' holds, and to the round loop with many jobs, found by reading the code."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from penstock_profiles.wire import ControlMessage
from penstock_scheduler.model import Hold
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway, ControllerAway, PlainShape, SlurmError, SlurmJob
from penstock_slurm.gateway.base import Write
from penstock_slurm.jobs.begin_times import BeginTimes
from penstock_slurm.jobs.holds import HoldFiles
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending

EVE, ANN = {"uid": 1000, "user": "eve"}, {"uid": 1001, "user": "ann"}
REFUSED = json.dumps({"penstock": {"max_gpus": 0}})
REQUEUED = "job requeued in held state"
RUNS: dict[str, Any] = {"state": "RUNNING", "nodes": ("n0",), "priority": 9, "reason": "None"}
HELD_BY_ADMIN = {"priority": 0, "reason": "JobHeldAdmin"}
PLAIN = json.dumps({"penstock": {}, "penstock_plain": {"partition": "gpu", "nodes": 1, "gpus_per_node": 1}})


class Slurm(Told):
    """Each call is a process, and so is a `write` of one release."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.away = False
        self.calls: list[tuple[str, str]] = []

    def set_admin_comment(self, job_id: str, text: str) -> None:
        self.said.append(job_id)
        if self.away:
            raise ControllerAway("connection refused", command="scontrol")
        self.listed = [pending_as(job, admin_comment=text) if job.id == job_id else job for job in self.listed]

    def hold(self, job_id: str) -> None:
        self.calls.append(("hold", job_id))

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        if [each.kind for each in writes] == ["release"]:
            self.calls.append(("release", writes[0].job_id))
        return super().write(writes)

    def leave_to_slurm(self, job_id: str, shape: PlainShape, cpus: int, after_s: float) -> None:
        self.calls.append(("leave", job_id))


def pending_as(job: SlurmJob, **fields: Any) -> SlurmJob:
    return dataclasses.replace(job, **fields)


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def cluster(slurm: Slurm, spool: Spool) -> SlurmCluster:
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=spool.folder)
    return SlurmCluster(slurm, slurm, spool, SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]


@pytest.fixture
def submitter(slurm: Slurm, spool: Spool) -> SlurmSubmitter:
    return SlurmSubmitter(cast(CliGateway, slurm), spool, SlurmSettings(partitions=("gpu", "debug")))


def look(cluster: SlurmCluster) -> tuple[list[str], list[str]]:
    """The jobs that a policy may start, and why the others wait."""
    state = cluster.observe()
    return [job.id for job in state.jobs], [each.text for each in state.waiting]


def ann_cannot_release(submitter: SlurmSubmitter) -> None:
    with pytest.raises(BadJobSpec, match="an admin holds job 7"):
        submitter.release("7", admin=False)


def test_a_users_hold_does_not_take_the_place_of_an_admins(
    slurm: Slurm, cluster: SlurmCluster, submitter: SlurmSubmitter
) -> None:
    slurm.listed = [pending("gpu", reason="JobHeldUser", **ANN)]
    submitter.hold("7", "root", admin=True)
    submitter.hold("7", "ann", admin=False)
    ann_cannot_release(submitter)
    assert "root (an admin)" in look(cluster)[1][0]
    submitter.hold("7", "ada", admin=True)
    submitter.release("7", admin=True)
    assert look(cluster)[0] == ["7"]


def test_of_a_user_and_an_admin_who_ask_at_once_the_admin_wins(tmp_path: Path) -> None:
    """The user holds and releases all the time, while the admin holds once."""
    files, over = HoldFiles(tmp_path), threading.Event()

    def ann() -> None:
        while not over.is_set():
            try:
                files.hold("7", "ann", admin=False)
                files.release("7")
            except BadJobSpec:
                return

    thread = threading.Thread(target=ann)
    thread.start()
    files.hold("7", "root", admin=True)
    over.set()
    thread.join()
    assert files.read().held["7"].by == "root"
    assert files.read().released == {}


def test_a_release_that_is_carried_out_keeps_a_hold_that_came_meanwhile(
    slurm: Slurm, cluster: SlurmCluster, submitter: SlurmSubmitter, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admin holds the job after the round loop has read that it is to be released."""
    spool.tell(ControlMessage(job_id="7", epoch=1, round=1, holds=None), 0)
    slurm.listed = [pending("gpu", state="SPECIAL_EXIT", reason="", **ANN)]
    submitter.release("7", admin=False)

    def write(writes: Sequence[Write]) -> tuple[None, ...]:
        assert [(each.kind, each.admin_holds) for each in writes] == [("release", False)]
        submitter.hold("7", "root", admin=True)
        return (None,)

    with monkeypatch.context() as patched:
        patched.setattr(slurm, "write", write)
        cluster.observe()
    assert "root (an admin)" in look(cluster)[1][0]
    ann_cannot_release(submitter)


@pytest.mark.parametrize("priority", [0, 9], ids=["running", "suspended and resumed"])
def test_a_user_does_not_lift_an_admins_hold_of_a_running_job(
    slurm: Slurm, cluster: SlurmCluster, submitter: SlurmSubmitter, priority: int
) -> None:
    """Nor does a user hold take its place in Slurm."""
    slurm.listed = [pending("gpu", **RUNS | HELD_BY_ADMIN | {"priority": priority}, **ANN)]
    submitter.hold("7", "ann", admin=False)
    look(cluster)
    cluster.apply(())
    ann_cannot_release(submitter)
    look(cluster)
    assert (slurm.calls, slurm.written) == ([], [])
    submitter.release("7", admin=True)
    look(cluster)
    assert slurm.calls == ([("release", "7")] if priority == 0 else [])


def test_an_admins_hold_of_a_running_job_is_an_admins_after_its_stop(
    slurm: Slurm, cluster: SlurmCluster, submitter: SlurmSubmitter, spool: Spool
) -> None:
    """Slurm then shows only that somebody holds it."""
    slurm.listed = [pending("gpu", **RUNS | HELD_BY_ADMIN, **ANN)]
    cluster.observe()
    cluster.apply([Hold("7", 1)])
    slurm.listed = [pending("gpu", restarts=1, reason=REQUEUED, **ANN)]
    assert look(cluster) == (
        [],
        [
            "was held by an admin in Slurm while it ran; an admin can release it with `penstock release 7` or "
            "`scontrol release 7`"
        ],
    )
    ann_cannot_release(submitter)
    HoldFiles(spool.folder).release("7")  # before the round loop had seen the admin's hold
    assert look(cluster)[0] == []
    submitter.release("7", admin=True)
    assert look(cluster)[0] == ["7"]
    assert list((spool.folder / "holds").iterdir()) == []


@pytest.mark.parametrize("after", [{"reason": "None"}, {"state": "PENDING", "nodes": ()}], ids=["runs", "waits"])
def test_what_an_admin_has_released_in_slurm_is_no_admins_hold_any_more(
    slurm: Slurm, cluster: SlurmCluster, spool: Spool, after: dict[str, object]
) -> None:
    slurm.listed = [pending("gpu", **RUNS | HELD_BY_ADMIN)]
    cluster.observe()
    assert [file.name for file in (spool.folder / "holds").iterdir()] == ["7.by-admin"]
    slurm.listed = [pending("gpu", **RUNS | after)]
    cluster.observe()
    assert list((spool.folder / "holds").iterdir()) == []


@pytest.mark.parametrize("admin", [False, True])
def test_a_users_release_does_not_lift_a_hold_that_an_admin_made_after_it(
    slurm: Slurm, cluster: SlurmCluster, submitter: SlurmSubmitter, spool: Spool, admin: bool
) -> None:
    """A release of a refused job stays until its user has corrected the job spec."""
    fields: dict[str, Any] = {"restarts": 1} | ANN
    spool.tell(ControlMessage(job_id="7", epoch=1, round=1, holds=None), 0)
    slurm.listed = [pending("gpu", comment=REFUSED, reason="JobHeldUser", **fields)]
    submitter.release("7", admin=admin)
    assert look(cluster) == ([], [])
    slurm.listed = [pending("gpu", reason="JobHeldAdmin", **fields)]
    look(cluster)
    assert slurm.calls == ([("hold", "7")] if admin else [])
    assert list((spool.folder / "holds").iterdir()) == []


def many(first: int, count: int, **fields: Any) -> list[SlurmJob]:
    return [pending("gpu", id=str(each), number=each, **fields) for each in range(first, first + count)]


def test_held_jobs_that_their_user_releases_again_and_again_are_held_through_few_processes(
    slurm: Slurm, cluster: SlurmCluster, spool: Spool
) -> None:
    """At most 200 in an observation: first those that admins hold, then some of each user."""
    files = HoldFiles(spool.folder)
    slurm.listed = [*many(1, 300, priority=9, **EVE), *many(301, 2, priority=9, **ANN)]
    for job in slurm.listed:
        files.hold(job.id, job.user, admin=job.id == "300")
    assert look(cluster)[0] == []
    cluster.apply(())
    held = [write.job_id for write in slurm.written]
    assert held == ["300", "1", "301", "2", "302", *map(str, range(3, 198))]
    assert slurm.calls == []


def test_only_some_refused_jobs_are_told_why_in_each_observation(slurm: Slurm, cluster: SlurmCluster) -> None:
    slurm.listed = [*many(1, 120, comment=REFUSED, **EVE), *many(121, 2, comment=REFUSED, **ANN)]
    for told, some in ((50, {"121", "122"}), (100, set()), (122, set()), (122, set())):
        assert len(cluster.observe().refused) == 122
        assert len(slurm.said) == len({*slurm.said}) == told
        assert some <= {*slurm.said}


def test_nobody_is_told_more_while_slurm_is_away(slurm: Slurm, cluster: SlurmCluster) -> None:
    slurm.away, slurm.listed = True, many(1, 10, comment=REFUSED, **EVE)
    cluster.observe()
    assert len(slurm.said) == 1


def test_slurm_is_asked_for_some_releases_of_a_user_at_a_time(
    slurm: Slurm, cluster: SlurmCluster, submitter: SlurmSubmitter
) -> None:
    failed: dict[str, Any] = {"state": "SPECIAL_EXIT", "reason": ""}
    slurm.listed = [*many(1, 30, **failed, **EVE), *many(31, 1, **failed, **ANN)]
    for job in slurm.listed:
        submitter.release(job.id, admin=False)
    for calls in (21, 31, 31):
        cluster.observe()
        assert len({*slurm.calls}) == len(slurm.calls) == calls
        assert ("release", "31") in slurm.calls


def test_overdue_jobs_are_released_to_their_deadlines_through_few_processes(
    slurm: Slurm, cluster: SlurmCluster
) -> None:
    slurm.listed = many(1, 300, deadline_s=-1.0, reason="JobHeldUser", **EVE)
    cluster.observe()
    cluster.apply(())
    assert slurm.calls == []
    assert slurm.written == [Write(str(each), "release") for each in range(1, 201)]


def test_some_held_jobs_are_left_to_slurm_at_a_time(slurm: Slurm) -> None:
    waiting = [*many(1, 100, admin_comment=PLAIN, **EVE), *many(101, 1, admin_comment=PLAIN, **ANN)]
    BeginTimes(cast(CliGateway, slurm), 600.0).renew(waiting, [], 0.0)
    assert [job for _, job in slurm.calls] == ["1", "101", *map(str, range(2, 50))]
