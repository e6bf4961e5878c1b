"""What an entry costs: restarts, weights, age and what leaving out costs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from penstock_profiles.estimators import PipelineEstimator, PipelineGpu
from penstock_profiles.throughput import ThroughputParams
from penstock_scheduler.model import Configuration, Job, Node, Phase, Snapshot
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings, restart_factor
from penstock_scheduler.rounds.policies.sia.costs import _leaving as leaving
from tests.scheduler.builders import job, on, snapshot, table, with_facts

sia = Sia(SiaSettings())
alike = Sia(SiaSettings(size_power=0))
"""All jobs weigh the same, whatever they have left."""
THREE = "a100:1x4,rtx:1x4,t4:1x4"


def nodes(*of: tuple[str, str, int, tuple[str, ...], str]) -> tuple[Node, ...]:
    """(name, type, GPUs, partitions, reservation) each."""
    return tuple(Node(name, kind, gpus, inside, reservation=kept) for name, kind, gpus, inside, kept in of)


def new(where: str | None, *unknown: str, nodes: str = THREE, others: tuple[Job, ...] = (), **more: Any) -> Snapshot:
    """A job that has, or waits for, one GPU, and of which these types are unknown; 100 s after it came."""
    attained = more.pop("attained", {})
    models = {"j": more.pop("model")} if "model" in more else {}
    held = {"phase": Phase.RUNNING, "allocation": on(where, **{f"{where}_00": 1})} if where else {}
    state = snapshot(nodes, [job("j", submit_s=900.0, **held, **more), *others], models, attained={"j": attained})
    return with_facts(state, unmeasured_types={"j": unknown}, largest_run_gpus={"j": 1 if where else 0})


def test_moving_must_pay_for_the_restart():
    """1.2x faster elsewhere, but a restart keeps (100 - 0)/(100 + 60) = 0.63 of it: stay. At age 10,000 s 0.99: move."""
    model = {"j": table(t4={1: 1.0}, a100={1: 1.2})}
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1)
    young = snapshot("t4:1x1,a100:1x1", [each], model, time_s=100.0, restart_cost_s=60.0)
    assert sia.decide(young).chosen["j"].gpu_type == "t4"
    old = dataclasses.replace(young, time_s=10_000.0)
    assert sia.decide(old).chosen["j"].gpu_type == "a100"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fairness_p": 0}, "use a non-zero value"),
        ({"fairness_p": -0.5, "allocation_lambda": 1.0}, "leave every job out"),
        ({"fairness_p": -0.5, "allocation_lambda": -1.0}, "leave every job out"),
        ({"fairness_p": 0.5}, "reward leaving jobs out"),
        ({"lamda": 2}, "unknown key 'lamda'"),
        ({"solver": "glpk"}, "solver='glpk'"),
    ],
)
def test_settings_that_would_schedule_nothing_are_errors(settings, words):
    with pytest.raises(ConfigError, match=r"policy\.sia") as error:
        make_policy("sia", settings)
    assert words in str(error.value)


def test_restart_factor():
    assert restart_factor(100, 2, 10) == pytest.approx(80 / 110)
    assert restart_factor(10, 2, 10) == 0.0
    assert restart_factor([100, 10], [2, 2], 10).tolist() == pytest.approx([80 / 110, 0.0]), "of several jobs at once"
    with pytest.raises(ConfigError, match="restart_cost_s=0"):
        restart_factor(10, 2, 0)
    with pytest.raises(ConfigError, match="restart_cost_s=0"):
        restart_factor([10, 10], [2, 2], [5, 0])


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_newcomer_does_not_wait_while_an_old_job_has_more_than_it_needs(gpus):
    """From 4 GPUs to 2 costs 2^-0.5 - 4^-0.5 = 0.21, from 2 to 1 costs 0.29; a first GPU is worth 1, with 1.1 only 0.1."""
    models = {name: table(t4={1: 1.0, 2: 2.0, 4: 4.0}) for name in ("old", "new")}
    old = job("old", phase=Phase.RUNNING, allocation=on("t4", t4_00=gpus))
    state = snapshot(f"t4:1x{gpus}", [old, job("new", submit_s=90_000.0)], models, time_s=90_000.0)
    state = with_facts(state, largest_run_gpus={"new": 0})
    shared = {"old": Configuration(1, gpus // 2, "t4"), "new": Configuration(1, 1, "t4")}
    assert sia.decide(state).chosen == shared
    assert set(Sia(SiaSettings(allocation_lambda=1.1)).decide(state).chosen) == {"old"}


def test_weights_come_before_age():
    jobs = [job("old", submit_s=1), job("dear", submit_s=5, weight=3.0)]
    plan = alike.decide(snapshot("t4:1x1", jobs))
    assert set(plan.chosen) == {"dear"}
    assert plan.solve is not None
    assert plan.solve.objective == pytest.approx(3.0 * 1.0 + 2.0, abs=1e-3), (
        "its cost and the other's, each by its weight"
    )


def test_a_young_job_is_not_stopped_for_one_that_gains_more():
    """t4 is worth 4 times its slowest way to run to the other one. The young job would lose all if it were stopped now."""
    models = {"young": table(t4={1: 1.0}), "other": table(k80={1: 1.0}, t4={1: 4.0})}
    young = job("young", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), submit_s=900.0, max_gpus=1, restarts=1)
    state = snapshot("t4:1x1,k80:1x1", [young, job("other", max_gpus=1)], models, restart_cost_s=100.0)
    full = tuple(dataclasses.replace(n, gpus_others=1) if n.gpu_type == "k80" else n for n in state.nodes)
    state = dataclasses.replace(state, nodes=full)
    assert set(sia.decide(state).chosen) == {"young"}
    assert set(Sia(SiaSettings(size_power=0, variant="paper")).decide(state).chosen) == {"other"}
    assert set(alike.decide(dataclasses.replace(state, time_s=1e6)).chosen) == {"other"}


def test_a_pipeline_gets_multiples_of_its_unit_and_is_worth_that():
    """Units of 3 GPUs on nodes of 8: 3 or 6, and no other number."""
    step = ThroughputParams(0.1, 0.01, 0.01, 0.001, 0.02, 0.002, 1.0)
    model = PipelineEstimator({"t4": PipelineGpu(step, 3)}, 4, 1, 4, 64, 1.0, 1000.0)
    assert sia.decide(snapshot("t4:1x8", [job("j")], {"j": model})).chosen["j"].gpus == 6
    alone = alike.decide(snapshot("t4:1x8", [job("j", max_gpus=3)], {"j": model}))
    assert alone.chosen["j"].gpus == 3
    assert alone.solve is not None
    assert alone.solve.objective == pytest.approx(3**-0.5, abs=1e-3), "its slowest way to run is worth 3 GPUs"


def test_a_rigid_job_is_worth_its_gpus():
    """Sia's rigid term: 4 GPUs on the slowest type are worth 4, so that a large rigid job is not starved by small ones."""
    plan = alike.decide(snapshot("t4:1x4", [job("r", adaptivity="rigid", min_gpus=4, max_gpus=4)]))
    assert plan.solve is not None
    assert plan.solve.objective == pytest.approx(4**-0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("fairness_p", "allocation_lambda", "costs"),
    [(-0.5, 1.1, [1.1 + 1.0, 1.1 * 1.5 + 0.5]), (1.0, -1e-6, [1e-6 - 1.0, 1e-6 * 1.5 - 0.5])],
)
def test_size_makes_it_dearer_to_leave_a_job_out_below_zero_and_cheaper_above(
    fairness_p: float, allocation_lambda: float, costs: list[float]
) -> None:
    """Of two jobs of size 2, the first one runs. With a p above 0 a configuration's value falls as its goodput grows."""
    settings = SiaSettings(fairness_p=fairness_p, allocation_lambda=allocation_lambda)
    found = leaving(np.array([2.0, 2.0]), np.array([True, False]), settings)
    assert found == pytest.approx(costs)
