"""`penstock usage`: figures of the same kind on the same GPUs, also after the end, and one sentence of advice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.cli.efficiency import of_job
from penstock_scheduler.model import Configuration
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, snapshot, staged, with_facts
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import BOBS, serving

EXPECTED = {Configuration(1, 1, "t4"): 10.0, Configuration(1, 2, "t4"): 18.0, Configuration(1, 4, "t4"): 16.0}


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def observed(gpus: int = 2, **fields: Any) -> Observation:
    """20 samples/s on each GPU, of which 9 are progress."""
    wanted = {"atomic_batch": 10, "steps": 5, "step_time_s": 0.5, "progress": 1.0, "goodput": 9.0 * gpus} | fields
    return Observation(gpu_type="t4", nodes=1, gpus=gpus, **wanted)


@pytest.mark.parametrize(
    ("observation", "advice"),
    [
        (observed(goodput=36.0, step_time_s=0.5), "It uses its GPUs well."),
        (observed(utilisation=0.3), "busy for 30% of the time: give it more CPUs"),
        (observed(goodput=9.0), "It makes 50% of the progress that is expected on 2 t4"),
        (observed(4, goodput=16.0), "Each GPU does 40% of the work of a single one: a lower --max-gpus"),
        (observed(), "Only 45% of its throughput is progress"),
    ],
)
def test_the_advice_names_what_helps_most(observation, advice):
    assert advice in of_job(EXPECTED, [observation]).advice


def test_goodput_is_compared_with_goodput_on_the_same_gpus():
    """Not the throughput of 2 GPUs with the goodput of the 4 that the job has got since."""
    found = of_job(EXPECTED, [observed(1), observed(2)], held=Configuration(1, 4, "t4"))
    assert (found.configuration, found.throughput, found.goodput, found.expected_goodput) == ("2 t4", 40.0, 18.0, 18.0)
    assert (found.as_expected, found.useful, found.share_of_best, found.scaling) == (1.0, 0.45, 1.0, 0.9)


def test_without_an_expectation_what_was_measured_counts():
    found = of_job({}, [observed(1), observed(2, goodput=9.0)])
    assert (found.expected_goodput, found.as_expected, found.share_of_best, found.scaling) == (None, None, 1.0, 0.5)


def test_without_reports_only_the_expectation_is_known():
    found = of_job(EXPECTED, [], held=Configuration(1, 4, "t4"))
    assert (found.throughput, found.expected_goodput, found.scaling) == (None, 16.0, 0.4)
    assert "has reported no step times" in found.advice
    assert of_job({}, []).share_of_best is None


def test_efficiency_works_after_the_end(api):
    api.board.store.add_reports([Report(job_id="1", epoch=1, sequence=0, time_s=1.0, body=observed())])
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, None)}, gpu_seconds={"1": {"t4": 7200.0}})
    told = penstock(api, "usage", "1").output
    assert "goodput    18 samples/s of progress on 2 t4, measured" in told
    assert "GPU-hours  2.00 of t4" in told
    assert "advice     Only 45% of its throughput is progress" in told


def test_efficiency_shows_what_was_measured(api):
    """8 samples on each of 2 GPUs, twice accumulated, in half a second: 3 x 16 / 0.5 samples/s."""
    body = Observation(
        gpu_type="t4", nodes=1, gpus=2, atomic_batch=8, accumulation_steps=2, steps=5, step_time_s=0.5, progress=10.0
    )
    api.board.store.add_reports([Report(job_id="1", epoch=1, sequence=0, time_s=1.0, body=body)])
    figures = json.loads(penstock(api, "usage", "1", "--json").stdout)
    assert figures["throughput"] == pytest.approx(96.0)
    # It holds 2 GPUs and the round gives it 4: the figures are of the 2, and this model is linear.
    assert figures["share_of_best"] == pytest.approx(0.5)
    assert figures["scaling"] == pytest.approx(1.0)


def test_efficiency_shows_cpus_and_memory_and_what_other_amounts_would_change(api):
    """4 GPUs of a node of 8 CPUs: a part of 1 CPU a GPU."""
    table = Sensitivity(4, (1, 2), (1000,), ((1.0,), (1.5,)))
    shot = with_facts(
        snapshot("t4:2x4:8c", [job("1", max_gpus=4)]), sensitivity={"1": SensitivityProfile("image", (table,))}
    )
    policy, choice = make_policy(staged("fifo", "synergy-tune"))
    api.board.record = RoundRecord(shot, choice, policy.decide(shot))
    told = penstock(api, "usage", "1").output
    assert (
        "share       8 CPUs on each node; proportional to its GPUs would be 8 CPUs; 1.00 times as fast as with that"
        in told
    )
    assert "sensitivity 0.67 with 4 CPUs, 1.00 with 8 CPUs, by the profile image" in told
    assert json.loads(penstock(api, "usage", "1", "--json").stdout)["share"]["profile"] == "image"
