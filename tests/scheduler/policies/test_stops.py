"""Reasons for stops, worked by hand: one snapshot, and one plan that a policy might make of it, for each line of the list."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import (
    Assignment,
    CloudAssignment,
    CloudRun,
    CloudState,
    GpuLimit,
    LeaveCause,
    LeaveRequest,
    Offer,
    Pack,
    Phase,
    Plan,
    Reason,
    ReasonCode,
    SharedGpus,
    Stop,
    StopCode,
)
from penstock_scheduler.rounds.policies.stops import stopped, with_reasons
from tests.scheduler.builders import job, on, snapshot, table
from tests.scheduler.policies.sharing_cases import running, shared

WHY = Reason(ReasonCode.CHOSEN, "why")
FAST = {"a": table(t4={1: 1.0, 2: 1.8, 4: 3.0}), "b": table(t4={1: 1.0, 2: 1.8, 4: 3.0})}


def plan(reason=WHY, goodput=1.0, **given):
    """Job -> placement, or None for a job that waits."""
    assignments = {name: Assignment(where, reason, goodput) for name, where in given.items() if where is not None}
    return Plan(1, assignments, {name: reason for name, where in given.items() if where is None})


def state(*jobs, **changes):
    made = snapshot("t4:2x4", list(jobs), FAST)
    return dataclasses.replace(made, **changes)


def leaving(cause, by_s=None):
    first, second = state().nodes
    return dataclasses.replace(first, may_start=False, leave=LeaveRequest(cause, "oz", by_s)), second


A, B = running("a", "t4-00", 2), job("b", max_gpus=4)
A_FLEXIBLE = running("a", "t4-00", 2, min_gpus=1, max_gpus=4)


def test_a_job_that_keeps_what_it_has_is_not_stopped():
    seen = state(A, B)
    kept = plan(a=on("t4", t4_00=2), b=on("t4", t4_01=4))
    assert stopped(seen, kept) == ()
    assert with_reasons(seen, kept).stops == {}
    assert with_reasons(seen, dataclasses.replace(kept, stops={"a": Stop(StopCode.GAIN, "x")})).stops == {}


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.STARTING, Phase.STOPPING])
def test_only_what_runs_is_stopped(phase):
    assert stopped(state(dataclasses.replace(A, phase=phase)), plan(a=None)) == ()


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (LeaveCause.DRAIN, StopCode.DRAIN),
        (LeaveCause.PENSTOCK_DRAIN, StopCode.PENSTOCK_DRAIN),
        (LeaveCause.RESERVATION, StopCode.RESERVATION),
    ],
)
def test_a_request_to_leave_comes_first_and_says_by_when(cause, code):
    seen = state(A, B, nodes=leaving(cause, 2000.0))
    stop = with_reasons(seen, plan(goodput=9.0, a=on("t4", t4_01=4))).stops["a"]
    assert (stop.code, stop.by_s) == (code, 2000.0)
    assert stop.code.is_asked_for


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (ReasonCode.GPU_BUDGET, StopCode.LIMIT),
        (ReasonCode.STOPPED_BY_GROUP, StopCode.TRIALS),
    ],
)
def test_some_reasons_of_the_plan_are_reasons_to_stop(reason, code):
    stop = with_reasons(state(A, B), plan(Reason(reason, "words"), a=None)).stops["a"]
    assert (stop.code, stop.text) == (code, "words")


def test_a_gain_names_both_goodputs():
    stop = with_reasons(state(A_FLEXIBLE), plan(goodput=3.0, a=on("t4", t4_01=4))).stops["a"]
    assert stop == Stop(StopCode.GAIN, "from 2 t4 to 4 t4: about 1.7 times as fast", 1.8, 3.0)


@pytest.mark.parametrize(("goodput", "restart_cost_s"), [(1.85, 0.0), (2.0, 3600.0 * 0.2 / 1.8 + 1)])
def test_a_gain_of_a_few_percent_or_less_than_the_restart_is_no_reason(goodput, restart_cost_s):
    seen = state(A_FLEXIBLE, B)
    seen.facts["a"] = dataclasses.replace(seen.facts["a"], restart_cost_s=restart_cost_s)
    assert with_reasons(seen, plan(goodput=goodput, a=on("t4", t4_01=4))).stops == {}
    stop = with_reasons(seen, plan(goodput=goodput, a=on("t4", t4_01=4), b=on("t4", t4_00=4))).stops["a"]
    assert (stop.code, stop.makes_room_for) == (StopCode.PREEMPTED, "b")


def test_a_job_makes_room_for_the_one_that_gets_its_node():
    wanted = plan(goodput=1.8, a=on("t4", t4_01=2), b=on("t4", t4_00=4))
    stop = with_reasons(state(A, B), wanted).stops["a"]
    assert (stop.code, stop.makes_room_for) == (StopCode.PREEMPTED, "b")
    assert stop.text == "makes room for job b on node t4-00"
    assert (stop.goodput_before, stop.goodput_after) == (1.8, 1.8)


def test_a_job_that_waits_now_makes_room_for_one_that_gets_more_of_its_type():
    stop = with_reasons(state(A, B), plan(a=None, b=on("t4", t4_01=4))).stops["a"]
    assert (stop.code, stop.makes_room_for, stop.goodput_after) == (StopCode.PREEMPTED, "b", 0.0)


def test_a_plain_job_gets_its_gpus():
    first, second = state().nodes
    nodes = dataclasses.replace(first, gpus_others=4, set_aside_for="77"), second
    stop = with_reasons(state(A, nodes=nodes), plan(a=None)).stops["a"]
    assert stop.text == "makes room for job 77, which Penstock does not manage, on node t4-00"


def test_a_limit_is_lower_than_what_its_jobs_hold():
    limit = GpuLimit("user", "ada", 1)
    stop = with_reasons(state(A, limits=(limit,)), plan(a=None)).stops["a"]
    assert stop == Stop(StopCode.LIMIT, "the limit of 1 GPUs for user ada does not allow the GPUs that it has")
    enough = dataclasses.replace(limit, gpus=2)
    assert with_reasons(state(A, limits=(enough,)), plan(a=None)).stops == {}


def test_its_user_no_longer_wants_what_it_has():
    stop = with_reasons(state(running("a", "t4-00", 2, min_gpus=4, max_gpus=4)), plan(a=None)).stops["a"]
    assert stop.code is StopCode.ASKED


def test_a_job_leaves_the_gpus_that_it_shares():
    group = SharedGpus("t4-00", 2, (Pack(("a",), 2), Pack(("c",), 2)))
    seen = shared(state(A, running("c", "t4-00", 2)), group)
    stop = with_reasons(seen, plan(goodput=1.8, a=on("t4", t4_01=2), c=on("t4", t4_00=2))).stops["a"]
    assert stop.code is StopCode.SHARING


def test_a_recall_is_a_stop_with_its_text():
    offer = Offer("g@b", "a10g", 1, 1, 1.0)
    cloud = CloudState((offer,), (CloudRun("b", offer, 0.0, 1.0),))
    back = Reason(ReasonCode.RECALLED, "comes back")
    wanted = Plan(1, bursts={"b": CloudAssignment(offer, 1.0, back, stays=True)}, recalls={"b": back})
    seen = state(B, cloud=cloud)
    assert with_reasons(seen, wanted).stops == {"b": Stop(StopCode.RECALL, "comes back")}
    on_its_way = CloudState((offer,), (CloudRun("b", offer, 0.0, 1.0, ending=True),))
    assert stopped(state(B, cloud=on_its_way), wanted) == ()


def test_nothing_tells_why():
    """Nobody gets its GPUs, and it gains nothing."""
    assert [each.id for each in stopped(state(A), plan(goodput=1.8, a=on("t4", t4_01=2)))] == ["a"]
    assert with_reasons(state(A), plan(goodput=1.8, a=on("t4", t4_01=2))).stops == {}
    assert with_reasons(state(A), plan(a=None)).stops == {}


def test_what_the_policy_says_comes_first():
    said = {"a": Stop(StopCode.MEASURING, "on a100")}
    assert with_reasons(state(A), dataclasses.replace(plan(a=None), stops=said)).stops == said
