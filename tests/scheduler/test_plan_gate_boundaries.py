"""The plan gate at each of its boundaries: one second, one job or one GPU on either side."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import ValidationError

from penstock_scheduler.model import (
    Assignment,
    CloudRun,
    CloudState,
    ClusterState,
    Offer,
    Phase,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
    Stop,
    StopCode,
    WaitingJob,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import GateRecord, RoundRecord, StoppedThen
from penstock_scheduler.rounds.plan_gate import (
    APPROVED_S,
    Approval,
    NothingToApprove,
    PlanGate,
    SafetySettings,
    View,
    counted,
    gpus_of,
    lacks,
    much_lacks,
    refusals,
)
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import job, on, snapshot

SAFETY = SafetySettings()
GAIN = Stop(StopCode.GAIN, "faster")


def stops(state: Snapshot, count: int) -> Plan:
    """The first `count` jobs are stopped for a gain, and the others keep what they have."""
    names = [each.id for each in state.jobs]
    why = Reason(ReasonCode.KEPT, "keeps")
    given = {
        each.id: Assignment(each.allocation, why, 1.0) for each in state.jobs[count:] if each.allocation is not None
    }
    return Plan(state.round, given, dict.fromkeys(names[:count], why), stops=dict.fromkeys(names[:count], GAIN))


def large_jobs(count: int = 8) -> Snapshot:
    """Jobs of 4 GPUs, each on a node of its own."""
    jobs = [
        job(str(n), phase=Phase.RUNNING, allocation=on("t4", **{f"t4_0{n}": 4}), max_gpus=4, started_s=0.0)
        for n in range(count)
    ]
    return snapshot(nodes_from_spec(f"t4:{count}x4"), jobs)


@pytest.mark.parametrize(("count", "refused"), [(1, False), (3, False), (4, False), (5, True), (8, True)])
def test_few_jobs_may_be_stopped_whatever_their_share(count: int, refused: bool) -> None:
    state = large_jobs()
    assert bool(refusals(state, stops(state, count), (), SAFETY)) is refused


@pytest.mark.parametrize(("age_s", "refused"), [(599.9, True), (600.0, False)])
def test_stops_count_for_the_window_and_no_longer(age_s: float, refused: bool) -> None:
    state = large_jobs()
    gate = PlanGate(SAFETY, state, GateRecord((StoppedThen(state.time_s - age_s, 1, 4),), (), {}))
    assert bool(gate.judge(state, stops(state, 4))) is refused


def test_stops_that_leave_no_gpu_idle_are_not_counted_for_later() -> None:
    state = large_jobs()
    gate = PlanGate(SAFETY)
    gate.accepted(state, stops(state, 0))
    assert gate.note((), {}).recent == ()
    gate.accepted(state, stops(state, 1))
    assert gate.note((), {}).recent == (StoppedThen(state.time_s, 1, 4),)


def test_jobs_that_share_a_gpu_hold_it_once() -> None:
    """Two jobs on one GPU, and one on another: the two leave 1 GPU idle together, and one of the two leaves none."""
    jobs = [
        job(name, phase=Phase.RUNNING, allocation=on("t4", **{node: 1}), max_gpus=1)
        for name, node in (("a", "t4_00"), ("b", "t4_00"), ("c", "t4_01"))
    ]
    state = snapshot(nodes_from_spec("t4:2x1"), jobs)
    assert counted(state, stops(state, 2)) == StoppedThen(state.time_s, 2, 1)
    assert counted(state, stops(state, 1)) == StoppedThen(state.time_s, 1, 0)
    assert counted(state, stops(state, 3)) == StoppedThen(state.time_s, 3, 2)


def test_a_job_in_the_cloud_counts_with_the_gpus_of_its_instance() -> None:
    offer = Offer("p3", "v100", 1, 8, 10.0)
    away = job("away", phase=Phase.RUNNING, max_gpus=8)
    here = job("here", phase=Phase.RUNNING, allocation=on("t4", t4_00=2), max_gpus=2)
    waits = job("waits")
    state = snapshot(nodes_from_spec("t4:1x4"), [away, here, waits])
    state = dataclasses.replace(state, cloud=CloudState((offer,), (CloudRun("away", offer, 0.0, 100.0),)))
    assert [gpus_of(state, each) for each in (away, here, waits)] == [8, 2, 0]


@pytest.mark.parametrize(("lost", "much"), [(1, False), (2, False), (3, True)])
def test_more_than_a_quarter_of_the_nodes_is_much(lost: int, much: bool) -> None:
    names = [f"n{n}" for n in range(8)]
    assert much_lacks(View(frozenset(names)), View(frozenset(names[lost:])), SAFETY) is much


def test_one_node_of_a_small_cluster_is_not_much() -> None:
    assert not much_lacks(View(frozenset("ab")), View(frozenset("a")), SAFETY)
    assert much_lacks(View(frozenset("ab")), View(), SAFETY)


@pytest.mark.parametrize(("jobs", "lost", "much"), [(8, 4, False), (8, 5, True), (40, 10, False), (40, 11, True)])
def test_more_than_four_jobs_and_than_a_quarter_of_them_is_much(jobs: int, lost: int, much: bool) -> None:
    names = [str(n) for n in range(jobs)]
    assert much_lacks(View(running=frozenset(names)), View(jobs=frozenset(names[lost:])), SAFETY) is much


@pytest.mark.parametrize(("after_s", "waits"), [(299.9, True), (300.0, False)])
def test_missing_nodes_hold_stops_up_for_the_grace_and_no_longer(after_s: float, waits: bool) -> None:
    state = large_jobs()
    gate = PlanGate(SAFETY, state, None, now_s=1000.0)
    gate.saw(ClusterState(state.nodes[1:], state.jobs), 1000.0 + after_s)
    assert bool(gate.incomplete) is waits
    assert bool(gate.judge(state, stops(state, 1))) is waits


def refused_round(time_s: float) -> RoundRecord:
    state = dataclasses.replace(large_jobs(), time_s=time_s)
    plan = stops(state, 5)
    return RoundRecord(
        state, PolicyChoice(), plan, gate=GateRecord((), ("too many",), {str(n): GAIN for n in range(5)})
    )


def test_an_approval_takes_a_round_of_the_last_quarter_of_an_hour() -> None:
    record = refused_round(1000.0)
    assert Approval.of(record, "root", 1000.0 + APPROVED_S).until_s == 1000.0 + 2 * APPROVED_S
    with pytest.raises(NothingToApprove):
        Approval.of(record, "root", 1000.1 + APPROVED_S)


@pytest.mark.parametrize(("time_s", "refused"), [(1899.9, False), (1900.0, True)])
def test_an_approval_ends_at_its_time(time_s: float, refused: bool) -> None:
    record = refused_round(1000.0)
    gate = PlanGate(SAFETY, approval=Approval.of(record, "root", 1000.0))
    state = dataclasses.replace(record.snapshot, time_s=time_s)
    assert bool(gate.judge(state, record.plan)) is refused


@pytest.mark.parametrize("share", [-0.01, 1.01])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    assert SafetySettings(stop_share=0.0).stop_share == 0.0
    assert SafetySettings(stop_share=1.0).stop_share == 1.0
    with pytest.raises(ValidationError):
        SafetySettings(stop_share=share)


@pytest.mark.parametrize(("count", "refused"), [(5, False), (9, False), (10, False), (11, True)])
def test_many_jobs_may_be_stopped_that_are_few_of_the_gpus(count: int, refused: bool) -> None:
    jobs = [job(str(n), phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1) for n in range(40)]
    state = snapshot(nodes_from_spec("t4:1x40"), jobs)
    assert bool(refusals(state, stops(state, count), (), SAFETY)) is refused


def test_a_full_node_makes_up_for_no_idle_one_and_a_node_that_is_gone_has_nothing_to_lose() -> None:
    state = large_jobs(3)
    new = job("new", min_gpus=8, max_gpus=8)
    starts = Assignment(on("t4", t4_00=4, t4_01=4), Reason(ReasonCode.CHOSEN, "starts"), 1.0)
    plan = stops(state, 3)
    plan = dataclasses.replace(plan, assignments={"new": starts})
    assert counted(dataclasses.replace(state, jobs=(*state.jobs, new)), plan).gpus == 4
    assert counted(dataclasses.replace(state, nodes=state.nodes[:2]), stops(state, 3)).gpus == 8


def test_a_view_has_the_jobs_that_run_and_no_others() -> None:
    jobs = [job(phase.value, phase=phase, allocation=on("t4", t4_00=1)) for phase in Phase if phase is not Phase.QUEUED]
    view = View.of(snapshot(nodes_from_spec("t4:1x8"), [*jobs, job("waits")]))
    assert view.running == {Phase.RUNNING.value}
    assert view.jobs == {*(each.id for each in jobs), "waits"}


def test_jobs_that_came_to_run_are_not_missing() -> None:
    before = View(running=frozenset("12"), jobs=frozenset("12"))
    assert not much_lacks(before, View(jobs=frozenset("12345678")), SAFETY)


def test_a_job_that_is_held_is_not_missing() -> None:
    state = large_jobs()
    gate = PlanGate(SAFETY, state, None, now_s=0.0)
    held = WaitingJob(dataclasses.replace(state.jobs[0], phase=Phase.QUEUED, allocation=None), "held", "is held")
    gate.saw(ClusterState(state.nodes, state.jobs[1:], waiting=(held,)), 1.0)
    assert gate.incomplete == ""
    gate.failed(2.0, "no answer")
    gate.saw(ClusterState(state.nodes, state.jobs[2:], waiting=(held,)), 3.0)
    assert "1 of 7 running jobs are missing (1)" in gate.incomplete


def test_an_approved_stop_keeps_the_reason_that_it_has() -> None:
    record = refused_round(1000.0)
    gate = PlanGate(SAFETY, approval=Approval.of(record, "root", 1000.0))
    plan = dataclasses.replace(record.plan, stops={"0": GAIN})
    codes = {name: stop.code for name, stop in gate.approved(record.snapshot, plan).stops.items()}
    assert codes == {"0": StopCode.GAIN, **dict.fromkeys("1234", StopCode.ASKED)}


def test_of_many_names_the_others_are_counted() -> None:
    assert lacks(View(frozenset("abcdefgh")), View()).endswith("(a, b, c, d, e and 3 others)")
