"""The policy as a whole, and its reasons."""

import dataclasses

import pytest

from penstock_scheduler.model import Configuration, Node, Phase, ReasonCode
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings
from tests.scheduler.builders import job, on, snapshot, table, with_facts

sia = Sia(SiaSettings())
greedy = Sia(SiaSettings(fairness_p=1.0, allocation_lambda=-1e-6, size_power=0))


def nodes(*of: tuple[str, str, int, tuple[str, ...], str]) -> tuple[Node, ...]:
    """(name, type, GPUs, partitions, reservation) each."""
    return tuple(Node(name, kind, gpus, inside, reservation=kept) for name, kind, gpus, inside, kept in of)


def test_picks_the_schedule_of_sia_table_1():
    """One node of 2 A GPUs, one of 4 B: 3.5 + 2.1 = 5.6 beats 1.5 + 3.6 = 5.1 (p = 1: the sum itself is maximised).

    Each row's smallest entry is 1, so that normalising leaves Table 1 as it is.
    """
    models = {
        "j1": table(a={1: 1.0, 2: 1.5}, b={1: 1.5, 2: 2.5, 4: 3.5}),
        "j2": table(a={1: 1.2, 2: 2.1}, b={1: 1.0, 2: 1.9, 4: 3.6}),
    }
    plan = greedy.decide(snapshot("a:1x2,b:1x4", [job("j1"), job("j2")], models))
    assert plan.chosen == {"j1": Configuration(1, 4, "b"), "j2": Configuration(1, 2, "a")}
    assert plan.solve is not None
    assert -plan.solve.objective == pytest.approx(5.6, abs=1e-3)


@pytest.mark.parametrize("solver", ["dual", "auto"])
def test_all_solvers_agree(solver):
    models = {f"j{i}": table(t4={1: 1.0, 2: 1.9, 4: 3.0 + i / 10}, a100={1: 3.0, 8: 9.0 + i}) for i in range(6)}
    plans = [
        make_policy("sia", {"solver": each, "gap": 0.0})[0].decide(
            snapshot("t4:3x4,a100:1x8", [job(f"j{i}", submit_s=i) for i in range(6)], models)
        )
        for each in (solver, "milp")
    ]
    assert plans[0].assignments == plans[1].assignments


def test_a_rigid_job_gets_its_count_on_the_type_that_suits_it():
    models = {"r": table(t4={4: 1.0}, a100={4: 3.0})}
    plan = sia.decide(snapshot("t4:2x4,a100:1x8", [job("r", adaptivity="rigid", min_gpus=4, max_gpus=4)], models))
    assert plan.chosen == {"r": Configuration(1, 4, "a100")}


def test_a_fixed_or_unpreemptible_job_stays_when_a_better_place_is_free():
    here = on("t4", t4_00=1)
    for spec in ({"adaptivity": "fixed", "min_gpus": 1, "max_gpus": 1}, {"preemptible": False}):
        each = job("j", phase=Phase.RUNNING, allocation=here, **spec)
        plan = sia.decide(snapshot("t4:1x4,a100:1x8", [each], {"j": table(t4={1: 1.0}, a100={1: 9.0})}))
        assert plan.assignments["j"].placement == here
        assert plan.assignments["j"].reason.code is ReasonCode.PINNED


def test_equal_jobs_are_served_by_age_and_keep_what_they_have():
    jobs = [job("young", submit_s=5), job("old", submit_s=1)]
    plan = sia.decide(snapshot("t4:1x1", jobs))
    assert set(plan.chosen) == {"old"}
    held = [job("young", submit_s=5, phase=Phase.RUNNING, allocation=on("t4", t4_00=1)), job("old", submit_s=1)]
    assert set(sia.decide(snapshot("t4:1x1", held)).chosen) == {"young"}


def test_jobs_on_their_way_are_not_sent_elsewhere():
    going = on("t4", t4_00=1)
    for phase in (Phase.STARTING, Phase.STOPPING):
        each = job("j", phase=phase, allocation=on("t4", t4_00=2), target=going)
        plan = sia.decide(snapshot("t4:1x4,a100:1x8", [each], {"j": table(t4={1: 1.0}, a100={1: 9.0})}))
        assert plan.assignments["j"].placement == going
        assert plan.assignments["j"].reason.code is ReasonCode.IN_FLIGHT


def test_a_job_on_its_way_to_a_node_that_went_down_is_sent_elsewhere():
    state = snapshot("t4:2x4", [job("j", phase=Phase.STARTING, target=on("t4", t4_00=4), max_gpus=4)])
    down = dataclasses.replace(state.nodes[0], may_start=False)
    plan = sia.decide(dataclasses.replace(state, nodes=(down, state.nodes[1])))
    assert plan.assignments["j"].placement == on("t4", t4_01=4)


def test_a_job_leaves_a_node_that_drains():
    state = snapshot("t4:2x4", [job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=4), max_gpus=4)])
    drained = dataclasses.replace(state.nodes[0], may_start=False)
    plan = sia.decide(dataclasses.replace(state, nodes=(drained, state.nodes[1])))
    assert plan.assignments["j"].placement == on("t4", t4_01=4)


def test_gpus_of_unmanaged_jobs_are_not_given_out():
    state = snapshot("t4:1x4", [job("j")])
    busy = dataclasses.replace(state.nodes[0], gpus_others=3)
    assert sia.decide(dataclasses.replace(state, nodes=(busy,))).assignments["j"].placement == on("t4", t4_00=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"gpu_types": ["h100"]}, "no node here has h100; the types are t4"),
        ({"min_gpus": 64}, "needs 64 GPUs, but jobs can have 1, 2, 4, 8"),
        ({"min_gpus": 5, "max_gpus": 7}, "needs 5 to 7 GPUs"),
        ({"min_gpus": 7, "max_gpus": 7}, "needs 7 GPUs"),
        ({"excluded_gpu_types": ["t4"]}, "no node here is of another type than those excluded; the types are t4"),
        ({"scale_unit": 5}, "no count that jobs can have here is a multiple of scale_unit=5"),
    ],
)
def test_the_reason_says_that_a_job_can_never_run(spec, words):
    plan = sia.decide(snapshot("t4:2x4", [job("j", **spec)]))
    assert plan.waiting["j"].code is ReasonCode.NEVER_FITS
    assert words in plan.waiting["j"].text


def test_whole_replicas_and_no_excluded_type():
    """Units of 3 on nodes of 4: 3 GPUs, the same on a100 though that is excluded."""
    plan = sia.decide(snapshot("t4:2x4,a100:1x8", [job("j", scale_unit=3, max_gpus=8, excluded_gpu_types=["a100"])]))
    assert plan.assignments["j"].placement == on("t4", t4_00=3)


def test_a_job_that_waits_knows_what_it_needs():
    plan = sia.decide(snapshot("t4:1x1", [job("a", submit_s=1), job("b", submit_s=2)]))
    assert plan.waiting["b"].code is ReasonCode.WAITING_CAPACITY
    assert plan.waiting["b"].needs == "1 GPU of any type"


def test_an_odd_allocation_is_kept_by_its_holder_only():
    """Slurm itself started a job on 3 GPUs: it may keep them, but no other job that could use 2 or 4 is offered 3."""
    holder = job("holder", phase=Phase.RUNNING, allocation=on("t4", t4_00=3), max_gpus=4)
    other = job("other", min_gpus=3, max_gpus=3, phase=Phase.RUNNING, allocation=on("t4", t4_01=2))
    flexible = job("flexible", min_gpus=3, max_gpus=5)
    plan = sia.decide(snapshot("t4:2x4", [holder, flexible]))
    assert plan.chosen.get("flexible") != Configuration(1, 3, "t4")
    assert sia.decide(snapshot("t4:2x4", [holder, other])).chosen["other"] == Configuration(1, 3, "t4")


def test_a_job_with_a_goodput_that_is_not_a_number_waits_with_a_reason_and_the_others_run():
    broken = table(t4={1: 1.0})
    object.__setattr__(broken, "rates", {"t4": {1: float("nan")}})
    plan = sia.decide(snapshot("t4:1x1", [job("j"), job("sane")], {"j": broken}))
    assert set(plan.chosen) == {"sane"}
    assert plan.waiting["j"].code is ReasonCode.NEVER_FITS
    assert "not a number" in plan.waiting["j"].text


def test_a_job_that_slurm_started_outside_its_spec_is_moved():
    """It asks for at least 2 GPUs and holds 1, and another job has the node on which it would stay."""
    small = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), min_gpus=2, max_gpus=2)
    assert sia.decide(snapshot("t4:1x4", [small])).chosen == {"j": Configuration(1, 2, "t4")}


@pytest.mark.parametrize(("growth", "then"), [(2.0, 2), (4.0, 4)])
def test_a_job_of_unknown_scaling_grows_step_by_step(growth: float, then: int):
    """Never run: 1 GPU. Having run on 1: twice or four times as many. Known scaling: all that it may have."""
    for ran_on, gets in ((0, 1), (1, then), (None, 8)):
        state = snapshot("t4:1x8", [job("j")])
        if ran_on is not None:
            state = with_facts(state, largest_run_gpus={"j": ran_on})
        assert Sia(SiaSettings(growth=growth)).decide(state).chosen["j"].gpus == gets
    free = Sia(SiaSettings(growth=None))
    assert free.decide(with_facts(snapshot("t4:1x8", [job("j")]), largest_run_gpus={"j": 0})).chosen["j"].gpus == 8


def test_gpus_on_which_a_job_has_shown_how_it_scales_come_before_those_on_which_it_has_not():
    """All models promise perfect scaling, and one of three jobs may have a second GPU. `new` weighs most and has had one GPU."""
    jobs = [job("new", weight=1.1), job("old"), job("last")]
    state = with_facts(snapshot("t4:1x4", jobs), largest_run_gpus={"new": 1, "old": 8, "last": 8})

    def most(power: float) -> str:
        chosen = Sia(SiaSettings(unproven_power=power)).decide(state).chosen
        return next(name for name, each in chosen.items() if each.gpus == 2)

    assert most(1.0) == "new"
    assert most(0.5) != "new"
    alone = with_facts(snapshot("t4:1x8", [job("new")]), largest_run_gpus={"new": 1})
    assert sia.decide(alone).chosen["new"].gpus == 4, "idle GPUs are tried"


def test_prices_show_which_gpus_are_scarce():
    jobs = [job(str(i), max_gpus=8) for i in range(4)]
    models = {str(i): table(t4={1: 1.0}, a100={1: 3.0, 8: 9.0}) for i in range(4)}
    plan = sia.decide(snapshot("t4:2x4,a100:1x1", jobs, models))
    assert plan.prices["a100"] > plan.prices["t4"] == 0


def test_the_reason_of_a_job_that_makes_room_names_the_other_job():
    one = job("one", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1)
    two = job("two", phase=Phase.RUNNING, allocation=on("t4", t4_01=1), max_gpus=1)
    big = job("big", min_gpus=4, max_gpus=4, submit_s=1.0)
    plan = sia.decide(snapshot("t4:2x4", [one, two, big], restart_cost_s=10.0))
    assert len(plan.assignments) == 3
    assert [a.reason.text for a in plan.assignments.values() if "other nodes" in a.reason.text] == [
        "keeps 1 t4 on other nodes: makes room for job big"
    ]


def test_a_round_on_nothing_is_no_trouble():
    assert sia.decide(snapshot((), [])).assignments == {}
    assert sia.decide(snapshot((), [job("j")])).waiting["j"].code is ReasonCode.NEVER_FITS
    assert sia.decide(snapshot("t4:1x4", [])).assignments == {}


@pytest.mark.parametrize("growth", [1.01, 1.5, 1.9])
def test_a_job_always_grows_to_the_next_number_of_gpus_whatever_the_growth(growth: float):
    """1.9 times one GPU is one GPU: such a job would never have found out how it scales."""
    slow = Sia(SiaSettings(growth=growth))
    held = 0
    for expected in (1, 2, 4, 8):
        running = {"phase": Phase.RUNNING, "allocation": on("t4", t4_00=held)} if held else {}
        state = snapshot("t4:1x8", [job("j", max_gpus=8, submit_s=-1e6, **running)])
        held = slow.decide(with_facts(state, largest_run_gpus={"j": held})).chosen["j"].gpus
        assert held == expected
