"""Estimates from the process that makes them to what clients see."""

from __future__ import annotations

import time

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.estimate_messages import Estimates, JobEstimate, TimeRange
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.estimator import Estimator
from penstock_scheduler.daemon.service.waits import WaitLog
from penstock_scheduler.model import Phase
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator.estimates import NOTES, EstimatesOrder
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import ADAS, BOBS, serving


@pytest.fixture(params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path):
    with serving(tmp_path, separate=request.param) as api:
        yield api


def test_jobs_queue_and_explanations_have_the_estimate(api):
    now_s = time.time()
    start, end = (TimeRange(from_s=now_s + at_s, to_s=now_s + 4 * at_s) for at_s in (700.0, 8000.0))
    estimate = JobEstimate(at_s=now_s, start=start, end=end)
    api.board.estimates = Estimates(round=1, at_s=now_s, seconds=0.1, jobs={"2": estimate})
    WaitLog(api.board.store).observed(snapshot_state(ADAS, BOBS), now_s)
    api.look(ADAS, BOBS)
    with api.client("bob") as bob, api.client("ada") as ada:
        assert bob.job("2").estimate == estimate
        assert [view.estimate for view in bob.jobs()] == [estimate]
        assert [each.estimate for each in ada.queue() if each.job == "2"] == [estimate], (
            "when, not why: as squeue --start"
        )
        assert "It is expected to start in 10 to 50 minutes (80 %)." in bob.explain("2").lines
        assert ada.job("1").estimate is None
    stored = api.board.store.job("2")
    assert stored is not None
    assert stored.estimate is None, "an estimate makes no new version of a job"


def test_a_job_that_waits_has_no_end_that_was_estimated_while_it_ran(api):
    now_s = time.time()
    ran = JobEstimate(at_s=now_s, end=TimeRange(from_s=now_s + 60, to_s=now_s + 120))
    api.board.estimates = Estimates(round=1, at_s=now_s, seconds=0.1, jobs={"2": ran})
    WaitLog(api.board.store).observed(snapshot_state(ADAS, BOBS), now_s)
    api.look(ADAS, BOBS)
    with api.client("bob") as bob:
        told = [bob.job("2").estimate, *(each.estimate for each in bob.queue() if each.job == "2")]
        assert [each.end for each in told] == [None, None]
        assert "Its start and end are not known: it held GPUs when this was last estimated." in bob.explain("2").lines


def snapshot_state(*jobs):
    from penstock_scheduler.model import ClusterState

    return ClusterState(snapshot("t4:2x4", []).nodes, jobs)


def test_a_process_of_its_own_estimates_and_ends_with_penstockd(tmp_path):
    """It reads the newest round of the store; nothing is asked of the loop. A process that is killed is no harm to penstockd."""
    store = open_store(tmp_path, writer=True)
    held = job("1", phase=Phase.RUNNING, max_gpus=4, min_gpus=4, allocation=on("t4", t4_00=4))
    state = snapshot("t4:1x4", [held, job("2", max_gpus=4, min_gpus=4)], remaining={"1": 2400.0, "2": 40.0})
    policy, choice = make_policy("fifo")
    store.save_round(RoundRecord(state, choice, policy.decide(state)))
    board = Board(store, None)
    order = EstimatesOrder(store=str(tmp_path), cores=1.0, every_s=1.0, restart_cost_s=30.0, families=None)
    estimator = Estimator(order, board, first_s=0.0)
    estimator.start()
    try:
        wait_for(lambda: board.estimates is not None, 180, "the first estimates")
    finally:
        estimator.stop()
    assert estimator._process is not None
    assert estimator._process.returncode is not None
    assert board.estimates is not None
    start = board.estimates.jobs["2"].start
    assert start is not None
    assert start.to_s is not None
    assert state.time_s + 300 < start.from_s < state.time_s + 600 < start.to_s < state.time_s + 1500
    assert [each["job"] for each in store.control(NOTES)["start"]] == ["2"], "it outlives a restart"
    store.close()
