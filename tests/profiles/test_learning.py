import dataclasses

import numpy as np
import pytest

from penstock_profiles.estimators import LinearEstimator, TrainingEstimator
from penstock_profiles.families import load_families
from penstock_profiles.gpus import load_gpus
from penstock_profiles.learning import JobModel
from penstock_profiles.noise import GradientNoise
from penstock_profiles.profiles import Profile
from penstock_profiles.throughput import ThroughputParams, compute_time, step_time, sync_time
from penstock_profiles.wire import Observation

FAMILIES = load_families()
TRUTH = ThroughputParams(0.02, 0.002, 0.03, 0.004, 0.1, 0.01, gamma=2.0, growth=0.0)
BATCHES = (8, 32, 128)


def slower(params: ThroughputParams, times: float) -> ThroughputParams:
    names = ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n")
    return dataclasses.replace(params, **{name: times * getattr(params, name) for name in names})


def run(model: JobModel, gpu_type: str, params: ThroughputParams, *shapes: tuple[int, int]) -> None:
    """The job runs on these shapes, and reports."""
    for nodes, gpus in shapes:
        for m in BATCHES:
            step = float(step_time(params, nodes, gpus, m))
            model.observe(gpu_type, nodes, gpus, m, step, step - float(compute_time(params, m)), steps=10)


def step(model: JobModel, gpu_type: str, nodes: int, gpus: int, m: int = 32) -> float:
    return float(step_time(model.estimator.models[gpu_type].step, nodes, gpus, m))


def test_of_an_unknown_job_nothing_is_known():
    assert JobModel(32, 1024).estimator == LinearEstimator()


def test_a_known_family_is_believed_until_the_job_has_run():
    prior = FAMILIES["yolov3"].estimator()
    model = JobModel(8, 512, prior=prior)
    assert model.estimator == prior
    run(model, "t4", TRUTH, (1, 1), (1, 4))
    assert step(model, "t4", 1, 4) == pytest.approx(float(step_time(TRUTH, 1, 4, 32)), rel=0.02)
    assert model.estimator.models["a100"] == prior.models["a100"]


def test_a_one_gpu_run_of_a_known_family_corrects_its_computing_alone():
    prior = FAMILIES["yolov3"].estimator()
    model = JobModel(8, 512, prior=prior)
    run(model, "t4", TRUTH, (1, 1))
    learned = model.estimator.models["t4"].step
    assert compute_time(learned, 32) == pytest.approx(compute_time(TRUTH, 32), rel=0.01)
    assert sync_time(learned, 2, 8) == sync_time(prior.models["t4"].step, 2, 8)


def test_scaling_is_perfect_until_synchronisation_has_been_measured():
    model = JobModel(32, 1024)
    run(model, "t4", TRUTH, (1, 1))
    assert step(model, "t4", 4, 16) == pytest.approx(step(model, "t4", 1, 1))
    run(model, "t4", TRUTH, (1, 4))
    assert step(model, "t4", 4, 16) > step(model, "t4", 1, 1)


def test_a_type_in_proportion_is_sias_cross_type_estimate():
    """A T4 takes 4 times as long as an A100: est_T4(N) = 1/4 of the A100's throughput, for every N."""
    model = JobModel(32, 1024)
    run(model, "a100", TRUTH, (1, 1), (1, 2), (1, 8), (2, 16))
    run(model, "t4", slower(TRUTH, 4), (1, 1))
    for shape in ((1, 1), (1, 4), (4, 16)):
        assert step(model, "t4", *shape) == pytest.approx(4 * step(model, "a100", *shape), rel=0.02)


def test_the_donor_is_the_type_whose_one_gpu_steps_are_most_alike():
    """`aardvark` is first in every order, and synchronises a hundred times as long; `v100` is as fast as the new type."""
    far = dataclasses.replace(slower(TRUTH, 20), alpha_r=3.0, beta_r=1.0)
    model = JobModel(32, 1024)
    run(model, "aardvark", far, (1, 1), (1, 4), (1, 8))
    run(model, "v100", TRUTH, (1, 1), (1, 4), (1, 8))
    run(model, "new", slower(TRUTH, 1.2), (1, 1))
    assert step(model, "new", 1, 8) == pytest.approx(1.2 * step(model, "v100", 1, 8), rel=0.02)


def test_real_measurements_replace_an_estimate_across_types():
    model = JobModel(32, 1024)
    run(model, "a100", TRUTH, (1, 1), (1, 8))
    run(model, "t4", slower(TRUTH, 4), (1, 1))
    bad_network = dataclasses.replace(slower(TRUTH, 4), alpha_n=9.0)
    run(model, "t4", bad_network, (2, 8), (4, 16))
    assert step(model, "t4", 4, 16) == pytest.approx(float(step_time(bad_network, 4, 16, 32)), rel=0.1)


def test_a_type_that_only_the_catalogue_knows_is_estimated_from_its_families():
    model = JobModel(32, 1024, families=FAMILIES)
    run(model, "t4", TRUTH, (1, 1), (1, 4))
    ratio = FAMILIES.slowdowns["t4", "a100"]
    assert ratio < 0.5, "an A100 is faster"
    assert step(model, "a100", 1, 4) == pytest.approx(ratio * step(model, "t4", 1, 4))
    assert "abacus" not in model.estimator.models


def test_slowdowns_are_there_and_back():
    speeds = FAMILIES.slowdowns
    assert all(speeds[a, a] == 1 for a, _ in speeds)
    assert speeds["t4", "rtx"] == pytest.approx(1 / speeds["rtx", "t4"], rel=0.3)


def test_the_estimator_is_the_same_object_until_there_is_news():
    model = JobModel(32, 1024)
    run(model, "t4", TRUTH, (1, 1))
    first = model.estimator
    run(model, "t4", TRUTH, (1, 1))
    model.observe_limit("t4", 128)
    assert model.estimator is first
    model.observe_noise(GradientNoise(1.0, 50.0))
    second = model.estimator
    assert second is not first
    assert (second.grad_sqr, second.grad_var) == (1.0, 50.0)
    model.observe_noise(GradientNoise(1.001, 50.0))
    assert model.estimator is second
    run(model, "t4", TRUTH, (1, 2))
    assert model.estimator is not second


def test_without_a_noise_estimate_a_larger_batch_teaches_nothing_more():
    model = JobModel(32, 1024)
    run(model, "t4", TRUTH, (1, 1))
    assert model.estimator.grad_var == 0


def test_what_fits_into_memory():
    """128 has run on a t4 (16 GB). 128 x 40 / 16 = 320 fit into 40 GB, and an unknown GPU counts as equally small."""
    model = JobModel(32, 1024, families=FAMILIES, gpus=load_gpus())
    run(model, "t4", TRUTH, (1, 1))
    assert {name: gpu.max_atomic_batch for name, gpu in model.estimator.models.items()}["t4"] == 128
    assert model.estimator.models["a100"].max_atomic_batch == 320
    model.observe_limit("t4", 64)
    assert model.estimator.models["t4"].max_atomic_batch == 64
    with pytest.raises(ValueError, match="max_atomic_batch=0 must be at least 1"):
        model.observe_limit("t4", 0)
    blind = JobModel(32, 1024, families=FAMILIES)
    run(blind, "t4", TRUTH, (1, 1))
    assert blind.estimator.models["a100"].max_atomic_batch == 128


def test_the_batch_limits_and_their_order_are_the_jobs():
    model = JobModel(32, 1024, fixed_batch=True)
    run(model, "t4", TRUTH, (1, 1))
    assert isinstance(model.estimator, TrainingEstimator)
    assert (model.estimator.initial_batch, model.estimator.max_batch, model.estimator.fixed_batch) == (32, 1024, True)
    with pytest.raises(ValueError, match="initial_batch=64, max_batch=32"):
        JobModel(64, 32)


def test_a_bad_observation_leaves_the_model_as_it_was():
    model = JobModel(32, 1024)
    run(model, "t4", TRUTH, (1, 1))
    before = model.estimator
    for report in ((1, 1, 8, -1.0), (0, 1, 8, 1.0), (1, 1, 8, np.nan)):
        with pytest.raises(ValueError, match="leave the row out"):
            model.observe("l4", *report)
    assert model.estimator is before
    assert list(model.estimator.models) == ["t4"]


def report(params=TRUTH, *, nodes=1, gpus=1, m=32, accumulation=0, sync=True, **more) -> Observation:
    step_s = float(step_time(params, nodes, gpus, m, accumulation))
    waited = step_s - (accumulation + 1) * float(compute_time(params, m))
    return Observation(
        gpu_type="t4",
        nodes=nodes,
        gpus=gpus,
        atomic_batch=m,
        accumulation_steps=accumulation,
        steps=10,
        step_time_s=step_s,
        sync_time_s=waited if sync else None,
        progress=0,
        **more,
    )


@pytest.mark.parametrize("accumulation", [0, 3])
def test_reports_are_understood_with_accumulation_and_without(accumulation):
    model = JobModel(32, 1024)
    for m in BATCHES:
        model.observe_report(report(m=m, accumulation=accumulation))
        model.observe_report(report(gpus=4, m=m, accumulation=accumulation, grad_sqr=2.0, grad_var=90.0))
    assert step(model, "t4", 1, 4) == pytest.approx(float(step_time(TRUTH, 1, 4, 32)), rel=0.02)
    assert (model.estimator.grad_sqr, model.estimator.grad_var) == (2.0, 90.0)


def test_steps_on_several_gpus_without_their_synchronisation_are_passed_over():
    model = JobModel(32, 1024)
    model.observe_report(report(gpus=4, sync=False))
    assert model.estimator == LinearEstimator()


def test_a_stored_profile_is_where_a_job_begins():
    profile = Profile(
        job="j",
        gpu_type="t4",
        measured_s=0,
        versions={},
        ended="the largest batch was reached",
        observations=tuple(report(m=m, sync=False) for m in BATCHES),
    )
    model = JobModel(32, 1024)
    model.observe_profile(profile)
    assert step(model, "t4", 1, 1) == pytest.approx(float(step_time(TRUTH, 1, 1, 32)), rel=0.01)
    assert model.estimator.models["t4"].max_atomic_batch == 128


def test_what_the_fit_foresees_is_no_news():
    """One GPU at 0.1 + 0.01 m: another batch on that line changes nothing, one off it does, and a new shape always
    does."""
    model = JobModel(8, 1024)
    for batch in (8, 16, 32):
        model.observe("t4", 1, 1, batch, 0.1 + 0.01 * batch)
    before = model.estimator
    model.observe("t4", 1, 1, 24, 0.1 + 0.01 * 24)
    assert model.estimator is before
    model.observe("t4", 1, 1, 28, 1.1 * (0.1 + 0.01 * 28))
    after = model.estimator
    assert after is not before
    model.observe("t4", 1, 2, 24, 0.1 + 0.01 * 24)
    assert model.estimator is not after


def test_a_job_whose_replicas_take_two_gpus_is_modelled_by_replicas():
    """K = 1, 2 and 4 replicas on 2, 4 and 8 GPUs; on 3 GPUs it cannot run, and two nodes with one replica are one
    rank."""
    model = JobModel(32, 1024, gpus_per_replica=lambda gpu_type: {"rtx": 8}.get(gpu_type, 2))
    for nodes, replicas in ((1, 1), (1, 2), (2, 4)):
        for m in BATCHES:
            step_s = float(step_time(TRUTH, nodes, replicas, m))
            sync_s = step_s - float(compute_time(TRUTH, m)) if replicas > 1 else None
            seen = Observation(
                gpu_type="a100",
                nodes=nodes if replicas > 1 else 2,
                gpus=2 * replicas,
                gpus_per_replica=2,
                atomic_batch=m,
                steps=10,
                step_time_s=step_s,
                sync_time_s=sync_s,
                progress=0.0,
            )
            assert seen.samples_per_s == pytest.approx(replicas * m / step_s)
            model.observe_report(seen)
    estimator = model.estimator
    assert estimator.models["a100"].gpus_per_replica == 2
    assert step(model, "a100", 1, 2) == pytest.approx(float(step_time(TRUTH, 1, 2, 32)), rel=0.02)
    whole = dataclasses.replace(
        estimator, models={"a100": dataclasses.replace(estimator.models["a100"], gpus_per_replica=1)}
    )
    gpus = np.array([2, 3, 4, 8])
    assert estimator.goodput("a100", np.ones(4, dtype=int), gpus)[1] == 0
    assert estimator.goodput("a100", np.ones(3, dtype=int), gpus[[0, 2, 3]]) == pytest.approx(
        whole.goodput("a100", np.ones(3, dtype=int), np.array([1, 2, 4]))
    )
    assert estimator.goodput("a100", np.array([2]), np.array([2])) == whole.goodput(
        "a100", np.array([1]), np.array([1])
    )
    assert estimator.best_batch("a100", 1, 8) == whole.best_batch("a100", 1, 4)
    assert estimator.best_batch("a100", 1, 3) is None


def test_on_a_type_where_it_has_not_run_the_spec_has_the_gpus_of_a_replica():
    prior = FAMILIES["yolov3"].estimator()
    model = JobModel(8, 512, prior=prior, gpus_per_replica=lambda gpu_type: {"rtx": 8}.get(gpu_type, 2))
    alone = Observation(
        gpu_type="a100", nodes=1, gpus=1, atomic_batch=8, steps=9, step_time_s=0.1, sync_time_s=0.0, progress=0.0
    )
    model.observe_report(alone)
    assert {each.gpus_per_replica for each in model.estimator.models.values()} == {1}, "the job says that it takes one"
    model.observe_report(alone.model_copy(update={"gpus": 2, "gpus_per_replica": 2}))
    assert {
        name: each.gpus_per_replica for name, each in model.estimator.models.items() if name in ("a100", "rtx", "t4")
    } == {
        "a100": 2,
        "rtx": 8,
        "t4": 2,
    }


def test_gpus_that_are_no_whole_replicas_are_refused():
    with pytest.raises(ValueError, match="gpus=3 is not a multiple of gpus_per_replica=2"):
        Observation(
            gpu_type="a100", nodes=1, gpus=3, gpus_per_replica=2, atomic_batch=8, steps=9, step_time_s=0.1, progress=0.0
        )
