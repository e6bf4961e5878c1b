"""Runs that report nothing, although their scripts should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_profiles.wire import Report, Started
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.model import ClusterState, Phase
from penstock_scheduler.safety.health import HealthSettings, warnings
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on
from tests.scheduler.test_health import found, ticked

STARTED_S = 10_000.0
AFTER_S = 1800.0


def report(job_id: str, epoch: int, time_s: float) -> Report:
    body = Started(gpu_type="t4", gpu_ids={"t4-00": (0,)})
    return Report(job_id=job_id, epoch=epoch, sequence=0, time_s=time_s, body=body)


@pytest.mark.parametrize("restarted", [False, True], ids=["the same penstockd", "one that started since"])
def test_a_run_without_reports_is_found_only_where_an_earlier_run_reported(tmp_path, restarted):
    """Of seven jobs that began anew at 10,000 s, `moved` alone should have reported; `late` first does after 40 min."""
    store = open_store(tmp_path, writer=True)
    store.add_reports([report(name, 1, STARTED_S - 500) for name in ("moved", "well", "stands", "queued", "late")])
    store.add_reports([report("well", 2, STARTED_S + 30), report("first", 1, STARTED_S - 500)])
    held = {"phase": Phase.RUNNING, "allocation": on("t4", t4_00=1), "started_s": STARTED_S, "restarts": 1}
    jobs = (
        job("moved", **held),
        job("well", **held),
        job("plain", **held),  # it never reported: it may not use Penstock's client
        replace(job("stands", **held), suspended_s=900.0),
        job("first", **held | {"restarts": 0}),
        job("late", **held),
        job("queued"),
    )
    board = Board(store, None)
    board.observed(ClusterState((), jobs), STARTED_S + 10)
    for each in ("moved", "well", "stands", "late", "first"):
        board.take_reports([report(each, 1, STARTED_S - 500)])
    if restarted:
        board = Board(store, None)
        board.observed(ClusterState((), jobs), STARTED_S + 20)
    assert board.unheard(AFTER_S, STARTED_S + AFTER_S - 1) == []
    assert board.unheard(AFTER_S, STARTED_S + AFTER_S + 1) == ["moved", "late"]
    store.add_reports([report("late", 2, STARTED_S + 2400)])
    assert board.unheard(AFTER_S, STARTED_S + 2500) == ["moved"]


def test_a_job_whose_batch_only_the_executor_can_grow_should_report(tmp_path):
    """And a plain script need not: it may use no client of Penstock's."""
    held = {"phase": Phase.RUNNING, "allocation": on("t4", t4_00=1), "started_s": STARTED_S}
    jobs = (job("grows", max_batch_size=512, **held), job("plain", **held))
    store = open_store(tmp_path, writer=True)
    board = Board(store, None)
    board.observed(ClusterState((), jobs), STARTED_S + 10)
    assert board.unheard(AFTER_S, STARTED_S + AFTER_S - 1) == []
    assert board.unheard(AFTER_S, STARTED_S + AFTER_S + 1) == ["grows"]
    late = report("grows", 1, STARTED_S + AFTER_S)
    store.add_reports([late])
    board.take_reports([late])
    assert board.unheard(AFTER_S, STARTED_S + AFTER_S + 1) == []


def test_the_warning_names_the_jobs():
    clock = SimulatedClock()
    loop = ticked(clock)
    (warning,) = warnings(found(loop, clock, unheard=[str(i) for i in range(7)]), HealthSettings())
    assert "of 0, 1, 2, 3, 4 and others, for 30 min or longer" in warning
