"""Answers of Slurm that lack jobs or nodes: nobody's job is taken for gone because one answer did not have it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock_scheduler.model import Hold, Phase, Progress
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import ControllerAway, SlurmNode, SlurmReservation, TimedOut, Unread
from penstock_slurm.gateway.base import Unknown
from penstock_slurm.observe.records import CHECKS, DOUBT_S
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending, told

__all__ = ["told"]

RUNS = {"state": "RUNNING", "nodes": ("n0",), "start_s": 5.0, "priority": 9}


def ids(cluster: SlurmCluster) -> list[str]:
    return [job.id for job in cluster.observe().jobs]


def test_a_job_that_one_list_lacks_and_the_next_one_has_goes_on(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [pending("gpu", **RUNS)]
    before = cluster.observe().jobs
    told.listed, told.ended = [], [pending("gpu", **RUNS)]
    assert cluster.observe().jobs == before


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def cluster(told: Told, tmp_path: Path, clock: SimulatedClock) -> SlurmCluster:
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
    return SlurmCluster(told, told, Spool(tmp_path / "spool"), clock, settings, lambda spec: None)  # type: ignore[arg-type]


def test_a_job_that_no_list_has_stays_as_long_as_slurm_has_it(told: Told, cluster: SlurmCluster) -> None:
    """It stays as it was last seen. It is gone when two looks lack it and Slurm has it no more."""
    told.listed = [pending("gpu", **RUNS)]
    before = cluster.observe().jobs
    told.listed, told.known["7"] = [], True
    for _ in range(3):
        assert cluster.observe().jobs == before
    told.known["7"] = False
    assert ids(cluster) == ["7"]
    assert ids(cluster) == []
    assert ids(cluster) == []


def test_a_job_that_slurm_says_nothing_about_is_gone_after_a_minute(
    told: Told, cluster: SlurmCluster, clock: SimulatedClock
) -> None:
    """A command that hangs is not tried for other jobs in the same look."""
    told.listed = [pending("gpu", id=str(at), number=at, **RUNS) for at in range(3)]
    assert len(ids(cluster)) == 3
    told.listed, told.known = [], dict.fromkeys("012", TimedOut("no answer in 15 s", command="scontrol show job"))
    for _ in range(int(DOUBT_S)):
        told.checked.clear()
        assert len(ids(cluster)) == 3
        assert len(told.checked) == 1
        clock.sleep(1.0)
    assert ids(cluster) == []


def test_a_slurm_that_goes_away_takes_no_job_with_it(told: Told, cluster: SlurmCluster, clock: SimulatedClock) -> None:
    told.listed = [pending("gpu", **RUNS)]
    before = cluster.observe().jobs
    told.listed, told.known["7"] = [], ControllerAway("connection refused", command="scontrol show job")
    for _ in range(5):
        with pytest.raises(ClusterAway):
            cluster.observe()
        clock.sleep(DOUBT_S)
    told.listed = [pending("gpu", **RUNS)]
    assert cluster.observe().jobs == before


def test_a_waiting_job_is_gone_after_two_looks_without_a_question_and_no_round_plans_for_it(
    told: Told, cluster: SlurmCluster
) -> None:
    there, other = pending("gpu"), pending("gpu", id="8", number=8)
    told.listed = [there, other]
    assert ids(cluster) == ["7", "8"]
    told.listed = [other]
    state = cluster.observe()
    assert [job.id for job in state.jobs] == ["8"]
    assert [(each.job.id, each.code) for each in state.waiting] == [("7", "waiting-cluster")]
    assert "list it again" in state.waiting[0].text
    told.listed = [there, other]
    assert sorted(ids(cluster)) == ["7", "8"], "it was there all the time"
    told.listed = [other]
    assert [each.job.id for each in cluster.observe().waiting] == ["7"]
    assert (ids(cluster), cluster.observe().waiting, told.checked) == (["8"], (), [])


def test_a_look_with_a_record_that_names_no_job_is_no_complete_look(told: Told, cluster: SlurmCluster) -> None:
    """That record may be the missing job's."""
    told.listed = [pending("gpu", **RUNS)]
    assert ids(cluster) == ["7"]
    told.listed, told.lost = [], (Unread("job", "x"),)
    for _ in range(5):
        assert ids(cluster) == ["7"]
    told.lost = ()
    assert ids(cluster) == ["7"]
    assert ids(cluster) == []


def test_half_a_list_takes_no_job_away(told: Told, cluster: SlurmCluster) -> None:
    """There are more of them than are checked in one look: those that are not checked yet stay, too."""
    jobs = [pending("gpu", id=str(at), number=at, **RUNS) for at in range(2 * CHECKS + 3)]
    told.listed, told.known = jobs, dict.fromkeys((job.id for job in jobs), True)
    assert len(ids(cluster)) == len(jobs)
    told.listed = jobs[::2]
    assert len(ids(cluster)) == len(jobs)
    told.known = {}
    for _ in range(4):
        found = ids(cluster)
    assert found == [job.id for job in jobs[::2]]


def test_a_job_that_ends_is_gone_without_a_question(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [pending("gpu", **RUNS)]
    cluster.observe()
    told.listed, told.ended = [], [pending("gpu", **RUNS | {"state": "COMPLETED", "end_s": 9.0})]
    assert ids(cluster) == []
    assert told.checked == []


@pytest.mark.parametrize("seen", [True, False])
def test_a_job_on_a_node_that_slurm_does_not_list_goes_on(
    told: Told, cluster: SlurmCluster, seen: bool, tmp_path: Path
) -> None:
    """Its node is there, and nothing starts on it; nobody stops the job. Also for a daemon that has never seen the node."""
    told.listed = [pending("gpu", **RUNS)]
    if seen:
        cluster.observe()
    whole = told.nodes()
    told.nodes = lambda: whole[1:]  # type: ignore[method-assign]
    state = cluster.observe()
    (job,) = state.jobs
    assert job.phase is Phase.RUNNING
    assert job.allocation is not None
    node = next(node for node in state.nodes if node.name == "n0")
    assert job.allocation.gpu_type == node.gpu_type
    assert node.gpus_for_us == 0
    assert node.partitions == ("gpu",)
    if seen:
        assert node.gpu_type == "t4"
    (outcome,) = cluster.apply([Hold("7", 1)])
    assert outcome.progress is Progress.UNDER_WAY
    assert told.written == []
    told.nodes = lambda: whole  # type: ignore[method-assign]
    (found,) = (node for node in cluster.observe().nodes if node.name == "n0")
    assert found.gpus_for_us > 0


def test_a_node_that_slurm_does_not_list_and_on_which_nothing_runs_is_gone(told: Told, cluster: SlurmCluster) -> None:
    cluster.observe()
    whole: tuple[SlurmNode, ...] = told.nodes()
    told.nodes = lambda: whole[1:]  # type: ignore[method-assign]
    told.listed = [pending("gpu")]
    assert [node.name for node in cluster.observe().nodes] == ["n1"]


def test_nothing_starts_on_a_node_that_cannot_be_read_and_what_runs_there_stays(
    told: Told, cluster: SlurmCluster
) -> None:
    told.listed = [pending("gpu", **RUNS)]
    first, other = told.nodes()
    odd = dataclasses.replace(first, unknown=(Unknown("Gres", "gpu:t4:many"),))
    told.nodes = lambda: (odd, other)  # type: ignore[method-assign]
    state = cluster.observe()
    assert [job.phase for job in state.jobs] == [Phase.RUNNING]
    assert {node.name: (node.may_start, node.leave) for node in state.nodes} == {
        "n0": (False, None),
        "n1": (True, None),
    }


def test_what_no_record_can_be_blamed_for_is_told(told: Told, cluster: SlurmCluster) -> None:
    told.lost = (Unread("association", "57|a|b"), Unread("message", "the moon is full", 2))
    found = {(each.kind, each.text, each.names) for each in cluster.observe().unknown}
    assert ("association", "record=57|a|b", ("without a readable name",)) in found
    assert ("message", "the moon is full", ("", "")) in found


def test_a_running_job_whose_record_cannot_be_read_is_left_alone(told: Told, cluster: SlurmCluster) -> None:
    """Its owner is told why, and no other job is seen otherwise."""
    told.listed = [pending("gpu", **RUNS), pending("gpu", id="8", number=8)]
    assert ids(cluster) == ["7", "8"]
    odd = (Unknown("record", "7 fields in place of 37"),)
    told.listed[0] = pending("", unknown=odd, state="", comment="")
    state = cluster.observe()
    assert [job.id for job in state.jobs] == ["8"]
    assert [(each.job, each.runs) for each in state.refused] == [("7", True)]
    assert "7 fields in place of 37" in state.refused[0].text
    told.listed[0] = pending("gpu", **RUNS)
    assert sorted(ids(cluster)) == ["7", "8"]


def test_nothing_starts_on_the_nodes_of_a_reservation_that_cannot_be_read(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [pending("gpu", **RUNS)]
    odd = SlurmReservation("r", 0.0, 0.0, ("n0",), True, frozenset(), (Unknown("State", "ODD"),))
    told.reservations = lambda: (odd,)  # type: ignore[method-assign,assignment,return-value]
    state = cluster.observe()
    assert {node.name: (node.may_start, node.leave, node.reservation) for node in state.nodes} == {
        "n0": (False, None, ""),
        "n1": (True, None, ""),
    }
    assert [job.phase for job in state.jobs] == [Phase.RUNNING]
    assert {each.kind for each in state.unknown} == {"node", "reservation"}
