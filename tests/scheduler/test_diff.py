"""The difference between a plan and the cluster, as actions."""

from __future__ import annotations

import dataclasses

from penstock_scheduler.model import (
    Assignment,
    Hold,
    Migrate,
    Phase,
    Plan,
    Reason,
    ReasonCode,
    Resize,
    Start,
    Stop,
    StopCode,
)
from penstock_scheduler.rounds.diff import actions
from tests.scheduler.builders import job, on


def plan(**placements: object) -> Plan:
    reason = Reason(ReasonCode.CHOSEN, "why")
    given = {name: Assignment(where, reason, 1.0) for name, where in placements.items() if where is not None}  # type: ignore[arg-type]
    waiting = {name: reason for name, where in placements.items() if where is None}
    return Plan(7, given, waiting)


def test_actions_are_the_difference_between_plan_and_cluster():
    here, bigger, other = on("t4", t4_00=1), on("t4", t4_00=4), on("a100", a100_00=1)
    running = {"phase": Phase.RUNNING, "allocation": here}
    wanted = plan(a=here, b=here, c=bigger, d=other, e=None, f=None)
    jobs = [job("a"), *(job(name, **running) for name in "bcde"), job("f"), job("unknown", **running)]
    assert {action.job for action in actions(wanted, jobs)} == {"a"}, "no reason, no stop"
    wanted = dataclasses.replace(wanted, stops=dict.fromkeys("cde", Stop(StopCode.GAIN, "why")))
    found = {action.job: action for action in actions(wanted, jobs)}
    assert found == {
        "a": Start("a", 7, here),
        "c": Resize("c", 7, bigger),
        "d": Migrate("d", 7, other),
        "e": Hold("e", 7),
    }
    assert isinstance(actions(wanted, jobs)[-1], Start), "stops come before starts"


def test_a_job_that_was_asked_to_leave_and_may_stay_is_told_so():
    here = on("t4", t4_00=1)
    stopping = job("a", phase=Phase.STOPPING, allocation=here)
    assert actions(plan(a=here), [stopping]) == (Migrate("a", 7, here),)


def test_the_partition_alone_is_no_reason_to_move():
    held = on("t4", partition="t4", t4_00=1)
    running = job("a", phase=Phase.RUNNING, allocation=held)
    assert actions(plan(a=dataclasses.replace(held, partition="all")), [running]) == ()
