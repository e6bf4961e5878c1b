"""The settings of the preset `sia:artifact`."""

import dataclasses

import pytest

from penstock_scheduler.model import Phase
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings, costs
from tests.scheduler.builders import job, on, snapshot, table

sia = Sia(SiaSettings())


def test_rounded_costs_make_ties():
    """48 and 52 GPUs at p = -0.5: 0.1443 and 0.1387, both 0.14 when rounded, so that the larger is not worth its GPUs."""
    model = {"j": table(t4={1: 1.0, 48: 48.0, 52: 52.0})}
    held = job(
        "j", phase=Phase.RUNNING, allocation=on("t4", **{f"t4_{i:02d}": 4 for i in range(12)}), max_gpus=52, min_gpus=1
    )
    state = snapshot("t4:13x4", [held], model, time_s=1e9)
    assert Sia(SiaSettings(amortise_s=None)).decide(state).chosen["j"].gpus == 52
    assert Sia(SiaSettings(amortise_s=None, variant="artifact", size_power=0)).decide(state).chosen["j"].gpus == 48


def test_more_than_64_gpus_are_given_unless_as_the_artifact():
    model = {"j": table(t4={1: 1.0, 64: 50.0, 96: 70.0})}
    state = snapshot("t4:24x4", [job("j", max_gpus=96)], model)
    assert sia.decide(state).chosen["j"].gpus == 96
    ran = dataclasses.replace(state.jobs[0], restarts=1)  # or it would start blindly
    assert Sia(SiaSettings(variant="artifact")).decide(dataclasses.replace(state, jobs=(ran,))).chosen["j"].gpus == 64
    assert make_policy("sia:artifact")[1].settings["sia:artifact"]["variant"] == "artifact"


def test_a_job_younger_than_a_restart_moves_only_as_the_artifact():
    """1.5 times faster elsewhere; at an age of 50 s with a restart cost of 60 s, r = 50 / 110."""
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), submit_s=950.0, max_gpus=1)
    state = snapshot("t4:1x1,a100:1x1", [each], {"j": table(t4={1: 1.0}, a100={1: 1.5})}, restart_cost_s=60.0)
    assert sia.decide(state).chosen["j"].gpu_type == "t4"
    assert Sia(SiaSettings(variant="artifact")).decide(state).chosen["j"].gpu_type == "a100"


def test_a_first_round_prefers_the_faster_type_unless_blind():
    """Two jobs, one fast GPU: the one that gains most from it gets it; blind, the older one, whatever it gains."""
    models = {"old": table(t4={1: 1.0}, a100={1: 1.1}), "young": table(t4={1: 1.0}, a100={1: 5.0})}
    jobs = [job("old", submit_s=1, max_gpus=1), job("young", submit_s=2, max_gpus=1)]
    state = snapshot("t4:1x1,a100:1x1", jobs, models)
    assert sia.decide(state).chosen["young"].gpu_type == "a100"
    blind = Sia(SiaSettings(variant="artifact", size_power=0)).decide(state)
    one = snapshot("t4:1x4", [job("j")])
    assert sia.decide(one).chosen["j"].gpus == 4
    assert Sia(SiaSettings(variant="artifact")).decide(one).chosen["j"].gpus == 1
    assert blind.solve is not None
    assert blind.solve.objective == pytest.approx(2.0, abs=0.01)


def test_the_artifact_starts_jobs_on_the_first_type_of_its_order_while_there_is_room(monkeypatch):
    """Three jobs that never ran, all types alike to them: two T4, then the A100, which comes before the RTX."""
    jobs = [job(name, submit_s=at, max_gpus=1) for at, name in enumerate("abc")]
    chosen = make_policy("sia:artifact")[0].decide(snapshot("rtx:1x4,a100:1x4,t4:1x2", jobs)).chosen
    assert sorted(configuration.gpu_type for configuration in chosen.values()) == ["a100", "t4", "t4"]
    monkeypatch.setattr(costs, "START_ORDER", ("rtx",))
    chosen = Sia(SiaSettings(variant="artifact")).decide(snapshot("rtx:1x4,a100:1x4,t4:1x2", jobs)).chosen
    assert {configuration.gpu_type for configuration in chosen.values()} == {"rtx"}
