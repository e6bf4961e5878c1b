import dataclasses
import re

import numpy as np
import pytest

from penstock_profiles.estimators import GpuModel, LinearEstimator, TrainingEstimator
from penstock_profiles.families import load_families
from penstock_profiles.throughput import ThroughputParams
from penstock_profiles.wire import Observation
from penstock_scheduler.jobs.claims import (
    PaceCheck,
    TableCheck,
    believed,
    bounded,
    bounded_table,
    promise,
    ratio_of,
    slower_on,
    usual_ratio_of,
)
from penstock_scheduler.model import JobFacts
from tests.scheduler.builders import rate

FAMILIES = load_families()


def observed(gpus: int, samples_per_s: float, gpu_type: str = "a100", progress: float = 0.0) -> Observation:
    """Steps of 10 samples on each GPU."""
    return Observation(
        gpu_type=gpu_type,
        nodes=1,
        gpus=gpus,
        atomic_batch=10,
        steps=10,
        step_time_s=10 * gpus / samples_per_s,
        progress=progress,
    )


def alike(a: str, b: str) -> float:
    return 1.0


def test_a_table_is_at_most_linear_from_its_fewest_gpus():
    table = {"a100": {2: 10.0, 4: 15.0, 8: 1e12}}
    assert bounded_table(table, alike) == {"a100": {2: 10.0, 4: 15.0, 8: 40.0}}


def test_a_silent_jobs_table_grows_with_the_root_of_its_gpus():
    """From 1 GPU to 4: twice. What it says less of is left as it is."""
    assert bounded_table({"a100": {1: 10.0, 4: 40.0, 16: 11.0}}, alike, 0.5) == {"a100": {1: 10.0, 4: 20.0, 16: 11.0}}


def test_a_type_is_at_most_as_much_faster_as_the_ratio_allows_and_keeps_its_form():
    """At most 3 times as fast as a t4: 30 for one GPU, and the others in proportion."""
    table = {"t4": {1: 10.0}, "a100": {1: 100.0, 2: 150.0}}
    found = bounded_table(table, lambda a, b: 3.0 if a == "a100" else 1.0)
    assert found == {"t4": {1: 10.0}, "a100": {1: pytest.approx(30.0), 2: pytest.approx(45.0)}}


def test_a_rate_of_zero_stays():
    assert bounded_table({"t4": {1: 0.0, 2: 5.0}, "a100": {1: 0.0}}, alike) == {
        "t4": {1: 0.0, 2: 5.0},
        "a100": {1: 0.0},
    }


def test_every_family_of_the_catalogue_is_plausible():
    for family in FAMILIES.values():
        model = family.estimator()
        assert bounded(model, ratio_of(FAMILIES)) is model


def test_what_is_declared_counts_for_no_more_than_a_job_of_which_nothing_is_known():
    """An A100 makes a family 2.9 times as fast as a T4 in the median, and bert-squad 10.6 times."""
    usual, most = usual_ratio_of(FAMILIES, {"t4", "a100", "h100"}), ratio_of(FAMILIES)
    speeds = FAMILIES.speeds({"t4", "a100"})
    assert usual("a100", "t4") == pytest.approx(speeds["a100"] / speeds["t4"]) == pytest.approx(2.9, rel=0.01)
    assert usual("t4", "a100") == 1.0
    assert most("a100", "t4") == pytest.approx(1.5 * 144.98 / 13.65, rel=0.01)
    assert usual("h100", "a100") == 1.0
    assert most("h100", "a100") == 15.0


def test_a_type_that_the_site_does_not_have_bounds_no_other():
    """A user's table is of several sites. A V100 that is not here says nothing against the A100 beside the T4."""
    table, usual = {"v100": {1: 0.1}, "t4": {1: 1.0}, "a100": {1: 2.5}}, usual_ratio_of(FAMILIES, {"t4", "a100"})
    assert bounded_table(table, usual) == table


def training(*, a100_s: float, t4_s: float) -> TrainingEstimator:
    """Seconds for each sample on one GPU."""
    steps = {"a100": a100_s, "t4": t4_s}
    models = {name: GpuModel(ThroughputParams(0.0, s, 0.0, 0.0, 0.0, 0.0, 1.0), 64) for name, s in steps.items()}
    return TrainingEstimator(models, initial_batch=64, max_batch=64, grad_sqr=1.0, grad_var=0.0)


def test_reported_steps_make_no_type_faster_than_plausible():
    lie = bounded(training(a100_s=1e-6, t4_s=1.0), lambda a, b: 4.0)
    assert rate(lie, "t4", 1, 1) == pytest.approx(1.0)
    assert rate(lie, "a100", 1, 1) == pytest.approx(4.0)


def test_no_model_of_steps_is_more_than_linear_in_gpus():
    """Whatever a job reports, the form of the model bounds it: K GPUs do at most K times what one does, but for rounding."""
    draw = np.random.default_rng(5)
    counts = np.array([1, 2, 4, 8, 16, 64])
    for _ in range(200):
        parameters = 10.0 ** draw.uniform(-9, 3, 6)
        step = ThroughputParams(*parameters.tolist(), gamma=float(draw.uniform(1, 10)))
        initial = int(draw.integers(64, 1000))
        model = TrainingEstimator(
            {"a100": GpuModel(step, int(draw.integers(1, 2000)))},
            initial_batch=initial,
            max_batch=initial * int(draw.integers(1, 100)),
            grad_sqr=float(10.0 ** draw.uniform(-9, 9)),
            grad_var=float(10.0 ** draw.uniform(-9, 9)),
        )
        per_gpu = model.goodput("a100", np.ones_like(counts), counts) / counts
        assert (per_gpu <= per_gpu[0] * 1.05).all()


def check(table, *seen: Observation, most_gpus: int = 16):
    known = TableCheck(table)
    for each in seen:
        known.saw(each, most_gpus)
    return known.believed(alike, ratio_of(FAMILIES))


def test_what_a_job_measures_counts_in_place_of_its_table():
    """It measures 10 on one GPU and 20 on 4, and its table says 4 and 16 times 5. So 4 GPUs are twice one, and 8 half of what
    they were said to be."""
    rates, doubt = check({"a100": {1: 5.0, 4: 20.0, 8: 36.0}}, observed(1, 10.0), observed(4, 20.0))
    assert rates["a100"] == pytest.approx({1: 5.0, 4: 10.0, 8: 18.0})
    assert doubt == (
        "it measures 50% of the speed that its goodput_table gives for 4 a100 GPUs, so what it measures counts instead: correct "
        "the table"
    )


def test_a_table_that_is_true_stays_and_is_not_doubted():
    """In steps/s instead of samples/s, which is as good."""
    table = {"a100": {1: 1.0, 4: 3.6, 8: 6.5}}
    rates, doubt = check(table, observed(1, 10.0), observed(4, 35.0))
    assert rates["a100"] == pytest.approx(table["a100"], rel=0.05)
    assert not doubt


def test_a_measurement_on_more_gpus_than_a_job_has_held_is_none():
    rates, _ = check({"a100": {1: 1.0, 16: 2.0}}, observed(1, 1.0), observed(16, 1000.0), most_gpus=4)
    assert rates["a100"][16] == 2.0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a100": {1: 1.0, 16: 1e12}}, "62500000000 times as fast on 16 a100 GPUs as in proportion"),
        ({"t4": {1: 1.0}, "a100": {1: 1e6}}, "a a100 GPU makes it .* as fast as is plausible"),
    ],
)
def test_an_impossible_table_is_named(table, words):
    _, doubt = check(table)
    assert re.search(words, doubt)


def test_progress_that_falls_behind_the_steps_counts():
    """One sample/s on a t4, as its steps say; on an a100 they say a million, and it makes one, too."""
    model, pace = training(a100_s=1e-6, t4_s=1.0), PaceCheck()
    for number in range(4):
        pace.saw(1, observed(1, 1.0, "t4", 60.0 * number), 60.0 * number)
    for number in range(4):
        pace.saw(2, observed(1, 1e6, "a100", 180 + 60.0 * number), 300 + 60.0 * number)
    assert pace.behind(model) == {"a100": pytest.approx(1e6)}
    assert rate(slower_on(model, pace.behind(model)), "a100", 1, 1) == pytest.approx(1.0)


def test_a_job_that_evaluates_for_a_third_of_its_time_is_not_behind():
    model, pace = training(a100_s=0.25, t4_s=1.0), PaceCheck()
    for number in range(4):
        pace.saw(1, observed(1, 1.0, "t4", 60.0 * number), 60.0 * number)
    for number in range(4):
        pace.saw(2, observed(1, 4.0, "a100", 240.0 * number), 1000 + 90.0 * number)
    assert pace.behind(model) == {}


def ending(*, left: float | None, attained_s: float, likely: tuple[float, ...] = ()) -> JobFacts:
    """A job of 1,000 samples on one a100, at one sample/s."""
    said = promise(1000.0, 1000.0 - (left or 0.0), LinearEstimator(), 1, ["a100"])
    return JobFacts(
        LinearEstimator(),
        30.0,
        remaining_work=left,
        likely_work=likely,
        attained_gpu_s={"a100": attained_s},
        promise=said,
    )


def test_a_job_that_should_have_ended_long_ago_counts_as_a_very_long_one():
    """1,000 s of work, half again as much and 300 s: it is believed until 1,800 s. Then it has ten times that left."""
    assert believed(ending(left=0.0, attained_s=1799.0)).remaining_work == 0.0
    found = believed(ending(left=0.0, attained_s=2000.0))
    assert found.remaining_work is None
    assert found.likely_work == (pytest.approx(10 * 1700.0),)
    assert "counts as a very long job" in found.doubts[0]


def test_kin_that_were_short_do_not_make_a_job_that_runs_on_short():
    """By its speed it has done 3,000 / 1.5 = 2,000 samples, 1,000 more than it says: of its kin, those with 500 left are past."""
    facts = ending(left=None, attained_s=3300.0, likely=(500.0, 5000.0))
    assert believed(facts).likely_work == (pytest.approx(4000.0),)


def test_a_job_of_which_nothing_was_said_stays_as_it_is():
    facts = ending(left=0.0, attained_s=1e6)
    unknown = dataclasses.replace(facts, promise=None)
    assert believed(unknown) is unknown
    assert believed(ending(left=500.0, attained_s=600.0)).remaining_work == 500.0
