import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from penstock_scheduler.model import Configuration, GpuLimit, Job, Phase, Plan, ReasonCode, Snapshot
from penstock_scheduler.rounds.policies import common, make_policy, pollux
from penstock_scheduler.rounds.policies.pollux import FLOOR, search
from tests.scheduler.builders import job, on, rate, snapshot, table, with_facts

MODELS = {
    "a": table(t4={1: 1.0, 2: 1.9, 4: 3.6}, a100={1: 3.0, 2: 5.5}),
    "b": table(t4={1: 1.0, 2: 1.5, 4: 1.9}, a100={1: 2.0, 2: 2.4}),
    "c": table(t4={1: 1.0, 2: 1.99, 4: 3.9}, a100={1: 4.0, 2: 8.0}),
}


def decide(state: Snapshot, **settings: Any) -> Plan:
    return make_policy("pollux", settings)[0].decide(state)


def fitness(state: Snapshot, chosen: dict[str, Configuration], p: float) -> float:
    """The power mean as in the paper; jobs of `MODELS`, with 1.0 on their slowest configuration; no job holds it."""
    speedups = [
        FLOOR + (rate(MODELS[each.id], c.gpu_type, c.nodes, c.gpus) if (c := chosen.get(each.id)) else 0.0)
        for each in state.jobs
    ]
    if p == 0:
        return float(np.exp(np.mean(np.log(speedups))))
    return float(np.mean(np.power(speedups, p)) ** (1 / p))


def best_of_all(state: Snapshot, p: float) -> float:
    """Every way to give each job a configuration or none."""
    options = [*common.configurations(state.nodes), None]
    best = 0.0
    for choice in itertools.product(options, repeat=len(state.jobs)):
        used = {"t4": 0, "a100": 0}
        for option in choice:
            if option is not None:
                used[option.gpu_type] += option.gpus
        if used["t4"] <= 4 and used["a100"] <= 2:
            chosen = {each.id: c for each, c in zip(state.jobs, choice, strict=True) if c is not None}
            best = max(best, fitness(state, chosen, p))
    return best


@pytest.mark.parametrize("p", [-1.0, 0.0, 1.0])
def test_on_a_tiny_cluster_the_search_finds_the_best_of_all(p):
    state = snapshot("t4:1x4,a100:1x2", [job("a"), job("b"), job("c")], MODELS)
    best = best_of_all(state, p)
    for number in range(5):
        plan = decide(dataclasses.replace(state, round=number), fairness_p=p)
        assert fitness(state, plan.chosen, p) == pytest.approx(best)


def test_the_harmonic_mean_leaves_no_job_out_and_the_sum_does():
    """Two GPUs and two jobs: 1/(1/2 + 1/2) against nothing; but 3 alone is more than 1 + 1."""
    models = {"one": table(t4={1: 1.0, 2: 3.0}), "two": table(t4={1: 1.0, 2: 1.1})}
    state = snapshot("t4:1x2", [job("one"), job("two")], models)
    assert set(decide(state).chosen) == {"one", "two"}
    assert decide(state, fairness_p=1).chosen == {"one": Configuration(1, 2, "t4")}


def held(**fields: Any) -> Job:
    return job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1, **fields)


def test_moving_must_pay_for_the_restart():
    """1.2x faster elsewhere; at age 100 s a restart of 60 s keeps 100/160 of that, at age 10,000 s nearly all."""
    model = {"j": table(t4={1: 1.0}, a100={1: 1.2})}
    young = snapshot("t4:1x1,a100:1x1", [held()], model, time_s=100.0, restart_cost_s=60.0)
    assert decide(young).chosen["j"].gpu_type == "t4"
    assert decide(young).assignments["j"].reason.code is ReasonCode.KEPT
    assert decide(dataclasses.replace(young, time_s=10_000.0)).chosen["j"].gpu_type == "a100"


def test_a_new_job_is_not_charged_for_its_first_start():
    state = snapshot("t4:1x2", [job("new", submit_s=1000.0)], {"new": table(t4={1: 1.0, 2: 1.5})})
    assert decide(state).chosen == {"new": Configuration(1, 2, "t4")}


def test_a_job_of_unknown_scaling_at_most_doubles():
    state = with_facts(snapshot("t4:1x8", [job("new"), job("ran", submit_s=1)]), largest_run_gpus={"new": 0, "ran": 2})
    assert {each: c.gpus for each, c in decide(state).chosen.items()} == {"new": 1, "ran": 4}


def test_a_repaired_allocation_fits_and_gives_the_best_that_is_left():
    """Three jobs that want four of five GPUs each: the first has four, and the next gets one, not none."""
    score_JC = np.array([[1.0, 4.0, 0.0]] * 3)
    gpus_C, type_C = np.array([1, 4, 0]), np.array([0, 0, 0])
    choice_J = search(
        score_JC,
        gpus_C,
        type_C,
        np.array([5]),
        np.array([1, 1, 1]),
        np.random.default_rng(0),
        population=2,
        generations=1,
    )
    assert sorted(choice_J.tolist()) == [0, 1, 2]


def test_rounds_differ_and_one_round_does_not(monkeypatch):
    models = {
        str(n): table(t4={1: 1.0, 2: 1.5 + n / 40, 4: 2.0 + n / 20, 8: 3.0}, a100={1: 2.0 + n}) for n in range(20)
    }
    state = snapshot("t4:4x8,a100:2x8", [job(str(n), submit_s=n) for n in range(20)], models)
    monkeypatch.setattr(pollux, "GENERATIONS", 2)
    monkeypatch.setattr(pollux, "POPULATION", 10)
    assert decide(state).chosen == decide(state).chosen
    assert decide(dataclasses.replace(state, round=2)).chosen != decide(state).chosen
    first = decide(state).chosen
    monkeypatch.setattr(pollux, "SEED", 1)
    assert decide(state).chosen != first


def test_a_job_that_keeps_its_configuration_keeps_its_nodes_and_limits_hold():
    big = job("big", phase=Phase.RUNNING, allocation=on("t4", t4_01=4), min_gpus=4, max_gpus=4)
    state = snapshot("t4:2x4", [big, job("new", min_gpus=4, max_gpus=4, submit_s=1)])
    plan = decide(state)
    assert plan.assignments["big"].placement == on("t4", t4_01=4)
    assert plan.assignments["new"].placement == on("t4", t4_00=4)
    assert set(decide(dataclasses.replace(state, limits=(GpuLimit("user", "ada", 4),))).chosen) == {"big"}


def test_what_was_chosen_and_is_scattered_is_given_less():
    """By number two GPUs are free, but on two nodes."""
    state = snapshot("t4:2x2", [job("j")])
    busy = tuple(dataclasses.replace(node, gpus_others=1) for node in state.nodes)
    assert decide(dataclasses.replace(state, nodes=busy)).chosen == {"j": Configuration(1, 1, "t4")}


def test_a_job_outside_its_spec_is_moved_and_one_that_cannot_run_has_a_reason():
    astray = job("astray", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), gpu_types=["a100"], max_gpus=1)
    lost = job("lost", gpu_types=["h100"])
    plan = decide(snapshot("t4:1x1,a100:1x1", [astray, lost]))
    assert plan.chosen == {"astray": Configuration(1, 1, "a100")}
    assert plan.waiting["lost"].code is ReasonCode.NEVER_FITS


def test_partitions_say_which_types_a_job_can_have():
    """`narrow` would gain 9x by the a100, but may not go there: it is `wide` that gets it."""
    models = {"narrow": table(t4={1: 1.0}, a100={1: 9.0}), "wide": table(t4={1: 1.0}, a100={1: 2.0})}
    plan = decide(snapshot("t4:1x1,a100:1x1", [job("narrow", partitions=("t4",)), job("wide")], models))
    assert plan.chosen == {"narrow": Configuration(1, 1, "t4"), "wide": Configuration(1, 1, "a100")}


def test_the_unit_of_a_model_does_not_matter():
    state = snapshot("t4:1x4,a100:1x2", [job("a"), job("b"), job("c")], MODELS)
    large = {t: {gpus: 1000 * value for gpus, value in rates.items()} for t, rates in MODELS["b"].rates.items()}
    plan = decide(with_facts(state, model={"b": table(**large)}))
    assert fitness(state, plan.chosen, -1.0) == pytest.approx(best_of_all(state, -1.0))


def test_mutation_finds_what_no_parent_had():
    """Ten configurations: the ninth is the best; the tenth, which all jobs hold, is impossible; four parents."""
    score_JC = np.tile([*range(1, 10), -np.inf, 0.0], (8, 1))
    gpus_C, type_C = np.array([*[1] * 10, 0]), np.zeros(11, dtype=np.int64)
    held_J, rng = np.full(8, 9), np.random.default_rng(0)
    choice_J = search(score_JC, gpus_C, type_C, np.array([8]), held_J, rng, population=4, generations=1000)
    assert choice_J.tolist() == [8] * 8
