import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from penstock_profiles.estimators import (
    AnyEstimator,
    Batch,
    Estimator,
    GpuModel,
    LinearEstimator,
    TableEstimator,
    TrainingEstimator,
)
from penstock_profiles.throughput import ThroughputParams, efficiency, throughput

ADAPTER = TypeAdapter(AnyEstimator)

# T_acc = 0.1 s + 0.01 s a sample; two GPUs on a node synchronise in 0.1 s, two nodes in 0.3 s; nothing overlaps.
STEP = ThroughputParams(alpha_c=0.1, beta_c=0.01, alpha_r=0.1, beta_r=0.0, alpha_n=0.3, beta_n=0.0, gamma=1.0)
FIXED = TrainingEstimator(
    models={"t4": GpuModel(STEP, max_atomic_batch=20)},
    initial_batch=40,
    max_batch=40,
    grad_sqr=1.0,
    grad_var=10.0,
    fixed_batch=True,
)

times = st.floats(0, 2)
models = st.builds(
    GpuModel,
    step=st.builds(
        ThroughputParams,
        alpha_c=st.floats(1e-3, 2),
        beta_c=times,
        alpha_r=times,
        beta_r=times,
        alpha_n=times,
        beta_n=times,
        gamma=st.floats(1, 10),
    ),
    max_atomic_batch=st.integers(1, 1024),
)


@st.composite
def trainings(draw):
    initial = draw(st.integers(1, 512))
    return TrainingEstimator(
        models=draw(st.dictionaries(st.sampled_from(["t4", "rtx", "a100"]), models, min_size=1)),
        initial_batch=initial,
        max_batch=initial * draw(st.integers(1, 64)),
        grad_sqr=draw(st.floats(0, 100)),
        grad_var=draw(st.floats(0.1, 1e4)),
        fixed_batch=draw(st.booleans()),
    )


rates = st.dictionaries(st.integers(1, 64), st.floats(0, 1e6), min_size=1, max_size=6)
tables = st.builds(TableEstimator, st.dictionaries(st.text(min_size=1), rates, min_size=1, max_size=3))
NODES_C, GPUS_C = np.array([1, 1, 1, 2, 2, 4, 16]), np.array([1, 2, 5, 2, 16, 32, 64])


def test_fixed_batch_on_one_gpu_accumulates():
    """40 samples, 20 fit: s = 1, m = 20. T = 2 x 0.3 = 0.6 s; 40 / 0.6 samples/s."""
    assert FIXED.goodput("t4", np.array([1]), np.array([1])) == pytest.approx(40 / 0.6)
    assert FIXED.best_batch("t4", 1, 1) == Batch(20, 1)


def test_fixed_batch_on_more_gpus():
    """2 GPUs: m = 20, T = 0.3 + 0.1 = 0.4 s. 4 GPUs on 2 nodes: m = 10, T = 0.2 + 0.3 = 0.5 s."""
    assert FIXED.goodput("t4", np.array([1, 2]), np.array([2, 4])) == pytest.approx([40 / 0.4, 40 / 0.5])


def test_uneven_shares_wait_for_the_fullest_gpu():
    """40 samples on 3 GPUs: 14 + 13 + 13; T = 0.1 + 0.14 + 0.1 = 0.34 s for 40 samples, not for 42."""
    assert FIXED.goodput("t4", np.array([1]), np.array([3])) == pytest.approx(40 / 0.34)
    assert FIXED.best_batch("t4", 1, 3) == (14, 0)


def test_more_gpus_than_samples_cannot_run():
    assert FIXED.goodput("t4", np.array([8, 8]), np.array([40, 41])).tolist() == [pytest.approx(40 / 0.41), 0.0]
    assert FIXED.best_batch("t4", 8, 41) is None


def test_unknown_gpu_type_cannot_run():
    assert FIXED.goodput("h100", NODES_C, GPUS_C).tolist() == [0.0] * len(GPUS_C)
    assert FIXED.best_batch("h100", 1, 1) is None


def test_adaptive_batch_is_the_optimum_of_a_fine_search():
    """No synchronisation, one GPU, much memory: M / (0.1 + 0.01 M) x 1 / (1 + (M/10 - 1)/21) peaks near M = 45."""
    step = dataclasses.replace(STEP, alpha_r=0.0, alpha_n=0.0)
    estimator = TrainingEstimator({"t4": GpuModel(step, 10_000)}, 10, 10_000, grad_sqr=1.0, grad_var=20.0)
    batch = np.arange(10, 10_001)
    every = batch / (0.1 + 0.01 * batch) / (1 + (batch / 10 - 1) / 21)
    assert estimator.goodput("t4", np.array(1), np.array(1)) == pytest.approx(every.max(), rel=0.005)
    best = estimator.best_batch("t4", 1, 1)
    assert best is not None
    assert best.atomic_batch == pytest.approx(batch[every.argmax()], rel=0.15)
    assert 40 <= best.atomic_batch <= 50


@settings(max_examples=40)
@given(trainings())
def test_goodput_is_throughput_times_efficiency_of_the_best_batch(estimator):
    for gpu_type, model in estimator.models.items():
        goodput_C = estimator.goodput(gpu_type, NODES_C, GPUS_C)
        assert np.all(np.isfinite(goodput_C) & (goodput_C >= 0))
        for goodput, nodes, gpus in zip(goodput_C, NODES_C.tolist(), GPUS_C.tolist(), strict=True):
            best = estimator.best_batch(gpu_type, nodes, gpus)
            largest = estimator.initial_batch if estimator.fixed_batch else estimator.max_batch
            assert (best is None) == (goodput == 0) == (gpus > largest)
            if best is None:
                continue
            assert 1 <= best.atomic_batch <= model.max_atomic_batch
            rate = float(throughput(model.step, nodes, gpus, *best))
            assert goodput <= rate * (1 + 1e-9)
            total = gpus * best.atomic_batch * (best.accumulation_steps + 1)
            if total <= largest:
                assert total >= estimator.initial_batch
                worth = float(efficiency(estimator.grad_sqr, estimator.grad_var, total, estimator.initial_batch))
                assert goodput == pytest.approx(rate * worth)


@settings(max_examples=40)
@given(trainings(), st.sampled_from(["alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n"]))
def test_a_smaller_parameter_never_slows(estimator, name):
    gpu_type, model = next(iter(estimator.models.items()))
    step = dataclasses.replace(model.step, **{name: getattr(model.step, name) / 2})
    faster = dataclasses.replace(estimator, models={gpu_type: dataclasses.replace(model, step=step)})
    before, after = (e.goodput(gpu_type, NODES_C, GPUS_C) for e in (estimator, faster))
    assert np.all(after >= before * (1 - 1e-6)), "as near as the search for the best batch gets"


@settings(max_examples=40)
@given(trainings())
def test_a_free_batch_is_never_worse_than_a_fixed_one(estimator):
    gpu_type = next(iter(estimator.models))
    # One GPU, so that both can use exactly the initial batch size.
    fixed, free = (
        dataclasses.replace(estimator, fixed_batch=flag).goodput(gpu_type, np.array(1), np.array(1))
        for flag in (True, False)
    )
    model = estimator.models[gpu_type]
    if estimator.initial_batch <= model.max_atomic_batch:
        assert free >= fixed * (1 - 1e-6)


@settings(max_examples=40)
@given(st.one_of(trainings(), tables, st.just(LinearEstimator())))
def test_goodput_has_the_broadcast_shape(estimator):
    gpu_types = [*getattr(estimator, "models", {}), *getattr(estimator, "rates", {}), "no such type"]
    for gpu_type in gpu_types:
        assert estimator.goodput(gpu_type, np.array([[1], [2]]), np.array([2, 4, 8])).shape == (2, 3)
        assert estimator.goodput(gpu_type, np.array([1]), np.array([2, 4, 8])).shape == (3,)


def test_table_interpolates_between_measured_counts_and_is_0_outside():
    """Between 2 GPUs at 10/s and 6 GPUs at 18/s, 3 GPUs make 12/s."""
    table = TableEstimator({"t4": {6: 18.0, 2: 10.0}})
    goodput = table.goodput("t4", np.array(1), np.array([1, 2, 3, 6, 7]))
    assert goodput.tolist() == [0, 10, 12, 18, 0]
    assert table.goodput("a100", np.array(1), np.array([2])).tolist() == [0]
    assert table.best_batch("t4", 1, 2) is None


@settings(max_examples=40)
@given(rates, st.integers(1, 64))
def test_table_stays_within_its_neighbours(measured, gpus):
    goodput = float(TableEstimator({"t4": measured}).goodput("t4", np.array(1), np.array(gpus)))
    below, above = ([r for g, r in measured.items() if g <= gpus], [r for g, r in measured.items() if g >= gpus])
    if gpus in measured:
        assert goodput == measured[gpus]
    elif not below or not above:
        assert goodput == 0
    else:
        ends = [
            measured[max(g for g in measured if g < gpus)],
            measured[min(g for g in measured if g > gpus)],
        ]
        assert min(ends) * (1 - 1e-9) <= goodput <= max(ends) * (1 + 1e-9)


def test_linear_is_one_per_gpu_on_any_type():
    linear = LinearEstimator()
    for gpu_type in ("t4", "a100"):
        assert linear.goodput(gpu_type, NODES_C, GPUS_C).tolist() == GPUS_C.tolist()
        assert linear.best_batch(gpu_type, 1, 1) is None


def test_linear_may_know_that_a_type_is_faster():
    linear = LinearEstimator({"a100": 3.0})
    assert linear.goodput("t4", NODES_C, GPUS_C).tolist() == GPUS_C.tolist()
    assert linear.goodput("a100", NODES_C, GPUS_C).tolist() == (3 * GPUS_C).tolist()
    for speed in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="speeds"):
            LinearEstimator({"a100": speed})


@settings(max_examples=40)
@given(st.one_of(trainings(), tables, st.just(LinearEstimator()), st.just(LinearEstimator({"a100": 3.0}))))
def test_json_round_trip(estimator: Estimator):
    text = ADAPTER.dump_json(estimator)
    assert f'"kind":"{estimator.kind}"'.encode() in text
    assert ADAPTER.validate_json(text) == estimator


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind":"linear","slope":2}', "slope"),
        ('{"kind":"lineal"}', "'training', 'pipeline', 'batch_inference', 'latency_inference', 'table', 'linear'"),
        ('{"kind":"table","rates":{}}', "has no measurement"),
        ('{"kind":"table","rates":{"t4":{"1":NaN}}}', "rates.'t4'..1.=nan"),
    ],
)
def test_json_that_is_no_estimator(text, words):
    with pytest.raises(ValidationError, match=words):
        ADAPTER.validate_json(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": {}}, "models={}"),
        ({"initial_batch": 0}, "initial_batch=0"),
        ({"initial_batch": math.nan}, "initial_batch=nan"),
        ({"max_batch": 39}, "max_batch=39 is below initial_batch=40"),
        ({"max_batch": math.nan}, "max_batch=nan"),
        ({"grad_sqr": -1.0}, "grad_sqr=-1.0"),
        ({"grad_var": math.nan}, "grad_var=nan"),
        ({"grad_sqr": 0.0, "grad_var": 0.0}, "no gradient"),
    ],
)
def test_refuses_training_that_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(FIXED, **changes)


def test_refuses_a_gpu_that_holds_no_sample():
    with pytest.raises(ValueError, match="max_atomic_batch=0"):
        GpuModel(STEP, 0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "rates={}"),
        ({"t4": {}}, "rates.'t4'.={}"),
        ({"t4": {0: 1.0}}, "0 GPUs"),
        ({"t4": {1: -1.0}}, "rates.'t4'..1.=-1.0"),
        ({"t4": {1: math.inf}}, "rates.'t4'..1.=inf"),
    ],
)
def test_refuses_tables_that_were_not_measured(table, words):
    with pytest.raises(ValueError, match=words):
        TableEstimator(table)


def test_a_snapshot_of_1000_jobs_is_quick():
    """39 configurations on 3 types: 0.7 s on one busy core; the limit only catches a lost vectorisation."""
    nodes_C, gpus_C = np.arange(1, 14), 8 * np.arange(1, 14)
    jobs = [dataclasses.replace(FIXED, max_batch=4000 + job, fixed_batch=False) for job in range(1000)]
    start = time.process_time()
    for job in jobs:
        for _ in range(3):
            job.goodput("t4", nodes_C, gpus_C)
    assert time.process_time() - start < 10
