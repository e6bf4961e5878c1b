"""What every policy must keep to, on generated snapshots."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, PipelineEstimator, PipelineGpu
from penstock_profiles.throughput import ThroughputParams
from penstock_scheduler.jobs.models import LEAST_COST_S
from penstock_scheduler.model import (
    GpuLimit,
    Job,
    LeaveCause,
    LeaveRequest,
    Node,
    NodeChoice,
    Partition,
    Phase,
    Placement,
    Plan,
    Share,
    Snapshot,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import REGISTRY, common, make_policy, pollux, registered
from penstock_scheduler.rounds.policies.sia import SiaSettings
from penstock_scheduler.rounds.policies.staying import NO_SPEED
from penstock_scheduler.rounds.policies.stops import stopped
from tests.scheduler.builders import job, snapshot, staged, table, with_facts
from tests.scheduler.policies.documented import NAME, documented

TYPES = ("t4", "rtx", "a100")
GROWTH = SiaSettings().growth or 2.0

STAGED: list[tuple[PolicyChoice, dict[str, object]]] = [
    (staged("sia", "synergy-tune"), {}),
    (staged("las", "synergy-opt"), {}),
    (staged("fifo", "proportional"), {}),
]
"""Plans that stages have refined."""

VARIANTS = (
    [(name, {}) for name in sorted(REGISTRY)]
    + [(NAME, {})]
    + STAGED
    + [
        (name, {"backfill": backfill})
        for name, (_, model) in sorted(REGISTRY.items())
        if "backfill" in model.model_fields
        for backfill in ("easy", "out-of-order")
    ]
)
"""Every policy with its defaults, the one that CONTRIBUTING.md shows, and the queues with backfill."""


@pytest.fixture(autouse=True, scope="module")
def documented_policy() -> Iterator[None]:
    with documented():
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_search() -> Iterator[None]:
    """A search that is stopped early has to keep the rules, too."""
    with mock.patch.multiple(pollux, GENERATIONS=10, POPULATION=20):
        yield


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    nodes = []
    for gpu_type in TYPES[: draw(st.integers(1, 3))]:
        size = draw(st.sampled_from([1, 2, 4, 8]))
        for index in range(draw(st.integers(1, 4))):
            others = draw(st.sampled_from([0, 0, 0, 1, size]))
            may_start = draw(st.sampled_from([True, True, True, False]))
            partitions = draw(st.sampled_from([("all",), ("all", "fast"), ("fast",)]))
            kept_for = draw(st.sampled_from(["", "", "", "exam"]))
            asks = draw(st.sampled_from([None, LeaveRequest(LeaveCause.DRAIN)])) if not may_start else None
            name = f"{gpu_type}-{index:02d}"
            has = draw(st.sampled_from([(), ("ib",), ("ib", "nvme")]))
            boot_s = draw(st.sampled_from([0.0, 0.0, 60.0, 1800.0]))
            more = {"reservation": kept_for, "leave": asks, "features": has, "boot_s": boot_s}
            nodes.append(Node(name, gpu_type, size, partitions, may_start, others, **more))  # type: ignore[arg-type]
    free = {node.name: max(node.gpus - node.gpus_others, 0) for node in nodes}
    jobs, models, remaining, attained, costs_s = [], {}, {}, {}, {}
    for number in range(draw(st.integers(0, 8))):
        job_id = str(number)
        low = draw(st.sampled_from([1, 1, 2, 4]))
        spec: dict[str, object] = {"min_gpus": low, "max_gpus": max(low, draw(st.sampled_from([1, 2, 8, 16])))}
        adaptivity = draw(st.sampled_from(["adaptive", "strong-scaling", "rigid", "fixed"]))
        if adaptivity in ("rigid", "fixed"):
            spec["max_gpus"] = low
        spec |= {"adaptivity": adaptivity, "preemptible": draw(st.booleans())}
        if draw(st.booleans()):
            key = draw(st.sampled_from(["gpu_types", "excluded_gpu_types"]))
            spec[key] = draw(st.lists(st.sampled_from([*TYPES, "h100"]), min_size=1, max_size=3, unique=True))
        spec["scale_unit"] = draw(st.sampled_from([1, 1, low, {"t4": low, "h100": low}]))
        spec["gpus_per_task"] = draw(st.sampled_from([1, 1, low]))
        spec["max_nodes"] = draw(st.sampled_from([None, None, 1, 2]))
        state: dict[str, object] = {
            "partitions": draw(st.sampled_from([("all",), ("fast",), ("fast", "all")])),
            "reservation": draw(st.sampled_from(["", "", "", "exam"])),
            "nodes": draw(st.none() | node_choices([node.name for node in nodes])),
            "user": draw(st.sampled_from(["ada", "bob"])),
            "account": draw(st.sampled_from(["physics", "maths"])),
            "weight": draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        }
        where = draw(st.sampled_from(nodes))
        gpus = draw(st.sampled_from([1, 2, 4]))
        if draw(st.booleans()) and free[where.name] >= gpus:
            free[where.name] -= gpus
            held = Placement(where.gpu_type, where.partitions[0], (Share(where.name, gpus),))
            phase = draw(st.sampled_from([Phase.RUNNING, Phase.RUNNING, Phase.STARTING, Phase.STOPPING]))
            state |= {"phase": phase, "allocation": held, "target": held if phase is not Phase.RUNNING else None}
        state["time_limit_s"] = draw(st.sampled_from([None, 60.0, 1000.0, 2000.0]))
        submits_s = [0.0, 1.0, 500.0, 1e9]  # the last one lies in the future, as clocks differ
        jobs.append(job(job_id, submit_s=draw(st.sampled_from(submits_s)), **state, **spec))
        models[job_id] = draw(estimators())
        costs_s[job_id] = draw(st.sampled_from([LEAST_COST_S, 30.0, 1e9]))
        if draw(st.booleans()):
            remaining[job_id] = draw(st.sampled_from([0.0, 100.0, 5000.0, 1e-300, 1e300]))
        if draw(st.booleans()):
            attained[job_id] = {where.gpu_type: draw(st.sampled_from([0.0, 300.0, 10_000.0]))}
    limits = draw(
        st.lists(
            st.builds(GpuLimit, st.just("user"), st.sampled_from(["ada", "bob"]), st.integers(0, 8))
            | st.builds(
                GpuLimit, st.just("account"), st.just("maths"), st.integers(0, 8), st.sampled_from(["", *TYPES])
            ),
            max_size=2,
        )
    )
    unscaled = {each.id: draw(st.sampled_from([0, 1, 4])) for each in jobs if draw(st.booleans())}
    unmeasured = {each.id: tuple(TYPES[: draw(st.integers(1, len(TYPES)))]) for each in jobs if draw(st.booleans())}
    made = snapshot(tuple(nodes), jobs, models)
    fast = Partition("fast", may_start=draw(st.sampled_from([True, True, False])), state="DOWN")
    made = dataclasses.replace(made, limits=tuple(limits), partitions=(Partition("all"), fast))
    return with_facts(
        made,
        restart_cost_s=costs_s,
        largest_run_gpus=unscaled,
        unmeasured_types=unmeasured,
        remaining_work=remaining,
        attained_gpu_s=attained,
    )


def node_choices(names: list[str]) -> st.SearchStrategy[NodeChoice]:
    some = st.frozensets(st.sampled_from(names), max_size=3)
    feature = st.sampled_from([frozenset({"ib"}), frozenset({"ib", "nvme"}), frozenset({"x"})])
    return st.builds(NodeChoice, some, some, st.frozensets(feature, max_size=2))


@st.composite
def estimators(draw: st.DrawFn) -> AnyEstimator:
    kind = draw(st.sampled_from(["linear", "table", "pipeline"]))
    if kind == "linear":
        return LinearEstimator()
    if kind == "pipeline":
        step = ThroughputParams(0.1, 0.01, 0.01, 0.001, 0.02, 0.002, 1.0)
        units = {name: PipelineGpu(step, draw(st.sampled_from([1, 2, 3, 4]))) for name in TYPES}
        return PipelineEstimator(units, 4, 1, 4, 64, 1.0, 10.0)
    one = draw(st.floats(0.1, 10))
    factor = draw(st.floats(1.0, 2.0))
    return table(**{t: {2**k: one * factor**k * (1 + i) for k in range(5)} for i, t in enumerate(TYPES)})


def may_only_stay(state: Snapshot) -> set[str]:
    """Running jobs of which a node or the partition takes nothing new, and whose nodes do not ask them to leave."""
    nodes = {node.name: node for node in state.nodes}
    closed = {each.name for each in state.partitions if not each.may_start}
    found = set()
    for each in state.jobs:
        if each.phase is Phase.RUNNING and each.allocation is not None:
            there = [nodes[name] for name in each.allocation.nodes]
            shut = each.allocation.partition in closed or not all(node.may_start for node in there)
            shut |= any(node.reservation != each.reservation for node in there)
            shut |= any(set(node.partitions).isdisjoint(each.partitions) for node in there)
            shut |= each.nodes is not None and not all(map(each.nodes.admits, there))
            if shut and all(node.leave is None and node.reservation in ("", each.reservation) for node in there):
                found.add(each.id)
    return found


def keeps_what_it_has(name: str, plan: Plan, jobs: dict[str, Job]) -> set[str]:
    """Jobs that stay although their place breaks a rule by now. `sia` moves such a job if there is a better place; the other
    policies move no running job.
    """
    found = {job for job, a in plan.assignments.items() if a.placement == jobs[job].allocation}
    if name != "sia":
        return found
    said = (
        "there is no other place for the job now",
        "nothing is gained by stopping it",
        NO_SPEED,
        "other users hold more",
    )
    return {job for job in found if plan.assignments[job].reason.text.endswith(said)}


def check_places(name: str, state: Snapshot, plan: Plan) -> None:
    """No GPU is given twice, and every job is where it may be."""
    nodes = {node.name: node for node in state.nodes}
    jobs = {each.id: each for each in state.jobs}
    stay_put = may_only_stay(state)
    kept = keeps_what_it_has(name, plan, jobs)
    closed = {each.name for each in state.partitions if not each.may_start}

    # no GPU is allocated twice, and none of unmanaged jobs; no job starts on a node out of service
    used: dict[str, int] = {}
    for job_id, assignment in plan.assignments.items():
        for share in assignment.placement.shares:
            used[share.node] = used.get(share.node, 0) + share.gpus
            node = nodes[share.node]
            assert node.gpu_type == assignment.placement.gpu_type
            assert assignment.placement.partition in node.partitions
            held = jobs[job_id].allocation
            stays = held is not None and held.shares == assignment.placement.shares
            assert node.may_start or stays
            assert assignment.placement.partition not in closed or stays
            # no job comes to a node that its user excluded
            choice = jobs[job_id].nodes
            assert stays or choice is None or choice.admits(node) or job_id in common.pinned(state)
            # partitions and reservations are kept
            if job_id not in kept and job_id not in common.pinned(state) and job_id not in stay_put:
                assert assignment.placement.partition in jobs[job_id].partitions
                assert node.reservation == jobs[job_id].reservation
    assert all(gpus <= nodes[name].gpus - nodes[name].gpus_others for name, gpus in used.items())


@pytest.mark.parametrize(("name", "chosen"), VARIANTS)
@settings(max_examples=25)
@given(state=snapshots())
def test_every_plan_keeps_the_rules(name: str, chosen: dict[str, object], state: Snapshot) -> None:
    policy = make_policy(name, chosen)[0]
    assert policy.name == str(name), "the attribute `name` of the class is not the name in REGISTRY"
    plan = policy.decide(state)
    nodes = {node.name: node for node in state.nodes}
    jobs = {each.id: each for each in state.jobs}

    # no job invented or lost
    assert not set(plan.assignments) & set(plan.waiting), "a job has an assignment and waits"
    assert set(plan.assignments) | set(plan.waiting) == set(jobs), "a job has no assignment and no reason to wait"

    check_places(name, state, plan)
    stay_put = may_only_stay(state)
    closed = {each.name for each in state.partitions if not each.may_start}
    pins = {
        job_id: pin
        for job_id, pin in common.pinned(state).items()
        if pin.partition not in closed or jobs[job_id].phase is not Phase.STARTING
    }
    kept = keeps_what_it_has(name, plan, jobs)
    # limits on users and accounts: a job that keeps what it has may exceed them already
    for limit in state.limits:
        held_by = {
            job: a.placement.gpus
            for job, a in plan.assignments.items()
            if limit.covers(jobs[job]) and limit.counts(a.placement.gpu_type)
        }
        fixed = sum(gpus for job, gpus in held_by.items() if job in pins or job in kept or job in stay_put)
        assert sum(held_by.values()) <= max(limit.gpus, fixed)
    for job_id, assignment in plan.assignments.items():
        each, placement = jobs[job_id], assignment.placement
        # jobs where nothing may start and pinned jobs stay
        if job_id in stay_put:
            continue
        if job_id in pins:
            assert placement == pins[job_id]
            continue
        # gangs are whole: several nodes are taken whole, and no two jobs share them
        if len(placement.shares) > 1:
            assert all(share.gpus == nodes[share.node].gpus for share in placement.shares)
        # bounds and types of the job spec
        if job_id not in kept:
            assert each.spec.min_gpus <= placement.gpus <= each.spec.max_gpus
            assert each.spec.gpu_types is None or placement.gpu_type in each.spec.gpu_types
            assert placement.gpu_type not in (each.spec.excluded_gpu_types or ())
            assert placement.gpus % each.spec.unit(placement.gpu_type) == 0
            assert all(share.gpus % each.spec.gpus_per_task == 0 for share in placement.shares)
            assert len(placement.shares) <= (each.spec.max_nodes or len(nodes))
        assert assignment.goodput >= 0
        facts = state.facts[job_id]
        model = facts.model
        if job_id not in kept and isinstance(model, PipelineEstimator):
            assert placement.gpus % model.models[placement.gpu_type].gpus_per_replica == 0
        if name == "sia" and facts.largest_run_gpus is not None and each.movable and placement != each.allocation:
            ran_on = max(facts.largest_run_gpus, each.allocation.gpus if each.allocation else 0)
            fewest = each.spec.min_gpus
            if isinstance(model, PipelineEstimator):
                fewest = max(fewest, *(unit.gpus_per_replica for unit in model.models.values()))
            assert placement.gpus <= max(GROWTH * ran_on, 2 * fewest)
    for job_id, pin in pins.items():
        assert job_id in stay_put or plan.assignments[job_id].placement == pin
    for reason in [*plan.waiting.values(), *(a.reason for a in plan.assignments.values())]:
        assert reason.text

    # the same snapshot gives the same plan, in whatever order its jobs come
    again = policy.decide(state)
    assert (again.assignments, again.waiting) == (plan.assignments, plan.waiting)


@pytest.mark.parametrize(("name", "chosen"), VARIANTS)
@settings(max_examples=25)
@given(state=snapshots())
def test_running_jobs_stay_or_are_stopped_for_a_reason(name: str, chosen: dict[str, object], state: Snapshot) -> None:
    """Where nothing new may start and nobody asks it to leave, a job keeps exactly what it has, and the reason says why."""
    plan = make_policy(name, chosen)[0].decide(state)
    assert set(plan.stops) == {each.id for each in stopped(state, plan)}
    for each in state.jobs:
        if each.id in may_only_stay(state):
            assert plan.assignments[each.id].placement == each.allocation
            assert "stays" in plan.assignments[each.id].reason.text


@pytest.mark.parametrize(("name", "chosen"), VARIANTS)
@settings(max_examples=10)
@given(state=snapshots(), seed=st.integers(0, 9))
def test_the_order_of_jobs_does_not_change_the_plan(
    name: str, chosen: dict[str, object], state: Snapshot, seed: int
) -> None:
    """With distinct ages and an exact solve the value of the plan is the same, whatever the order of the rows."""
    jobs = [dataclasses.replace(each, submit_s=float(index)) for index, each in enumerate(state.jobs)]
    policy = make_policy(name, {"gap": 0.0} if name == "sia" else chosen)[0]
    plan = policy.decide(dataclasses.replace(state, jobs=tuple(jobs)))
    random.Random(seed).shuffle(jobs)
    shuffled = policy.decide(dataclasses.replace(state, jobs=tuple(jobs)))
    if plan.solve is not None and shuffled.solve is not None:
        assert shuffled.solve.objective == pytest.approx(plan.solve.objective, rel=1e-6, abs=1e-9)
    else:
        assert shuffled.chosen == plan.chosen


ANYTHING = st.none() | st.booleans() | st.integers(-3, 10**9) | st.floats() | st.text(max_size=3)


@settings(max_examples=40)
@given(
    settings=st.dictionaries(st.sampled_from([*SiaSettings.model_fields, "lamda"]), ANYTHING, max_size=4),
    state=snapshots(),
)
def test_any_settings_give_a_plan_or_a_clear_error(settings: dict[str, object], state: Snapshot) -> None:
    settings = {"max_seconds": 5.0} | settings
    try:
        policy = make_policy("sia", settings)[0]
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert message.startswith("[policy.sia] ")
        return
    plan = policy.decide(state)
    assert set(plan.assignments) | set(plan.waiting) == {each.id for each in state.jobs}


def test_a_power_that_no_float_holds_is_refused() -> None:
    """The property above found it: its costs were infinite."""
    with pytest.raises(ConfigError, match=r"fairness_p.*greater than or equal to -10"):
        make_policy("sia", {"fairness_p": -709428.0})


def test_a_class_that_does_not_declare_its_settings_is_told_how() -> None:
    with pytest.raises(TypeError, match=r"common\.Requests does not declare its settings: write"):
        registered("common.Requests")


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_jobs_that_are_all_alike(count: int) -> None:
    jobs = [job(f"{number:06d}") for number in range(count)]
    plan = make_policy("sia")[0].decide(snapshot("t4:100x4,a100:50x8", jobs))
    assert sum(a.placement.gpus for a in plan.assignments.values()) == 800
    assert len(plan.assignments) + len(plan.waiting) == count


def test_a_type_without_capacity_is_no_trouble() -> None:
    state = snapshot("t4:2x4,a100:1x8", [job("a", gpu_types=["a100"]), job("b")])
    down = tuple(dataclasses.replace(n, may_start=n.gpu_type == "t4") for n in state.nodes)
    plan = make_policy("sia")[0].decide(dataclasses.replace(state, nodes=down))
    assert set(plan.assignments) == {"b"}
    assert "down, silent or drained" in plan.waiting["a"].text
