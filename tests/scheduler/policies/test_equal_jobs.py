"""Equal jobs never change places: a plan stops none of them only to give another what the first had."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_profiles.estimators import AnyEstimator, LinearEstimator
from penstock_scheduler.model import Assignment, Job, Phase, Placement, Plan, Reason, ReasonCode, Share, Snapshot
from penstock_scheduler.rounds.policies import REGISTRY, make_policy, pollux
from penstock_scheduler.rounds.policies.equals import settled, unswapped
from penstock_scheduler.rounds.policies.staying import Staying
from penstock_scheduler.rounds.policies.stops import stopped
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import job, on, snapshot, table, with_facts

RATES = {name: {2**k: (index + 1) * 1.6**k for k in range(4)} for index, name in enumerate(("t4", "a100"))}


@pytest.fixture(autouse=True, scope="module")
def quick_search() -> Iterator[None]:
    with mock.patch.multiple(pollux, GENERATIONS=10, POPULATION=20):
        yield


@st.composite
def equal_jobs(draw: st.DrawFn) -> Snapshot:
    """Jobs that differ in their number, in what they hold, and by a little in their age, speed and work."""
    spec = draw(st.sampled_from(["t4:3x4", "t4:2x4,a100:2x4", "t4:2x8", "t4:1x2,t4:1x4,a100:1x8"]))
    nodes = nodes_from_spec(spec)
    free = {node.name: node.gpus for node in nodes}
    low = draw(st.sampled_from([1, 1, 2]))
    most = draw(st.sampled_from([low, 4, 8]))
    linear = draw(st.booleans())
    jobs, models, work = [], {}, {}
    for number in range(draw(st.integers(2, 10))):
        gpus, node = draw(st.sampled_from([0, low, low, 2 * low])), draw(st.sampled_from(nodes))
        state: dict[str, object] = {}
        if 0 < gpus <= min(free[node.name], most):
            free[node.name] -= gpus
            held = Placement(node.gpu_type, node.partitions[0], (Share(node.name, gpus),))
            state = {"phase": Phase.RUNNING, "allocation": held, "started_s": 0.0}
        submit_s = draw(st.sampled_from([0.0, float(number)]))
        jobs.append(job(str(number), submit_s=submit_s, min_gpus=low, max_gpus=most, **state))
        models[str(number)] = LinearEstimator() if linear else a_little_faster(draw(st.sampled_from([1.0, 1.04])))
        work[str(number)] = draw(st.sampled_from([5000.0, 5400.0]))
    ids = [each.id for each in jobs]
    return with_facts(
        snapshot(nodes, jobs, models, time_s=draw(st.sampled_from([600.0, 10_000.0]))),
        largest_run_gpus=dict.fromkeys(ids, draw(st.sampled_from([None, 1, 2]))),
        restart_cost_s=dict.fromkeys(ids, draw(st.sampled_from([5.0, 30.0]))),
        remaining_work=work if draw(st.booleans()) else {},
        attained_gpu_s={each: {"t4": had / 10} for each, had in work.items()} if draw(st.booleans()) else {},
    )


def a_little_faster(factor: float) -> AnyEstimator:
    return table(**{name: {gpus: factor * rate for gpus, rate in rates.items()} for name, rates in RATES.items()})


def swapped(state: Snapshot, plan: Plan) -> int:
    """How many more of these jobs could keep their configuration if the plan gave the same ones to others of them."""
    running = [each for each in state.jobs if each.running_on is not None]
    held = Counter(each.running_as for each in running)
    given_to = {each.id: plan.assignments[each.id].configuration for each in running if each.id in plan.assignments}
    kept = sum(given_to.get(each.id) == each.running_as for each in running)
    return (held & Counter(given_to.values())).total() - kept


def places_swapped(state: Snapshot, plan: Plan) -> int:
    """How many more of the running jobs could keep their GPUs if the plan gave the same GPUs to others of them."""
    running = {each.id: each.running_on for each in state.jobs if each.running_on is not None}
    given_to = Counter(plan.assignments[each].placement.shares for each in running if each in plan.assignments)
    held = Counter(where.shares for where in running.values())
    return (held & given_to).total() - (len(running) - len(stopped(state, plan)))


def places_taken(state: Snapshot, plan: Plan) -> int:
    """How many jobs get what they have elsewhere, while another job, one that starts included, gets their GPUs."""
    held = {each.id: each.running_on for each in state.jobs}
    moved = [
        where.shares
        for each in stopped(state, plan)
        if (where := each.running_on) and each.id in plan.assignments and plan.chosen[each.id] == each.running_as
    ]
    new = Counter(
        a.placement.shares
        for job, a in plan.assignments.items()
        if (where := held[job]) is None or not a.placement.suits(where)
    )
    return (Counter(moved) & new).total()


@pytest.mark.parametrize("name", sorted(REGISTRY))
@settings(max_examples=100)
@given(state=equal_jobs())
def test_equal_jobs_keep_their_places(name: str, state: Snapshot) -> None:
    plan = make_policy(name)[0].decide(state)
    assert swapped(state, plan) == 0
    assert places_swapped(state, plan) == 0
    assert places_taken(state, plan) == 0


def two(first: str = "t4_00", second: str = "t4_01", **differs: object) -> list[Job]:
    """Two jobs that run on one and two GPUs; the second one `differs`."""
    return [
        job("a", phase=Phase.RUNNING, allocation=on("t4", **{first: 1})),
        job("b", phase=Phase.RUNNING, allocation=on("t4", **{second: 2}), **differs),
    ]


def given_to(**placements: Placement) -> Plan:
    why = Reason(ReasonCode.CHOSEN, "starts")
    return Plan(1, {name: Assignment(where, why, 1.0) for name, where in placements.items()})


CROSSWISE = given_to(a=on("t4", t4_01=2), b=on("t4", t4_00=1))


def decided(state: Snapshot, plan: Plan) -> Plan:
    """What becomes of a policy's plan."""

    class Fixed:
        name = "fixed"

        def decide(self, snapshot: Snapshot) -> Plan:
            return plan

    return Staying(Fixed()).decide(state)


def test_two_equal_jobs_that_a_policy_swaps_keep_what_they_have() -> None:
    plan = decided(snapshot("t4:2x4", two()), CROSSWISE)
    assert not plan.stops
    assert [plan.assignments[name].placement.gpus for name in "ab"] == [1, 2]
    assert plan.assignments["a"].reason == Reason(ReasonCode.KEPT, "keeps 1 t4: it would only change places with job b")


@pytest.mark.parametrize(
    "differs",
    [
        {"user": "bob"},
        {"account": "physics"},
        {"qos": "high"},
        {"weight": 2.0},
        {"max_gpus": 8},
        {"partitions": ("all", "t4")},
    ],
)
def test_jobs_with_other_rights_are_swapped(differs: dict[str, object]) -> None:
    plan = decided(snapshot("t4:2x4", two(**differs)), CROSSWISE)
    assert set(plan.stops) == {"a", "b"}


@pytest.mark.parametrize(
    ("facts", "equal"),
    [
        ({"remaining_work": {"a": 1000.0, "b": 1080.0}}, True),
        ({"remaining_work": {"a": 1000.0, "b": 1200.0}}, False),
        ({"remaining_work": {"a": 1000.0}}, False),
        ({"likely_work": {"a": (100.0, 1000.0), "b": (200.0, 1080.0)}}, True),
        ({"likely_work": {"a": (1000.0,)}}, False),
        ({"attained_gpu_s": {"a": {"t4": 10.0}, "b": {"t4": 200.0}}}, True),
        ({"attained_gpu_s": {"a": {"t4": 10.0}, "b": {"t4": 2000.0}}}, False),
        ({"model": {"a": a_little_faster(1.0), "b": a_little_faster(1.04)}}, True),
        ({"model": {"a": a_little_faster(1.0), "b": a_little_faster(1.1)}}, False),
    ],
)
def test_equal_jobs_have_about_the_same_speed_and_work(facts: dict[str, dict[str, object]], equal: bool) -> None:
    state = snapshot("t4:2x4", two())
    models = {"model": {name: state.facts[name].model for name in "ab"}}
    assert bool(decided(with_facts(state, **(models | facts)), CROSSWISE).stops) is not equal


@pytest.mark.parametrize(("largest", "stops"), [({"a": 2, "b": 2}, {"b"}), ({"a": 2, "b": 1}, {"a", "b"})])
def test_growth_stays_bounded_where_jobs_change_places(largest: dict[str, object], stops: set[str]) -> None:
    """`a` would grow to 4 GPUs and leave its GPU to `b`. Instead, `b` grows to 4, if it has run on as many as `a`."""
    plan = given_to(a=on("t4", t4_02=4), b=on("t4", t4_00=1))
    state = with_facts(snapshot("t4:3x4", two()), largest_run_gpus=largest)
    assert set(decided(state, plan).stops) == stops


def test_a_job_does_not_leave_for_an_equal_one_that_moves() -> None:
    """`a` would get nothing and `b` its GPU. Instead, `a` stays, and `b` waits with the reason of `a`."""
    plan = given_to(b=on("t4", t4_00=1), c=on("t4", t4_01=2))
    plan = dataclasses.replace(plan, waiting={"a": Reason(ReasonCode.WAITING_CAPACITY, "others have them")})
    state = snapshot("t4:2x4", [*two(), job("c", user="eve")])
    plan = decided(state, plan)
    assert set(plan.stops) == {"b"}
    assert plan.waiting["b"].text == "others have them"
    assert plan.assignments["c"].placement.nodes == ("t4-01",)


def test_a_job_that_waits_is_equal_to_no_running_one() -> None:
    state = snapshot("t4:2x4", [two()[0], job("b")])
    plan = dataclasses.replace(
        given_to(b=on("t4", t4_00=1)), waiting={"a": Reason(ReasonCode.WAITING_CAPACITY, "its time slice is over")}
    )
    assert set(decided(state, plan).stops) == {"a"}


def test_a_job_that_starts_goes_where_a_running_one_would_have_to_go() -> None:
    state = snapshot("t4:2x4", [two()[0], job("b", user="eve")])
    plan = decided(state, given_to(a=on("t4", t4_01=1), b=on("t4", t4_00=1)))
    assert not plan.stops
    assert plan.assignments["b"].placement == on("t4", t4_01=1)
    assert plan.assignments["b"].reason.text == "starts"


def test_a_ring_of_jobs_stays() -> None:
    names, places = "abcd", [on("t4", **{f"t4_0{n}": 1 + n}) for n in range(4)]
    jobs = [job(name, phase=Phase.RUNNING, allocation=where) for name, where in zip(names, places, strict=True)]
    ring = given_to(**dict(zip(names, places[1:] + places[:1], strict=True)))
    state = snapshot("t4:4x4", jobs)
    assert not stopped(state, settled(state, ring, stopped(state, ring)))
    assert unswapped(state, ring.chosen, jobs) == {each.id: each.running_as for each in jobs}


def test_a_plan_without_a_swap_is_not_touched() -> None:
    state = snapshot("t4:2x4", two())
    plan = given_to(a=on("t4", t4_00=2), b=on("t4", t4_01=2))
    assert settled(state, plan, stopped(state, plan)) is plan
