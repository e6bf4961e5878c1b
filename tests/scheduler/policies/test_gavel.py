import dataclasses
from typing import Any

import pytest

from penstock_scheduler.model import Configuration, GpuLimit, Phase, Plan, ReasonCode, Snapshot
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.common import Requests
from penstock_scheduler.rounds.policies.gavel import shares_of_time
from tests.scheduler.builders import job, on, snapshot, table, with_facts


def decide(state: Snapshot, **settings: Any) -> Plan:
    return make_policy("gavel", settings)[0].decide(state)


def wants(job_id: str, gpus: int = 1, **fields: Any):
    return job(job_id, min_gpus=gpus, max_gpus=gpus, adaptivity="rigid", **fields)


def shares(state: Snapshot, capacity: dict[str, int], unit: str = "normalised"):
    found, worth = shares_of_time(list(state.jobs), Requests().of(state), capacity, unit)
    return {each: {option.gpu_type: x for option, x in given.items()} for each, given in found.items()}, worth


def test_each_job_goes_where_it_gains_most():
    """One GPU of each type: A gains 4x by the a100 and B 2x. 4 + 1 beats 1 + 2."""
    models = {"A": table(t4={1: 10.0}, a100={1: 40.0}), "B": table(t4={1: 30.0}, a100={1: 60.0})}
    state = snapshot("a100:1x1,t4:1x1", [wants("A"), wants("B")], models)
    assert shares(state, {"a100": 1, "t4": 1})[0] == {"A": {"a100": 1, "t4": 0}, "B": {"a100": 0, "t4": 1}}
    plan = decide(state)
    assert plan.chosen == {"A": Configuration(1, 1, "a100"), "B": Configuration(1, 1, "t4")}


def test_in_steps_a_second_the_program_with_the_larger_numbers_wins():
    """As the authors' code has it: 40 + 30 against 10 + 80."""
    models = {"A": table(t4={1: 10.0}, a100={1: 40.0}), "B": table(t4={1: 30.0}, a100={1: 80.0})}
    jobs = [wants("A", batch_size=1), wants("B", batch_size=1)]
    assert decide(snapshot("a100:1x1,t4:1x1", jobs, models), throughput="steps").chosen["B"].gpu_type == "a100"
    # with 4 samples a step B's 30 and 80 samples/s are 7.5 and 20 steps/s: 40 + 7.5 against 10 + 20
    jobs = [wants("A", batch_size=1), wants("B", batch_size=4)]
    assert decide(snapshot("a100:1x1,t4:1x1", jobs, models), throughput="steps").chosen["A"].gpu_type == "a100"


def test_shares_are_those_of_the_linear_program():
    """Four GPUs: x_small + x_big is largest under x_small + 4 x_big <= 4 with 1 and 3/4. One more GPU makes 1/4 more."""
    state = snapshot("t4:1x4", [wants("small", 1), wants("big", 4)])
    found, worth = shares(state, {"t4": 4})
    assert found == {"small": {"t4": 1.0}, "big": {"t4": 0.75}}
    assert worth == pytest.approx({"t4": 0.25})
    eight = dict.fromkeys(("small", "big"), table(t4={1: 8.0, 4: 8.0}))
    assert shares(with_facts(state, model=eight), {"t4": 4}, "steps")[1] == pytest.approx({"t4": 2.0})


def test_jobs_that_are_alike_share_evenly():
    state = snapshot("t4:1x1", [wants("a"), wants("b"), wants("c"), wants("d")])
    assert shares(state, {"t4": 1})[0] == {each: {"t4": 0.25} for each in "abcd"}


def test_over_many_rounds_jobs_have_what_they_are_due():
    """Beside each other they do not fit, so they take turns: 1 to 3/4 of the time, 40 to 30 of 70 rounds."""
    attained = {"small": {"t4": 0.0}, "big": {"t4": 0.0}}
    rounds = {"small": 0, "big": 0}
    for _ in range(70):
        state = snapshot("t4:1x4", [wants("small", 1), wants("big", 4)], attained=attained)
        (chosen,) = decide(state, throughput="normalised").chosen.items()
        rounds[chosen[0]] += 1
        attained[chosen[0]]["t4"] += 360.0 * chosen[1].gpus
    assert rounds == {"small": pytest.approx(40, abs=1), "big": pytest.approx(30, abs=1)}


def test_what_is_due_on_one_type_is_not_had_on_another():
    """Both are due half of the a100 and half of the t4 (they are alike); who has had the a100 gets the t4."""
    model = table(t4={1: 1.0}, a100={1: 3.0})
    jobs = [wants("a", phase=Phase.RUNNING, allocation=on("a100", a100_00=1)), wants("b", submit_s=1)]
    state = snapshot("a100:1x1,t4:1x1", jobs, {"a": model, "b": model}, attained={"a": {"a100": 360.0}})
    assert {each: c.gpu_type for each, c in decide(state).chosen.items()} == {"a": "t4", "b": "a100"}
    # b has had 540 of the t4's 720 s, counting 180 s of each to begin with: a is due 0.5 / 0.25 = 2 there, b and a 1 on the a100
    other = with_facts(state.only([wants("a"), wants("b", submit_s=1)]), attained_gpu_s={"b": {"t4": 360.0}})
    assert {each: c.gpu_type for each, c in decide(other).chosen.items()} == {"a": "t4", "b": "a100"}


def test_gpus_that_nobody_due_can_use_are_filled():
    """`small` and 3/4 of `big` fill the shares and leave nothing for `minor`; but beside `small` alone three GPUs would idle."""
    minor = dataclasses.replace(wants("minor", 2), weight=0.1)
    state = snapshot("t4:1x4", [wants("small", 1), wants("big", 4), minor])
    assert shares(state, {"t4": 4})[0]["minor"] == {"t4": 0.0}
    assert set(decide(state, throughput="normalised").chosen) == {"small", "minor"}


def test_a_job_without_room_in_one_piece_gives_way_to_the_next():
    """By number the pair fits, but one GPU is free on each node: the single one that was left out starts instead."""
    state = snapshot("t4:2x2", [wants("pair", 2), wants("one", 1, submit_s=1)], attained={"one": {"t4": 9e5}})
    busy = tuple(dataclasses.replace(node, gpus_others=1) for node in state.nodes)
    plan = decide(dataclasses.replace(state, nodes=busy))
    assert set(plan.chosen) == {"one"}


def test_limits_hold():
    state = snapshot("t4:1x8", [wants("a", 2), wants("b", 2, submit_s=1), wants("c", 1, submit_s=2)])
    plan = decide(dataclasses.replace(state, limits=(GpuLimit("user", "ada", 3),)))
    assert set(plan.chosen) == {"a", "c"}


def test_a_job_that_stays_on_a_type_keeps_its_nodes():
    held = wants("held", 2, phase=Phase.RUNNING, allocation=on("t4", t4_02=2), submit_s=5)
    plan = decide(snapshot("t4:3x4", [held, wants("new", 4)]))
    assert plan.assignments["held"].placement == on("t4", t4_02=2)
    assert plan.assignments["held"].reason.code is ReasonCode.KEPT
    assert plan.assignments["new"].placement == on("t4", t4_00=4)


def test_a_request_that_no_node_has_takes_the_same_part_of_several():
    """Ten GPUs on nodes of 8 are 5 and 5, on nodes of 4 2 on each of five; 14 would be 2 on each of seven, but there are six."""
    state = snapshot("rtx:3x8,t4:6x4", [wants("ten", 10), wants("fourteen", 14, submit_s=1)])
    requests = Requests().of(state)
    assert set(requests["ten"]) == {Configuration(2, 10, "rtx"), Configuration(5, 10, "t4")}
    assert set(requests["fourteen"]) == {Configuration(2, 14, "rtx")}
    plan = decide(state)
    assert plan.chosen == {"ten": Configuration(5, 10, "t4"), "fourteen": Configuration(2, 14, "rtx")}
    assert [share.gpus for share in plan.assignments["fourteen"].placement.shares] == [7, 7]
