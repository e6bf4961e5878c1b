import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from penstock_profiles.estimators import AnyEstimator, Batch, BatchInferenceEstimator, LatencyInferenceEstimator

ADAPTER = TypeAdapter(AnyEstimator)
NODES_C, GPUS_C = np.array([1, 1, 1, 2, 4]), np.array([1, 2, 5, 16, 32])

# 1 / 0.1 = 10, 8 / 0.2 = 40 and 32 / 1.0 = 32 samples/s: a batch of 32 fits and is not worth it.
BATCHES = BatchInferenceEstimator({"t4": {32: 1.0, 1: 0.1, 8: 0.2}})
SERVICE = LatencyInferenceEstimator(0.3, {"t4": {2: 0.8, 6: 0.2, 8: 0.3}, "a100": {1: 0.1}})

positive = st.floats(1e-6, 1e6)
tables = st.dictionaries(
    st.text(min_size=1), st.dictionaries(st.integers(1, 64), positive, min_size=1, max_size=6), min_size=1, max_size=3
)
batch_inferences = st.builds(BatchInferenceEstimator, tables)
services = st.builds(LatencyInferenceEstimator, positive, tables)


def goodput(estimator, gpu_type, gpus):
    return estimator.goodput(gpu_type, np.array(1), np.array(gpus)).tolist()


def test_each_gpu_adds_the_rate_of_the_best_batch():
    assert goodput(BATCHES, "t4", [1, 3, 64]) == pytest.approx([40, 120, 2560])
    assert BATCHES.best_batch("t4", 2, 16) == Batch(atomic_batch=8, accumulation_steps=0)


def test_of_equal_batches_the_smallest():
    """4 / 0.2 = 2 / 0.1."""
    assert BatchInferenceEstimator({"t4": {4: 0.2, 2: 0.1}}).best_batch("t4", 1, 1) == Batch(2, 0)


def test_batch_inference_on_a_type_that_was_not_measured():
    assert goodput(BATCHES, "a100", [1, 8]) == [0, 0]
    assert BATCHES.best_batch("a100", 1, 8) is None


def test_a_service_is_in_time_or_not():
    """Between 2 GPUs at 0.8 s and 6 at 0.2 s: 5 GPUs at 0.35 s are late. 8 GPUs are just in time; 9 were not measured."""
    assert goodput(SERVICE, "t4", [1, 2, 5, 6, 7, 8, 9]) == [0, 0, 0, 1, 1, 1, 0]
    assert goodput(SERVICE, "a100", [1, 2]) == [1, 0]
    assert goodput(SERVICE, "h100", [1]) == [0]
    assert SERVICE.best_batch("t4", 1, 6) is None


@given(batch_inferences)
def test_copies_are_independent(estimator):
    for gpu_type, times_s in estimator.batch_times_s.items():
        one = float(estimator.goodput(gpu_type, np.array(1), np.array(1)))
        assert all(one >= batch / seconds * (1 - 1e-9) for batch, seconds in times_s.items())
        best = estimator.best_batch(gpu_type, 1, 1)
        assert best is not None
        assert one == pytest.approx(best.atomic_batch / times_s[best.atomic_batch])
        goodput_C = estimator.goodput(gpu_type, NODES_C, GPUS_C)
        assert np.all(np.isfinite(goodput_C))
        assert goodput_C == pytest.approx(one * GPUS_C)


@given(services, st.floats(1, 10))
def test_a_looser_objective_never_rules_out(service, factor):
    looser = LatencyInferenceEstimator(service.objective_s * factor, service.latencies_s)
    for gpu_type, latencies_s in service.latencies_s.items():
        before, after = (s.goodput(gpu_type, NODES_C, GPUS_C) for s in (service, looser))
        assert set(before) | set(after) <= {0.0, 1.0}
        assert np.all(after >= before)
        measured = service.goodput(gpu_type, np.array(1), np.array(sorted(latencies_s)))
        assert measured.tolist() == [latencies_s[count] <= service.objective_s for count in sorted(latencies_s)]


@given(st.one_of(batch_inferences, services))
def test_shape_and_json_round_trip(estimator):
    known = getattr(estimator, "batch_times_s", None) or estimator.latencies_s
    for gpu_type in [*known, "no such type"]:
        assert estimator.goodput(gpu_type, np.array([[1], [2]]), np.array([2, 4, 8])).shape == (2, 3)
    text = ADAPTER.dump_json(estimator)
    assert f'"kind":"{estimator.kind}"'.encode() in text
    assert ADAPTER.validate_json(text) == estimator


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "={} has no measurement"),
        ({"t4": {}}, ".'t4'.={}"),
        ({"t4": {0: 1.0}}, ".'t4'. has an entry for 0 (GPUs|samples)"),
        ({"t4": {1: 0.0}}, ".'t4'..1.=0.0 is not a finite number above 0"),
        ({"t4": {1: -1.0}}, "=-1.0"),
        ({"t4": {1: math.inf}}, "=inf"),
        ({"t4": {1: math.nan}}, "=nan"),
    ],
)
def test_refuses_times_that_were_not_measured(table, words):
    with pytest.raises(ValueError, match=f"batch_times_s.*{words}|batch_times_s{words}"):
        BatchInferenceEstimator(table)
    with pytest.raises(ValueError, match=f"latencies_s.*{words}|latencies_s{words}"):
        LatencyInferenceEstimator(1.0, table)


@pytest.mark.parametrize("objective_s", [0.0, -1.0, math.inf, math.nan])
def test_refuses_an_objective_that_is_no_latency(objective_s):
    with pytest.raises(ValueError, match=f"objective_s={objective_s}"):
        LatencyInferenceEstimator(objective_s, {"t4": {1: 0.1}})


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"batch_inference","batch_times_s":{"t4":{"1":0.1}},"batch":3}',
        '{"kind":"latency_inference","objective":1,"latencies_s":{"t4":{"1":0.1}}}',
        '{"kind":"latency_inference","objective_s":1,"latencies_s":{"t4":{"1":NaN}}}',
    ],
)
def test_json_with_a_typo(text):
    with pytest.raises(ValidationError):
        ADAPTER.validate_json(text)
