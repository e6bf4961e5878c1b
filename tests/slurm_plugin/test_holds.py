"""Holds in Slurm and of `penstock hold`: what is Penstock's own, what stays held, and who may release it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from penstock_profiles.wire import ControlMessage
from penstock_scheduler.model import Hold, Placement, Share, Start
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway, HeldMeanwhile, SlurmJob
from penstock_slurm.gateway.base import Write
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, cluster, pending, told

__all__ = ["cluster", "told"]

REQUEUED = "job requeued in held state"
ADMIN, USER = {"reason": "JobHeldAdmin"}, {"reason": "JobHeldUser"}
START = Start("7", 1, Placement("t4", "gpu", (Share("n0", 1),)))


@pytest.fixture
def submitter(told: Told, tmp_path: Path) -> SlurmSubmitter:
    settings = SlurmSettings(partitions=("gpu", "debug"))
    return SlurmSubmitter(cast(CliGateway, told), Spool(tmp_path / "spool"), settings)


def look(cluster: SlurmCluster) -> tuple[list[str], list[tuple[str, str]]]:
    """The jobs that a policy may start, and those that wait for something else, with why."""
    state = cluster.observe()
    return [job.id for job in state.jobs], [(each.job.id, each.text) for each in state.waiting]


def noted(tmp_path: Path, **fields: Any) -> None:
    Spool(tmp_path / "spool").tell(ControlMessage(job_id="7", epoch=1, round=1, nodes=1, gpus=1, **fields), 0)


@pytest.mark.parametrize("reason", ["JobHeldUser", "None", "Dependency"])
def test_a_job_that_its_submission_holds_is_penstocks_to_start(told: Told, cluster: SlurmCluster, reason: str) -> None:
    told.listed = [pending("gpu", reason=reason)]
    assert look(cluster) == (["7"], [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (ADMIN, "an admin in Slurm (JobHeldAdmin)"),
        ({"reason": REQUEUED, "restarts": 1}, "held in Slurm (job requeued in held state)"),
        ({"reason": "launch_failed_requeued_held", "restarts": 1}, "held in Slurm (launch failed requeued held)"),
        ({"state": "SPECIAL_EXIT", "reason": ""}, "held in Slurm (SPECIAL_EXIT)"),
    ],
)
def test_a_hold_that_is_not_penstocks_stays_and_says_whose_it_is(
    told: Told, cluster: SlurmCluster, fields: dict[str, object], words: str
) -> None:
    """A job that has never been Penstock's to stop."""
    told.listed = [pending("gpu", **fields)]
    jobs, ((job, text),) = look(cluster)
    assert (jobs, job) == ([], "7")
    assert words in text
    who = "an admin can " if "admin" in words else "its user can "
    assert f"{who}release it with `penstock release 7`" in text
    assert "`scontrol release 7`" in text
    cluster.apply(())
    assert told.written == []


@pytest.mark.parametrize(
    ("holds", "restarts", "reason", "ours"),
    [
        (1, 1, REQUEUED, True),
        (2, 1, REQUEUED, True),
        (0, 1, "launch_failed_requeued_held", False),
        (None, 1, REQUEUED, False),
        (None, 1, "JobHeldUser", False),
        (1, 1, "JobHeldAdmin", False),
    ],
    ids=["stopped", "slurmctld forgot a restart", "launch failed", "requeuehold", "hold", "an admin's on top"],
)
def test_a_hold_between_runs_is_penstocks_if_it_noted_it_before(
    told: Told, cluster: SlurmCluster, tmp_path: Path, holds: int | None, restarts: int, reason: str, ours: bool
) -> None:
    noted(tmp_path, holds=holds)
    told.listed = [pending("gpu", restarts=restarts, reason=reason)]
    jobs, waiting = look(cluster)
    assert jobs == (["7"] if ours else [])
    assert len(waiting) == (not ours)


def test_a_job_that_a_killed_slurmctld_shows_as_it_was_submitted_is_started_again(
    told: Told, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Penstock has sent it to nodes and seen it released. What slurmctld had saved is older: held, and sent nowhere."""
    noted(tmp_path, holds=None)
    told.listed = [pending("gpu", reason="JobHeldUser")]
    assert look(cluster) == (["7"], [])
    told.listed = [pending("gpu", reason="JobHeldUser", required_nodes=("n0",))]
    assert look(cluster)[0] == [], "somebody has held it where Penstock sent it"
    told.listed = [pending("gpu", **ADMIN)]
    assert look(cluster)[0] == [], "an admin has held it since"


def test_a_hold_that_a_killed_slurmctld_has_again_after_its_release_is_penstocks(
    told: Told, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """slurmctld had saved the job as Penstock had stopped it: held, with as many restarts, and the nodes of its last run."""
    noted(tmp_path, holds=2)
    told.listed = [pending("gpu", restarts=2, reason="None", priority=9, required_nodes=("n0",))]
    cluster.observe()
    saved: dict[str, Any] = {"restarts": 2, "reason": REQUEUED, "required_nodes": ("n0",)}
    told.listed = [pending("gpu", **saved)]
    assert look(cluster) == (["7"], [])
    for other in ({"restarts": 3}, {"reason": "JobHeldUser"}, ADMIN):
        told.listed = [pending("gpu", **(saved | other))]
        assert look(cluster)[0] == [], "somebody has held it since"


@pytest.mark.parametrize(("before", "ours"), [("None", True), ("JobHeldAdmin", False)])
def test_a_job_that_was_requeued_while_it_was_suspended_is_held_by_nobody(
    told: Told, cluster: SlurmCluster, before: str, ours: bool
) -> None:
    """Slurm leaves it the priority 0 of its suspension, and shows an admin's hold. Penstock puts its own in its place."""
    told.hold = lambda job: told.listed.append(pending("gpu", restarts=1, reason="JobHeldUser"))  # type: ignore[attr-defined]
    runs: dict[str, Any] = {"nodes": ("n0",), "start_s": 10.0, "gpus_per_node": 1}
    told.listed = [pending("gpu", state="SUSPENDED", reason=before, **runs)]
    cluster.observe()
    told.listed = [pending("gpu", state="COMPLETING", reason=before, **runs)]
    cluster.observe()
    told.listed = [pending("gpu", restarts=1, **ADMIN)]
    cluster.observe()
    told.listed = told.listed[-1:]
    assert look(cluster)[0] == (["7"] if ours else [])


def test_each_hold_of_penstocks_is_noted_before_slurm_is_asked(
    told: Told, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A start, a hold before the start, and a stop: the daemon may die after any of them."""
    spool = Spool(tmp_path / "spool")

    def holds() -> int | None:
        control = spool.control("7")
        return None if control is None else control.holds

    told.listed = [pending("gpu", restarts=1, reason="None")]
    noted(tmp_path, holds=1)
    cluster.observe()
    cluster.apply([START])
    assert holds() == 1
    told.listed = [pending("gpu", restarts=1, priority=9, required_nodes=("n0",))]
    cluster.observe()
    assert holds() is None, "Slurm has released it: who holds it now is somebody else"
    cluster.apply([Hold("7", 2)])
    assert holds() == 1


@pytest.mark.parametrize(
    ("state", "priority", "reason", "noted_as"),
    [
        ("RUNNING", 9, "None", 2),
        ("RUNNING", 0, "JobHeldUser", None),
        ("RUNNING", 9, "JobHeldUser", None),
        ("SUSPENDED", 0, "None", 2),
        ("SUSPENDED", 0, "JobHeldUser", None),
        ("SUSPENDED", 0, "JobHeldAdmin", None),
    ],
    ids=[
        "runs",
        "held",
        "held, suspended and resumed",
        "suspended",
        "held and suspended",
        "suspended and held by an admin",
    ],
)
def test_a_stopped_job_stays_held_only_if_somebody_held_it_while_it_ran(
    told: Told, cluster: SlurmCluster, tmp_path: Path, state: str, priority: int, reason: str, noted_as: int | None
) -> None:
    """Every suspended job has priority 0. Its time slice is no hold, so Penstock starts it again."""
    told.listed = [pending("gpu", state=state, nodes=("n0",), restarts=1, priority=priority, reason=reason)]
    cluster.observe()
    cluster.apply([Hold("7", 3)])
    assert told.written[-1].kind == "requeue_hold"
    control = Spool(tmp_path / "spool").control("7")
    assert control is not None
    assert control.holds == noted_as
    told.listed = [pending("gpu", restarts=2, reason=REQUEUED)]
    assert look(cluster)[0] == (["7"] if noted_as else [])


def running(**fields: object) -> SlurmJob:
    return pending("gpu", state="RUNNING", nodes=("n0",), **fields)


LATE: dict[str, object] = {"priority": 0, "reason": "JobHeldUser"}


@pytest.fixture
def late(told: Told, cluster: SlurmCluster, tmp_path: Path) -> Spool:
    """Penstock takes the place of a released job back, and Slurm has started it when the hold arrives."""
    noted(tmp_path, holds=0)
    told.listed = [pending("gpu", priority=9, reason="Resources", required_nodes=("n0",))]
    cluster.observe()
    cluster.apply([Hold("7", 2)])
    assert told.written[-1].kind == "hold"
    told.written.clear()
    return Spool(tmp_path / "spool")


def test_a_hold_of_penstocks_that_comes_too_late_is_taken_back(told: Told, cluster: SlurmCluster, late: Spool) -> None:
    told.listed = [running(**LATE)]
    cluster.observe()
    assert told.written == [Write("7", "release")]
    told.listed = [running(priority=9)]
    cluster.observe()
    told.listed = [running(**LATE)]  # now it is somebody's
    cluster.observe()
    assert told.written == [Write("7", "release")]
    cluster.apply([Hold("7", 3)])
    told.listed = [pending("gpu", restarts=1, reason=REQUEUED)]
    assert look(cluster)[0] == []


def test_a_job_that_is_stopped_before_penstocks_hold_is_taken_back_is_started_again(
    told: Told, cluster: SlurmCluster, late: Spool
) -> None:
    write = told.write
    told.write = lambda writes: tuple(HeldMeanwhile(command="scontrol", job_id=each.job_id) for each in writes)  # type: ignore[method-assign]
    told.listed = [running(**LATE)]
    cluster.observe()
    told.write = write  # type: ignore[method-assign]
    cluster.apply([Hold("7", 3)])
    assert told.written[-1].kind == "requeue_hold"
    told.listed = [pending("gpu", restarts=1, reason=REQUEUED)]
    assert look(cluster)[0] == ["7"]


@pytest.mark.parametrize("own", [True, False])
def test_a_job_that_is_stopped_in_the_tick_in_which_its_hold_was_lifted_is_started_again(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter, late: Spool, own: bool
) -> None:
    """Its record is older than the release. The hold was Penstock's own and came too late, or its user has released it."""
    if not own:
        told.listed = [running(priority=9)]
        submitter.hold("7", "ada", admin=False)
        cluster.observe()
        submitter.release("7", admin=False)
        told.written.clear()
    told.listed = [running(**LATE)]
    cluster.observe()
    assert [each.kind for each in told.written] == ["release"]
    cluster.apply([Hold("7", 3)])
    assert told.written[-1].kind == "requeue_hold"
    told.listed = [pending("gpu", restarts=1, reason=REQUEUED)]
    assert look(cluster)[0] == ["7"]


def test_a_hold_that_came_in_time_is_noted_no_longer_once_the_job_runs(
    told: Told, cluster: SlurmCluster, late: Spool
) -> None:
    told.listed = [running(priority=9)]
    cluster.observe()
    control = late.control("7")
    assert control is not None
    assert control.holding is None
    assert told.written == []


def test_an_asked_hold_keeps_a_job_until_it_is_released(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter
) -> None:
    """Also one that Slurm might start now: then it is held there, too."""
    told.listed = [pending("gpu", priority=9, required_nodes=("n0",))]
    submitter.hold("7", "ada", admin=False)
    jobs, waiting = look(cluster)
    assert (jobs, waiting) == (
        [],
        [("7", "is held by ada (its user) with `penstock hold`; release it with `penstock release 7`")],
    )
    cluster.apply(())
    assert told.written == [Write("7", "hold")]
    told.listed = [pending("gpu", reason="JobHeldUser")]
    assert look(cluster)[0] == []
    submitter.release("7", admin=False)
    assert look(cluster) == (["7"], [])
    assert look(cluster) == (["7"], []), "and stays released"


def test_a_running_job_that_is_held_goes_on_and_is_not_started_again(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter, tmp_path: Path
) -> None:
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), priority=9)]
    submitter.hold("7", "ada", admin=False)
    assert look(cluster) == (["7"], [])
    cluster.apply([])
    assert told.written == [Write("7", "hold")], "Slurm may requeue it while no daemon runs"
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), priority=0)]
    assert look(cluster) == (["7"], [])
    cluster.apply([Hold("7", 1)])
    assert [write.kind for write in told.written] == ["hold", "requeue_hold"]
    told.listed = [pending("gpu", state="COMPLETING", nodes=("n0",), priority=0)]
    look(cluster)
    told.listed = [pending("gpu", restarts=1, reason=REQUEUED)]
    noted(tmp_path, holds=1)
    assert look(cluster)[0] == [], "Slurm's own hold is Penstock's, but ada's is not over"
    submitter.release("7", admin=False)
    assert look(cluster) == (["7"], [])
    assert [write.kind for write in told.written] == ["hold", "requeue_hold"], "Slurm would start it by itself"


def test_a_hold_that_its_user_has_released_meanwhile_is_not_carried_out(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter
) -> None:
    """In Slurm, it would take the place of the hold of an admin who came after the release."""
    told.listed = [pending("gpu", state="RUNNING", nodes=("n0",), priority=9)]
    submitter.hold("7", "ada", admin=False)
    look(cluster)
    submitter.release("7", admin=False)
    cluster.apply([])
    assert told.written == []


@pytest.mark.parametrize("fields", [ADMIN, USER | {"restarts": 1}])
def test_a_release_lets_penstock_start_what_somebody_held_in_slurm(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter, tmp_path: Path, fields: dict[str, object]
) -> None:
    """Slurm is not asked to release it: it would start the job by itself."""
    noted(tmp_path, holds=None)
    told.listed = [pending("gpu", **fields)]
    assert look(cluster)[0] == []
    if fields is ADMIN:
        with pytest.raises(BadJobSpec, match="an admin holds job 7"):
            submitter.release("7", admin=False)
    held = list[str]()
    told.hold = held.append  # type: ignore[attr-defined]
    submitter.release("7", admin=True)
    look(cluster)
    assert held == (["7"] if fields is ADMIN else []), "a user hold takes the place of an admin's"
    told.listed = [pending("gpu", **fields | USER)]
    assert look(cluster) == (["7"], [])
    assert told.written == []


def test_an_admins_hold_is_released_by_admins_only_and_what_nobody_holds_is_not(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter
) -> None:
    told.listed = [pending("gpu", reason="JobHeldUser")]
    with pytest.raises(BadJobSpec, match="nobody holds job 7"):
        submitter.release("7", admin=True)
    submitter.hold("7", "root", admin=True)
    assert "root (an admin)" in look(cluster)[1][0][1]
    with pytest.raises(BadJobSpec, match="an admin holds job 7"):
        submitter.release("7", admin=False)
    submitter.release("7", admin=True)
    assert look(cluster)[0] == ["7"]


def test_a_job_that_waits_for_what_its_user_requested_is_known(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [pending("gpu", dependency="afterok:3(unfulfilled)")]
    assert look(cluster) == ([], [("7", "waits for its dependency afterok:3(unfulfilled)")])


def test_a_job_whose_dependency_has_failed_is_not_held_by_an_admin(told: Told, cluster: SlurmCluster) -> None:
    """Slurm 22.05 writes JobHeldAdmin to a held job whose dependency fails. Its user releases it in vain."""
    told.listed = [pending("gpu", dependency="afterok:3(failed)", **ADMIN)]
    jobs, ((job, text),) = look(cluster)
    assert (jobs, job) == ([], "7")
    assert "can never be satisfied (DependencyNeverSatisfied): cancel the job, or submit it again" in text
    assert "admin" not in text


def test_a_job_whose_spec_somebody_overwrote_goes_on_as_a_plain_job_and_says_so(
    told: Told, cluster: SlurmCluster
) -> None:
    runs = {"state": "RUNNING", "nodes": ("n0",), "priority": 9}
    told.listed = [pending("gpu", **runs), pending("gpu", id="8", number=8, comment="", **runs)]
    cluster.observe()
    told.listed[0] = pending("gpu", comment="", admin_comment="ticket 12", **runs)
    for _ in range(2):
        state = cluster.observe()
        assert state.jobs == ()
        ((job, text),) = ((each.job, each.text) for each in state.refused)
        assert job == "7", "8 never had one"
        assert "no longer has the job spec" in text
    assert told.written == []


def test_the_hold_of_a_job_that_has_ended_is_forgotten(
    told: Told, cluster: SlurmCluster, submitter: SlurmSubmitter, tmp_path: Path
) -> None:
    told.listed = [pending("gpu", reason="JobHeldUser")]
    submitter.hold("7", "ada", admin=False)
    cluster.observe()
    told.listed, told.ended = [], [pending("gpu", state="CANCELLED")]
    cluster.observe()
    assert list((tmp_path / "spool" / "holds").iterdir()) == []
