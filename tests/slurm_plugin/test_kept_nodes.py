"""Which nodes are kept for jobs that move, and how the reservation is made: by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock_profiles.wire import ControlMessage, Request
from penstock_scheduler.model import (
    Assignment,
    ClusterState,
    Migrate,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Share,
    Snapshot,
    Start,
)
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.kept_nodes import RENEWED_S, RETRY_S, KeptNodes, Move, MoveStage, nodes_to_keep
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import Refused
from penstock_slurm.observe.plain_jobs import due_s
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending

STOPPED, SAVING, SENT = (
    Move(MoveStage.STOPPED, {"n0": 1}),
    Move(MoveStage.SAVING, {"n0": 1}),
    Move(MoveStage.SENT, {"n0": 1}),
)


@pytest.mark.parametrize(
    ("moves", "free", "emptying", "kept"),
    [
        ([STOPPED], {"n0": 1}, [], {"n0"}),
        ([STOPPED], {"n0": 0}, ["n0"], {"n0"}),
        # Its GPUs are still in use, so no job can take them.
        ([STOPPED], {"n0": 0}, ["n1"], set()),
        ([SAVING], {"n0": 1}, [], {"n0"}),
        ([SENT], {"n0": 1}, [], set()),
        # The one that was sent has no GPUs. The other one keeps its own if it loses these.
        ([SENT, SAVING], {"n0": 1}, [], set()),
        ([SENT, STOPPED], {"n0": 1}, [], {"n0"}),
        # It shrinks there, and needs no more.
        ([Move(MoveStage.SAVING, {"n0": -1})], {"n0": 1}, [], set()),
        ([Move(MoveStage.STOPPED, {"n0": 1, "n1": 1})], {"n0": 1, "n1": 0}, [], {"n0"}),
        ([], {"n0": 1}, ["n0"], set()),
    ],
)
def test_nodes_are_kept_while_gpus_are_free_that_are_for_a_move(
    moves: Sequence[Move], free: dict[str, int], emptying: Sequence[str], kept: set[str]
) -> None:
    assert nodes_to_keep(moves, free, emptying) == kept


class Reservation:
    """Slurm's one reservation for moves; `None`: there is none."""

    def __init__(self) -> None:
        self.nodes: list[str] | None = None
        self.made = self.changed = 0
        self.refuses = False

    def keep_nodes(self, nodes: Sequence[str], *, changes: bool) -> None:
        if self.refuses or changes != (self.nodes is not None):
            raise Refused("no", command="scontrol")
        self.nodes, self.made, self.changed = [*nodes], self.made + (not changes), self.changed + changes

    def keep_no_nodes(self) -> None:
        if self.nodes is None:
            raise Refused("no such reservation", command="scontrol")
        self.nodes = None


@pytest.fixture
def slurm() -> Reservation:
    return Reservation()


@pytest.fixture
def kept(slurm: Reservation) -> KeptNodes:
    return KeptNodes(slurm)  # type: ignore[arg-type]


def test_the_reservation_is_made_changed_and_ended(slurm: Reservation, kept: KeptNodes) -> None:
    kept.keep((), 0.0)
    kept.keep({"n1", "n0"}, 1.0)
    kept.keep({"n0", "n1"}, 2.0)
    assert (slurm.nodes, slurm.made, slurm.changed) == (["n0", "n1"], 1, 0)
    kept.keep({"n0"}, 3.0)
    assert (slurm.nodes, slurm.made, slurm.changed) == (["n0"], 1, 1)
    kept.keep((), 4.0)
    assert slurm.nodes is None


def test_a_reservation_that_is_needed_for_long_does_not_run_out(slurm: Reservation, kept: KeptNodes) -> None:
    kept.keep({"n0"}, 0.0)
    kept.keep({"n0"}, RENEWED_S - 1)
    assert slurm.changed == 0
    kept.keep({"n0"}, RENEWED_S)
    assert slurm.changed == 1


def test_a_reservation_of_an_earlier_process_is_taken_over(slurm: Reservation, kept: KeptNodes) -> None:
    slurm.nodes = ["n7"]
    kept.keep({"n0"}, 0.0)
    assert (slurm.nodes, slurm.made, slurm.changed) == (["n0"], 0, 1)


def test_a_reservation_that_has_ended_is_made_again(slurm: Reservation, kept: KeptNodes) -> None:
    kept.keep({"n0"}, 0.0)
    slurm.nodes = None
    kept.keep({"n1"}, 1.0)
    assert (slurm.nodes, slurm.made) == (["n1"], 2)
    slurm.nodes = None
    kept.keep((), 2.0)


def test_a_refusal_is_told_and_slurm_is_asked_again_later(
    slurm: Reservation, kept: KeptNodes, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.refuses = True
    kept.keep({"n0"}, 0.0)
    assert "ordinary jobs may take them" in caplog.text
    slurm.refuses = False
    kept.keep({"n0"}, RETRY_S - 1)
    assert slurm.nodes is None, "not in each tick, with a message each"
    kept.keep({"n0"}, RETRY_S)
    assert slurm.nodes == ["n0"]


# --- with the cluster: n0 in `gpu`, n1 in `debug`, of 4 GPUs each

HERE, THERE = Placement("t4", "gpu", (Share("n0", 1),)), Placement("t4", "debug", (Share("n1", 1),))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def beside(told: Told, spool: Spool) -> SlurmCluster:
    """A cluster as a new penstockd opens it."""
    settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=spool.folder)
    return SlurmCluster(told, told, spool, SimulatedClock(), settings, lambda spec: None)  # type: ignore[arg-type]


@pytest.fixture
def cluster(told: Told, spool: Spool) -> SlurmCluster:
    return beside(told, spool)


def running(**fields: Any) -> Any:
    return pending("gpu", state="RUNNING", nodes=("n0",), priority=9, start_s=10.0, **fields)


def test_the_nodes_of_a_move_are_kept_from_the_stop_to_the_start(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [running()]
    cluster.observe()
    cluster.apply([Migrate("7", 1, THERE)])
    assert ([each.kind for each in told.written], told.kept) == (["requeue_hold"], [("n1",)])
    told.listed = [pending("gpu")]
    cluster.observe()
    cluster.apply([Start("7", 1, THERE)])
    assert [each.kind for each in told.written[1:]] == ["place", "release", "put_first"]
    assert told.kept == [("n1",), ()]


def test_the_nodes_stay_kept_for_a_job_whose_start_fails(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [running()]
    cluster.observe()
    cluster.apply([Migrate("7", 1, THERE)])
    told.listed, told.goes_away_at = [pending("gpu")], "7"
    cluster.observe()
    with contextlib.suppress(ClusterAway):
        cluster.apply([Start("7", 1, THERE)])
    assert told.kept == [("n1",)]


def test_a_job_that_shrinks_keeps_its_node(told: Told, cluster: SlurmCluster) -> None:
    told.listed = [running(gpus_per_node=2)]
    cluster.observe()
    cluster.apply([Migrate("7", 1, HERE)])
    assert told.kept == [("n0",)]


@pytest.mark.parametrize(("waits_since_s", "first"), [(None, False), (50.0, False), (150.0, True)])
def test_a_job_that_starts_goes_before_ordinary_jobs_that_came_later(
    told: Told, cluster: SlurmCluster, waits_since_s: float | None, first: bool
) -> None:
    """It came at 100 s. Without an ordinary job that waits, there is nothing to keep."""
    ordinary = dataclasses.replace(
        pending("gpu", priority=5), id="8", number=8, comment="", eligible_s=waits_since_s, reason="Resources"
    )
    told.listed = [pending("gpu", submit_s=100.0), *([] if waits_since_s is None else [ordinary])]
    cluster.observe()
    cluster.apply([Start("7", 1, HERE)])
    assert [each.kind for each in told.written] == ["place", "release", *(["put_first"] if first else [])]
    assert told.kept == ([("n0",), ()] if first else [])


def test_a_job_that_slurm_moved_has_no_claim(told: Told, cluster: SlurmCluster, spool: Spool) -> None:
    """Penstock did not stop it, so its GPUs were not freed for it."""
    spool.tell(ControlMessage(job_id="7", epoch=3, round=1, submitted_s=1.0, submitted_to="gpu"), 0)
    told.listed = [pending("gpu")]
    cluster.observe()
    cluster.apply([Start("7", 1, HERE)])
    assert told.kept == []


def plain(**fields: Any) -> Any:
    """A plain job that has waited long for 3 GPUs on one of both nodes."""
    blank = {"id": "8", "number": 8, "comment": "", "eligible_s": -1000.0, "reason": "Resources", "gpus_per_node": 3}
    return dataclasses.replace(pending("gpu", priority=5), partition=("gpu", "debug"), **(blank | fields))


RESTARTS = pytest.mark.parametrize("restarts", [False, True])
"""Whether a new penstockd goes on with the last round."""


def resumed(told: Told, spool: Spool, state: ClusterState, **placements: Placement) -> SlurmCluster:
    """The cluster of a new penstockd whose last round saw this state."""
    given = {
        job.removeprefix("job_"): Assignment(each, Reason(ReasonCode.CHOSEN, "by hand"), 1.0)
        for job, each in placements.items()
    }
    cluster = beside(told, spool)
    cluster.resume(Snapshot(1, 0.0, state.nodes, state.jobs, {}), Plan(1, given))
    return cluster


@RESTARTS
def test_room_for_a_plain_job_stays_where_it_was_made(
    told: Told, cluster: SlurmCluster, spool: Spool, restarts: bool
) -> None:
    """It went to the GPUs that a job had left for the next step of the same moves, and Slurm gave them to others."""
    here = running(id="6", number=6, gpus_per_node=3)
    there = dataclasses.replace(here, id="9", number=9, nodes=("n1",), partition=("debug",))
    left = dataclasses.replace(pending("debug", restarts=1), id="9", number=9)
    for last, used in ((there, 3), (left, 0), (there, 3)):
        told.listed, told.used = [here, last, plain()], {"n0": 3, "n1": used}
        state = cluster.observe()
        assert {node.name: node.set_aside_for for node in state.nodes} == {"n0": "8", "n1": ""}
        if restarts:
            cluster = resumed(told, spool, state)


@RESTARTS
def test_gpus_that_a_job_is_on_its_way_to_are_no_room(
    told: Told, cluster: SlurmCluster, spool: Spool, restarts: bool
) -> None:
    other = running(id="6", number=6, gpus_per_node=3)
    where = Placement("t4", "debug", (Share("n1", 3),))
    told.listed, told.used = [running(), other], {"n0": 4}
    state = cluster.observe()
    cluster.apply([Migrate("7", 1, where)])
    if restarts:
        cluster = resumed(told, spool, state, job_7=where)
    told.listed, told.used = [pending("gpu", restarts=1), other, plain()], {"n0": 3}
    nodes = cluster.observe().nodes
    assert {node.name: node.set_aside_for for node in nodes} == {"n0": "8", "n1": ""}
    cluster.apply([Migrate("7", 1, where)])
    assert told.kept == [("n1",)] * (1 + restarts)


@pytest.mark.parametrize("moves", [False, True])
def test_a_round_between_two_runs_of_a_job_leaves_the_room_that_it_made(
    told: Told, cluster: SlurmCluster, spool: Spool, moves: bool
) -> None:
    """Otherwise the job got all GPUs again, and was stopped again in the next round. A job that only waits came first."""
    moved_s = 1.0 if moves else None
    spool.tell(ControlMessage(job_id="7", epoch=3, round=1, submitted_s=1.0, moved_s=moved_s, holds=1), 0)
    ordinary = dataclasses.replace(
        pending("gpu", priority=5),
        id="8",
        number=8,
        comment="",
        eligible_s=-1000.0,
        reason="Resources",
        gpus_per_node=3,
    )
    told.listed = [pending("gpu", submit_s=-2000.0, restarts=1, reason="job requeued in held state"), ordinary]
    state = cluster.observe()
    assert [job.id for job in state.jobs] == ["7"]
    assert {node.name: node.set_aside_for for node in state.nodes} == {"n0": "8" if moves else "", "n1": ""}


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "ReqNodeNotAvail, May be reserved for other job",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ],
)
def test_ordinary_jobs_are_due_by_the_time_for_which_they_wait(reason: str) -> None:
    """The last reason is that of a job on whose nodes a placeholder job of higher priority is about to start."""
    waits = {"priority": 5, "reason": "Resources"}
    jobs = [
        pending("gpu", eligible_s=40.0, **waits),
        pending("gpu", eligible_s=30.0, priority=5, reason=reason),
        pending("gpu", eligible_s=10.0, priority=5, reason="Dependency"),
        pending("gpu", eligible_s=10.0, priority=0, reason="JobHeldUser"),
        pending("other", eligible_s=10.0, **waits),
        running(eligible_s=10.0),
    ]
    assert due_s(jobs, ["gpu"]) == 30.0
    assert due_s(jobs[2:], ["gpu"]) == math.inf


def test_a_process_that_follows_puts_a_released_job_first_and_then_ends_the_reservation(
    told: Told, cluster: SlurmCluster, spool: Spool
) -> None:
    """The one before has died between the release and the priority: the reservation would have ended without it."""
    control = ControlMessage(job_id="7", epoch=3, round=1, submitted_s=1.0, submitted_to="gpu", moved_s=1.0, holding=0)
    spool.tell(control.model_copy(update={"gpu_type": "t4", "nodes": 1, "gpus": 1}), 0)
    told.kept = [("n0",)]
    told.listed = [pending("gpu", priority=9, required_nodes=("n0",), restarts=0)]
    cluster.observe()
    cluster.apply([Start("7", 1, HERE)])
    assert [each.kind for each in told.written] == ["put_first"]
    assert told.kept == [("n0",), ("n0",), ()]


def test_a_reservation_that_nothing_needs_is_ended_at_the_start(slurm: Reservation, kept: KeptNodes) -> None:
    slurm.nodes = ["n7"]
    kept.keep((), 0.0)
    assert slurm.nodes is None


@pytest.mark.parametrize("saves", [False, True])
def test_a_job_keeps_its_gpus_if_others_have_taken_the_new_ones(
    told: Told, cluster: SlurmCluster, spool: Spool, saves: bool
) -> None:
    if saves:
        asked = Request(id="1-3", asked_s=1.0)
        spool.tell(ControlMessage(job_id="7", epoch=3, round=1, submitted_s=1.0, request=asked, moved_s=1.0), 0)
    told.listed, told.used = [running()], {"n1": 4}
    cluster.observe()
    (outcome,) = cluster.apply([Migrate("7", 1, THERE)])
    assert (told.written, told.kept) == ([], [])
    assert "others have taken the GPUs" in outcome.text
    control = spool.control("7")
    assert control is None or (control.request, control.moved_s) == (None, None)
    told.used = {"n1": 3}
    cluster.observe()
    cluster.apply([Migrate("7", 1, THERE)])
    assert [each.kind for each in told.written] == ["requeue_hold"]
