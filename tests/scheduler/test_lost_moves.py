"""Jobs that were moved and hold nothing afterwards: from when, and until when, they keep others from being moved for a gain."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from penstock_scheduler.model import Assignment, ClusterState, Job, Phase, Plan, Reason, ReasonCode, Stop, StopCode
from penstock_scheduler.rounds.lost_moves import LOST_S, MOST_S, LostMoves
from penstock_scheduler.rounds.policies.staying import Staying
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.policies.test_calm import Fixed
from tests.scheduler.test_plan_gate import NODES, Site

RUNS = job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=4, goodput_table={"t4": {"1": 1, "4": 4}})
THERE = on("t4", t4_01=4)
WAITS = dataclasses.replace(RUNS, phase=Phase.QUEUED, allocation=None, restarts=1)
SENT = dataclasses.replace(RUNS, phase=Phase.STARTING, allocation=THERE, restarts=1)
AGAIN = dataclasses.replace(RUNS, allocation=THERE, restarts=1)
ONE = "1 job that was moved holds no GPUs, and no other job is moved for a gain until that is over (10 minutes at most)"


def plan(*, moves: bool) -> Plan:
    given = {"1": Assignment(THERE if moves else on("t4", t4_00=1), Reason(ReasonCode.CHOSEN, "told"), 1.0)}
    return Plan(1, given, stops={"1": Stop(StopCode.GAIN, "told")} if moves else {})


@pytest.fixture
def moved() -> LostMoves:
    """Job 1 was moved at 0 s."""
    made = LostMoves()
    made.accepted(snapshot(NODES, [RUNS]), plan(moves=True))
    return made


def seen(moves: LostMoves, now_s: float, *jobs: Job, **fields: object) -> str:
    moves.saw(dataclasses.replace(ClusterState(NODES, jobs), **fields), now_s)  # type: ignore[arg-type]
    return moves.text


def test_a_job_that_saves_for_long_and_starts_in_time_is_not_lost(moved: LostMoves) -> None:
    leaves = dataclasses.replace(RUNS, phase=Phase.STOPPING)
    for now_s, each in ((1.0, RUNS), (500.0, leaves), (600.0, WAITS), (600.0 + LOST_S - 1, SENT), (700.0, AGAIN)):
        assert not seen(moved, now_s, each)
    moved.accepted(snapshot(NODES, [AGAIN]), plan(moves=False))
    assert moved.watched == ()
    assert not seen(moved, 800.0, WAITS), "its user has requeued it"


def test_a_job_that_holds_nothing_for_a_minute_is_lost_until_it_runs(
    moved: LostMoves, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not seen(moved, 10.0, WAITS)
    assert seen(moved, 10.0 + LOST_S, SENT) == ONE
    moved.accepted(snapshot(NODES, [WAITS]), plan(moves=False))
    assert seen(moved, 11.0 + LOST_S, WAITS) == ONE
    assert caplog.text.count("hold no GPUs") == 1
    assert not seen(moved, 12.0 + LOST_S, AGAIN)
    assert "jobs may be moved again" in caplog.text


def test_it_is_not_lost_while_its_nodes_boot(moved: LostMoves) -> None:
    nodes = tuple(dataclasses.replace(node, boot_s=90.0 if node.name == "t4-01" else 0.0) for node in NODES)
    assert not seen(moved, 10.0, SENT, nodes=nodes)
    assert not seen(moved, 500.0, SENT, nodes=nodes)


def test_a_doubt_ends_by_itself_or_with_the_job(moved: LostMoves) -> None:
    seen(moved, 0.0, WAITS)
    assert seen(moved, LOST_S + MOST_S - 1, WAITS) == ONE
    assert not seen(moved, LOST_S + MOST_S, WAITS)
    assert not seen(moved, 2 * MOST_S, WAITS)
    moved.accepted(snapshot(NODES, [RUNS]), plan(moves=True))
    seen(moved, 0.0, WAITS)
    assert seen(moved, LOST_S, WAITS) == ONE
    assert not seen(moved, LOST_S + 1), "it has ended, is held, or waits for something else"


def test_the_loop_moves_no_job_for_a_gain_meanwhile_and_a_restart_changes_nothing() -> None:
    """Job 2 would grow from one GPU to four that are idle."""
    small = dataclasses.replace(RUNS, id="2", allocation=on("t4", t4_05=1))
    policy = Fixed(**{"1": THERE})
    site = Site([RUNS, small], Staying(policy))
    site.ticks(1)
    assert site.stopped == {"1"}
    site.state = dataclasses.replace(site.state, jobs=(WAITS, small))
    site.ticks(7)
    site.again()
    site.ticks(8)
    policy.placements["2"] = on("t4", t4_06=4)
    site.ticks(12)
    last = site.store.last_round()
    assert last is not None
    assert (last.snapshot.no_gain, last.plan.assignments["2"].reason.text) == (ONE, f"keeps 1 t4: {ONE}")
    assert site.stopped == {"1"}
    site.state = dataclasses.replace(site.state, jobs=(AGAIN, small))
    site.ticks(12)
    assert site.stopped == {"1", "2"}
