import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock_profiles import matrix as matrix_module
from penstock_profiles.estimators import (
    BATCHES_TRIED,
    GpuModel,
    LinearEstimator,
    TableEstimator,
    TrainingEstimator,
)
from penstock_profiles.estimators import training as training_module
from penstock_profiles.matrix import Configurations, GoodputMatrix, best_batches, best_matrix, goodputs
from penstock_profiles.throughput import ThroughputParams, efficiency, throughput

CONFIGURATIONS = Configurations(("a", "a", "a", "b", "b", "c"), (1, 1, 2, 1, 4, 1), (1, 4, 8, 1, 16, 1))

times = st.floats(1e-4, 1)
models = st.builds(
    GpuModel,
    step=st.builds(
        ThroughputParams, times, times, times, times, times, times, gamma=st.floats(1, 10), growth=st.floats(-1, 1)
    ),
    max_atomic_batch=st.integers(1, 512),
)


@st.composite
def training_jobs(draw):
    initial = draw(st.integers(1, 256))
    return TrainingEstimator(
        models=draw(st.dictionaries(st.sampled_from("abd"), models, min_size=1)),
        initial_batch=initial,
        max_batch=initial + draw(st.integers(0, 10_000)),
        grad_sqr=draw(st.floats(0.01, 10)),
        grad_var=draw(st.floats(0, 1000)),
        fixed_batch=draw(st.booleans()),
    )


jobs = training_jobs() | st.builds(LinearEstimator) | st.just(TableEstimator({"a": {1: 2.0, 4: 7.0}, "c": {1: 3.0}}))


def plainly(job: TrainingEstimator, gpu_type: str, N: int, K: int) -> float:
    """The definition, one batch at a time: throughput x efficiency at the best total batch."""
    if gpu_type not in job.models:
        return 0.0
    model, best = job.models[gpu_type], 0.0
    largest = job.initial_batch if job.fixed_batch else job.max_batch
    for wanted in np.geomspace(job.initial_batch, largest, BATCHES_TRIED).round():
        accumulation = np.ceil(wanted / (K * model.max_atomic_batch)) - 1
        atomic = np.ceil(wanted / (K * (accumulation + 1)))
        even = K * atomic * (accumulation + 1)
        total = even if even <= largest else wanted
        if total >= K:
            rate = throughput(model.step, N, K, atomic, accumulation) * total / even
            best = max(best, float(rate * efficiency(job.grad_sqr, job.grad_var, total, job.initial_batch)))
    return best


@settings(max_examples=40)
@given(st.lists(jobs, max_size=6))
def test_the_matrix_is_the_definition_of_goodput(estimators):
    goodput_JC = best_matrix(estimators, CONFIGURATIONS).goodput
    assert goodput_JC.shape == (len(estimators), 6)
    for row, estimator in zip(goodput_JC, estimators, strict=True):
        for value, gpu_type, N, K in zip(row, *CONFIGURATIONS, strict=True):
            if isinstance(estimator, TrainingEstimator):
                expected = plainly(estimator, gpu_type, N, K)
            else:
                expected = estimator.goodput(gpu_type, np.array([N]), np.array([K]))[0]
            assert value == pytest.approx(expected, rel=2e-6)


@settings(max_examples=40)
@given(st.lists(jobs, min_size=1, max_size=6), st.data())
def test_the_batches_of_a_plan_are_each_jobs_best(estimators, data):
    columns = [data.draw(st.integers(0, 5)) for _ in estimators]
    chosen = Configurations(*(tuple(values[c] for c in columns) for values in CONFIGURATIONS))
    matrix = GoodputMatrix()
    matrix.evaluate(estimators, CONFIGURATIONS)
    for row, (batch, estimator, *configuration) in enumerate(
        zip(best_batches(estimators, chosen), estimators, *chosen, strict=True)
    ):
        assert batch == estimator.best_batch(*configuration) == matrix.batches([row], [columns[row]])[0]
    for goodput, estimator, gpu_type, N, K in zip(goodputs(estimators, chosen), estimators, *chosen, strict=True):
        assert goodput == estimator.goodput(gpu_type, np.array([N]), np.array([K]))[0]


def test_blocks_do_not_show(monkeypatch):
    """Seventy jobs in blocks of one and in one block."""
    estimator = TrainingEstimator(
        {"a": GpuModel(ThroughputParams(0.1, 0.01, 0.02, 0.001, 0.05, 0.002, 2.0), 32)}, 32, 1024, 1.0, 50.0
    )
    estimators = [dataclasses.replace(estimator, grad_var=float(noise)) for noise in range(70)]
    together = best_matrix(estimators, CONFIGURATIONS).goodput
    monkeypatch.setattr(training_module, "BLOCK", 1)
    assert np.array_equal(best_matrix(estimators, CONFIGURATIONS).goodput, together)
    assert len(np.unique(together[:, 2])) > 60


class Counted:
    """Counts the rows that are evaluated again."""

    def __init__(self, monkeypatch):
        self.rows = []
        real = matrix_module.best_matrix

        def counting(estimators, configurations):
            self.rows.append(len(estimators))
            return real(estimators, configurations)

        monkeypatch.setattr(matrix_module, "best_matrix", counting)


def test_only_jobs_with_a_new_model_are_evaluated(monkeypatch):
    counted = Counted(monkeypatch)
    matrix = GoodputMatrix()
    first, second, third = (TableEstimator({"a": {1: rate}}) for rate in (1.0, 2.0, 3.0))
    assert matrix.evaluate([first, second], CONFIGURATIONS)[:, 0].tolist() == [1, 2]
    assert matrix.evaluate([third, first, second], CONFIGURATIONS)[:, 0].tolist() == [3, 1, 2]
    assert matrix.evaluate([second], CONFIGURATIONS)[:, 0].tolist() == [2]
    assert matrix.evaluate([second, first], CONFIGURATIONS)[:, 0].tolist() == [2, 1]
    assert counted.rows == [2, 1, 0, 1]


def test_other_configurations_begin_again(monkeypatch):
    counted = Counted(monkeypatch)
    matrix = GoodputMatrix()
    job = TableEstimator({"a": {1: 1.0, 4: 3.0}})
    assert matrix.evaluate([job], CONFIGURATIONS).shape == (1, 6)
    assert matrix.evaluate([job], Configurations(("a",), (1,), (4,))).tolist() == [[3.0]]
    assert counted.rows == [1, 1]


def test_a_matrix_cannot_be_spoiled():
    result = GoodputMatrix().evaluate([LinearEstimator()], CONFIGURATIONS)
    with pytest.raises(ValueError, match="read-only"):
        result[0, 0] = 7


def test_nothing_gives_nothing():
    assert GoodputMatrix().evaluate([], CONFIGURATIONS).shape == (0, 6)
    assert GoodputMatrix().evaluate([LinearEstimator()], Configurations((), (), ())).shape == (1, 0)


def test_a_configuration_without_gpus_is_refused():
    job = TrainingEstimator({"a": GpuModel(ThroughputParams(0.1, 0.01, 0, 0, 0, 0, 2.0), 32)}, 32, 1024, 1.0, 50.0)
    with pytest.raises(ValueError, match="one GPU per node"):
        best_matrix([job], Configurations(("a",), (2,), (1,)))


@settings(max_examples=50, deadline=None)
@given(many=st.lists(jobs, min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_what_a_model_has_found_is_the_same_as_found_alone(many, seed):
    generator = np.random.default_rng(seed)
    columns = [int(generator.integers(len(CONFIGURATIONS.gpus))) for _ in many]
    chosen = Configurations(*(tuple(each[column] for column in columns) for each in CONFIGURATIONS))
    fresh = [dataclasses.replace(each) for each in many]
    together, batches = goodputs(many, chosen), best_batches(many, chosen)
    for each, gpu_type, nodes, gpus, rate, batch in zip(fresh, *chosen, together, batches, strict=True):
        alone = each.goodput(gpu_type, np.array([nodes]), np.array([gpus]))
        assert alone.shape == (1,)
        assert alone[0] == pytest.approx(rate, rel=1e-12)
        assert each.best_batch(gpu_type, nodes, gpus) == batch


def test_what_a_model_has_found_is_no_part_of_it():
    model = GpuModel(ThroughputParams(0.1, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0), 8)
    one, other = (TrainingEstimator({"a": model}, 4, 64, 1.0, 10.0) for _ in range(2))
    assert one.goodput("a", np.array([1]), np.array([2]))[0] > 0
    assert one.found
    assert one == other
    assert repr(one) == repr(other)
    wire = TypeAdapter(TrainingEstimator)
    assert wire.dump_json(one) == wire.dump_json(other)
    assert "found" not in str(wire.json_schema())
    assert dataclasses.replace(one, grad_var=20.0).found == {}
