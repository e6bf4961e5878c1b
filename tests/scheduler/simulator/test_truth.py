"""How fast simulated jobs are: worked by hand on tables that we made up."""

from __future__ import annotations

import math
import timeit
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.estimators import Batch
from penstock_profiles.families import load_families
from penstock_profiles.learning import JobModel
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.truth import Truth, TruthSettings, advance, packed, rate_at
from penstock_scheduler.simulator.workloads import BadInput, Workload, WorkloadJob, rigid_spec
from tests.scheduler.simulator.toy import write_profiles


def job(**fields: object) -> WorkloadJob:
    gpus = int(fields.get("gpus", 1))  # type: ignore[call-overload]
    return WorkloadJob(**({"id": "a", "submit_s": 0.0, "gpus": gpus, "spec": rigid_spec(gpus)} | fields))  # type: ignore[arg-type]


def toy(folder: Path, **settings: object) -> Truth:
    return Truth(("t4", "a100"), Profiles(write_profiles(folder)), settings=TruthSettings(**settings))  # type: ignore[arg-type]


def test_a_training_is_all_its_epochs(tmp_path):
    """19 iterations of 8 samples; half of the second epoch ends after 10 + 4.5 iterations."""
    truth = toy(tmp_path)
    assert truth.of(job(model="toy")).work == 152
    assert truth.of(job(model="toy")).restart_s == 40
    assert truth.of(job(model="toy", epochs=1.5)).work == 116
    assert truth.of(job(model="toy", samples=99)).work == 99


def test_rate_is_throughput_times_efficiency(tmp_path):
    """Calibration doubles step times. On one GPU, 8 samples take 1.8 s, so 8 / 3.6 per second.

    16 samples take one micro-step more, of 1.75 s without its 0.05 s of synchronisation: 7.1 s. With S = 2, sqr 1 and
    var 3 the efficiency is 1 / (1 + 1 / 4) = 0.8, in the second epoch with 3 and 1 it is 1 / (1 + 3 / 4).
    """
    known = toy(tmp_path).of(job(model="toy"))
    assert rate_at(known, "t4", (1,), Batch(8, 0), 0.0) == pytest.approx(8 / 3.6)
    assert rate_at(known, "t4", (1,), Batch(8, 1), 79.9) == pytest.approx(16 / 7.1 * 0.8)
    assert rate_at(known, "t4", (1,), Batch(8, 1), 80.0) == pytest.approx(16 / 7.1 / 1.75)
    assert known.epoch_ends == (80,)


def test_what_is_left_at_another_initial_batch(tmp_path):
    """In steps of 16 samples the 152 of the first epoch's kind take 1 + 1 / 4 as many, the last 72 take 1 + 3 / 4."""
    known = toy(tmp_path).of(job(model="toy"))
    assert (known.left(0.0, 8), known.left(0.0, 16)) == (152, pytest.approx(152 * 1.25))
    assert known.left(80.0, 16) == pytest.approx(72 * 1.75)
    assert known.left(152.0, 16) == 0


def test_where_it_cannot_run_it_makes_no_progress(tmp_path):
    known = toy(tmp_path).of(job(model="toy"))
    assert known.batch("a100", (1,)) is None
    assert rate_at(known, "a100", (1,), Batch(8, 0), 0.0) == 0
    assert rate_at(known, "t4", (1,), Batch(9, 0), 0.0) == 0
    assert rate_at(known, "t4", (1,), None, 0.0) == 0
    assert known.seen("t4", (1,), Batch(9, 0)) is None
    assert advance(known, "a100", (1,), None, 0.0, 10.0) == (0.0, 10.0)


def test_batches_are_accumulated_where_memory_asks_for_it(tmp_path):
    """8 samples fit on a GPU. 12 on one GPU: 2 micro-steps of 6; 16 GPUs have a sample each; 17 are too many."""
    known = toy(tmp_path).of(job(model="toy"))
    assert known.batch("t4", (1,)) == Batch(8, 0)
    assert known.batch("t4", (1,), 12) == Batch(6, 1)
    assert known.batch("t4", (4, 4), 16) == Batch(2, 0)
    assert known.batch("t4", (4,) * 4) == Batch(1, 0)
    assert known.batch("t4", (4, 4, 4, 4, 1)) is None


def test_a_job_advances_through_its_epochs_and_stops_when_done(tmp_path):
    """At batch 16 on one GPU: 80 samples at 1.8028 per second are 44.375 s, then 72 at 1.28773 are 55.9125 s."""
    known = toy(tmp_path).of(job(model="toy"))
    progress, passed_s = advance(known, "t4", (1,), Batch(8, 1), 0.0, 50.0)
    assert (progress, passed_s) == (pytest.approx(80 + (50 - 44.375) * 16 / 7.1 / 1.75), 50.0)
    assert advance(known, "t4", (1,), Batch(8, 1), 0.0, 1e6) == (152, pytest.approx(44.375 + 55.9125))
    assert advance(known, "t4", (1,), Batch(8, 1), 0.0, 1e6, speed=0.5) == (152, pytest.approx(2 * (44.375 + 55.9125)))


@given(parts=st.lists(st.floats(0.01, 60), min_size=1, max_size=8))
def test_in_parts_or_at_once_it_comes_as_far(tmp_path_factory, parts):
    known = toy(tmp_path_factory.mktemp("p")).of(job(model="toy"))
    progress = 0.0
    for seconds in parts:
        progress, _ = advance(known, "t4", (4,), Batch(4, 0), progress, seconds)
    assert progress == pytest.approx(advance(known, "t4", (4,), Batch(4, 0), 0.0, sum(parts))[0])


def test_what_is_seen_feeds_a_jobs_own_model(tmp_path):
    """Step times as long as they really are: with the calibration."""
    known = toy(tmp_path).of(job(model="toy"))
    seen = known.seen("t4", (2, 2), Batch(4, 1))
    assert seen is not None
    assert seen == (2, 4, 4, pytest.approx(2 * 1.4), pytest.approx(2 * 0.2))
    model = JobModel(8, 16)
    model.observe("t4", *seen)
    noise = known.noise(Batch(4, 0), 4, 100.0)
    assert noise is not None
    assert (noise.grad_sqr, noise.grad_var) == (3, 1)
    model.observe_noise(noise)
    assert model.estimator.goodput("t4", np.array([2]), np.array([4]))[0] > 0


def test_a_recorded_duration_is_that_long_as_requested():
    """60 s on 4 GPUs are 240 GPU-seconds; an h100 counts twice an a100."""
    truth = Truth(("a100", "h100"), settings=TruthSettings(gpu_speeds={"a100": 1.0, "h100": 2.0}))
    known = truth.of(job(gpus=4, duration_s=60.0, gpu_type="a100"))
    assert known.work == 240
    assert advance(known, "a100", (4,), None, 0.0, 1e9) == (240, 60)
    assert advance(known, "h100", (2, 2), None, 0.0, 1e9) == (240, 30)
    assert advance(known, "a100", (2,), None, 0.0, 1e9) == (240, 120)
    assert known.seen("a100", (4,), None) is None
    unknown = truth.of(job(gpus=1, duration_s=60.0))
    assert advance(unknown, "h100", (1,), None, 0.0, 1e9)[1] == 30  # of a type that counts 1


def test_a_duration_with_a_model_is_what_the_model_does_in_it(tmp_path):
    """As requested, on 2 GPUs with batch 16: 8 each, 1.9 s twice as long, efficiency 0.8 and then 1 / 1.75."""
    known = toy(tmp_path).of(job(model="toy", gpus=2, batch_size=16, duration_s=10.0))
    assert known.work == pytest.approx(10 * 16 / 3.8 * 0.8)
    assert advance(known, "t4", (2,), Batch(8, 0), 0.0, 1e9)[1] == pytest.approx(10)


def test_without_tables_the_catalogue_speaks():
    """The family's own estimator agrees, at its own batch, up to its single precision."""
    known = Truth(("t4", "nvidia_a100-sxm4-40gb")).of(job(model="cifar10"))
    assert known.work == 100 * 50_000
    estimator = load_families()["resnet18-cifar10"].estimator()
    for site, gpu_type, shape in (("t4", "t4", (4, 4)), ("nvidia_a100-sxm4-40gb", "a100", (8,))):
        batch = estimator.best_batch(gpu_type, len(shape), sum(shape))
        assert batch is not None
        expected = estimator.goodput(gpu_type, np.array([len(shape)]), np.array([sum(shape)]))[0]
        assert rate_at(known, site, shape, Batch(*batch), 0.0) == pytest.approx(expected, rel=1e-5)


def test_noise_makes_the_catalogue_wrong_in_the_same_way_each_time():
    def step(seed: int, shape: tuple[int, ...], noise: float = 0.2) -> float:
        truth = Truth(("t4",), settings=TruthSettings(noise=noise, seed=seed)).of(job(model="bert-squad"))
        seen = truth.seen("t4", shape, Batch(8, 0))
        assert seen is not None
        return seen.step_s

    assert step(1, (4,)) == step(1, (4,))
    factors = [math.log(step(seed, (4,)) / step(0, (4,), noise=0.0)) for seed in range(200)]
    assert np.std(factors) == pytest.approx(0.2, rel=0.2)
    assert step(1, (4,)) / step(0, (4,), noise=0.0) != pytest.approx(step(1, (2,)) / step(0, (2,), noise=0.0))


def test_unknown_models_are_reported_before_anything_runs(tmp_path):
    truth = toy(tmp_path)
    for fields, words in (
        ({"model": "new"}, "job 'a': found the model 'new'; expected one of .*toy"),
        ({"model": "deepspeech2", "epochs": 5.0}, None),
        ({"model": "toy", "epochs": 5.0}, "found epochs=5 of 'toy', which was not recorded; expected samples"),
        ({"model": "toy", "duration_s": 5.0, "gpu_type": "a100"}, "found duration_s of the model 'toy'"),
    ):
        if words is None:
            truth.check(Workload("x", (job(**fields),)))
        else:
            with pytest.raises(BadInput, match=words):
                truth.check(Workload("x", (job(**fields),)))
    only_a100 = Truth(("a100",), Profiles(tmp_path))
    with pytest.raises(BadInput, match="expected one that was measured on any of a100"):
        only_a100.of(job(model="toy"))


def test_an_answer_that_was_given_before_takes_microseconds(tmp_path):
    known = toy(tmp_path).of(job(model="toy"))
    seconds = min(timeit.repeat(lambda: rate_at(known, "t4", (4, 4), Batch(1, 0), 5.0), number=1000, repeat=5)) / 1000
    assert seconds < 20e-6  # measured: 0.6 us


@pytest.mark.parametrize(("gpus", "size", "shape"), [(10, 4, (4, 4, 2)), (8, 8, (8,)), (3, 8, (3,)), (9, 1, (1,) * 9)])
def test_packed(gpus, size, shape):
    assert packed(gpus, size) == shape
