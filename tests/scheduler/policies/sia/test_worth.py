"""`least_gain_per_gpu`: idle GPUs are left idle where they would bring a job next to nothing."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Configuration, Phase
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings
from tests.scheduler.builders import job, on, snapshot, table, with_facts

SATURATES = table(t4={1: 1.0, 2: 1.9, 4: 2.1, 8: 2.2})
"""The second GPU brings 0.9 of the first, the third and fourth 0.1 each, the others 0.025 each."""

greedy, sparing = (Sia(SiaSettings(least_gain_per_gpu=least)) for least in (0.0, 0.2))


def gpus(policy: Sia, model: object, nodes: str = "t4:1x8", **fields: object) -> int:
    state = snapshot(nodes, [job("j", **fields)], {"j": model})  # type: ignore[dict-item]
    return policy.decide(state).chosen["j"].gpus


@pytest.mark.parametrize(
    ("least", "most"), [(0.0, 8), (0.024, 8), (0.026, 4), (0.09, 4), (0.11, 2), (0.89, 2), (0.91, 1)]
)
def test_a_job_grows_only_while_a_further_gpu_brings_enough(least: float, most: int):
    assert gpus(Sia(SiaSettings(least_gain_per_gpu=least)), SATURATES) == most


def test_a_size_that_brings_little_is_passed_over_for_a_larger_one_that_brings_enough():
    """From 2 to 4 GPUs each brings 0.1; from 2 to 8, one node further, each brings (4.9 - 1.9) / 6 = 0.5."""
    assert gpus(sparing, table(t4={1: 1.0, 2: 1.9, 4: 2.1, 8: 4.9})) == 8


def test_a_job_that_waits_for_a_fast_gpu_uses_the_idle_slow_ones():
    """A T4 brings a twentieth of what an A100 brings, but eight of them train eight times as fast as one, and are idle."""
    model = table(t4={1: 0.5, 2: 1.0, 4: 2.0, 8: 4.0}, a100={1: 10.0, 2: 18.0})
    other = job("a", gpu_types=("a100",), min_gpus=2, max_gpus=2, submit_s=-1e5)
    state = snapshot("t4:1x8,a100:1x2", [other, job("j")], {"a": model, "j": model})
    assert sparing.decide(state).chosen["j"] == Configuration(1, 8, "t4")


def test_a_job_gets_its_minimum_and_its_exact_number_however_little_they_bring():
    assert gpus(sparing, SATURATES, min_gpus=8, max_gpus=8, adaptivity="rigid") == 8
    assert gpus(sparing, SATURATES, min_gpus=4) == 4


def test_a_running_job_keeps_what_it_has():
    """A setting that an admin raises, or a model that has changed, is no reason to stop anybody."""
    running = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=8), submit_s=-1e6)
    state = snapshot("t4:1x8", [running], {"j": SATURATES})
    plan = make_policy("sia", {"least_gain_per_gpu": 0.5})[0].decide(state)
    assert plan.chosen["j"].gpus == 8
    assert plan.stops == {}


def test_a_job_that_has_not_shown_how_it_scales_may_still_try():
    """Doubt about its scaling says less than the setting asks for; what its model says decides."""
    perfect = table(t4={1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    state = with_facts(snapshot("t4:1x8", [job("j")], {"j": perfect}), largest_run_gpus={"j": 2})
    assert Sia(SiaSettings(least_gain_per_gpu=0.5)).decide(state).chosen["j"].gpus == 8


def test_an_owner_reads_why_a_job_does_not_grow():
    running = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
    state = snapshot("t4:1x8", [running], {"j": SATURATES})
    assert (
        "It does not grow on t4: each further GPU would bring less than 20% of what its first one brings "
        "([policy.sia] least_gain_per_gpu)."
    ) in sparing.remarks(state, sparing.decide(state), running)
    assert not any("does not grow" in line for line in greedy.remarks(state, greedy.decide(state), running))
    most = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=2), max_gpus=2)
    state = snapshot("t4:1x8", [most], {"j": SATURATES})
    assert not any("does not grow" in line for line in sparing.remarks(state, sparing.decide(state), most))


def test_an_owner_is_answered_while_the_cluster_does_not_show_the_nodes_of_the_job():
    running = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
    before = snapshot("t4:1x8", [running], {"j": SATURATES})
    gone = snapshot("a100:1x8", [running], {"j": SATURATES})
    assert not any("does not grow" in line for line in sparing.remarks(gone, sparing.decide(before), running))
