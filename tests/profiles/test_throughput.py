import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.throughput import ThroughputParams, compute_time, step_time, sync_time, throughput

PARAMS = ThroughputParams(alpha_c=0.1, beta_c=0.01, alpha_r=0.05, beta_r=0.01, alpha_n=0.2, beta_n=0.02, gamma=1.0)

seconds = st.floats(0, 10) | st.just(0.0)
params = st.builds(
    ThroughputParams,
    alpha_c=st.floats(1e-6, 10),
    beta_c=seconds,
    alpha_r=seconds,
    beta_r=seconds,
    alpha_n=seconds,
    beta_n=seconds,
    gamma=st.floats(1, 10),
    growth=st.floats(-1, 1),
)


@st.composite
def steps(draw):
    nodes = draw(st.integers(1, 16))
    return nodes, draw(st.integers(nodes, 128)), draw(st.integers(1, 4096)), draw(st.integers(0, 20))


def test_one_gpu_has_nothing_to_synchronise():
    """T_acc = 0.1 + 0.01 x 10 = 0.2 s; 10 samples / 0.2 s = 50 samples/s."""
    assert step_time(PARAMS, 1, 1, 10) == pytest.approx(0.2)
    assert throughput(PARAMS, 1, 1, 10) == pytest.approx(50)


def test_one_node_synchronises_by_the_r_parameters():
    """K = 4: T_net = 0.05 + 0.01 x 2 = 0.07; gamma 1 adds: 0.2 + 0.07 = 0.27 s for 40 samples."""
    assert throughput(PARAMS, 1, 4, 10) == pytest.approx(40 / 0.27)


def test_several_nodes_synchronise_by_the_n_parameters():
    """K = 4: T_net = 0.2 + 0.02 x 2 = 0.24; s = 2 micro-steps more: 2 x 0.2 + 0.2 + 0.24 = 0.84 s for 120 samples."""
    assert step_time(PARAMS, 2, 4, 10, 2) == pytest.approx(0.84)
    assert throughput(PARAMS, 2, 4, 10, 2) == pytest.approx(120 / 0.84)


def test_gamma_two_overlaps_as_a_hypotenuse():
    """T_acc = 0.3, T_net = 0.4: (0.09 + 0.16)^(1/2) = 0.5 s."""
    overlapping = ThroughputParams(alpha_c=0.3, beta_c=0, alpha_r=0.4, beta_r=0, alpha_n=0, beta_n=0, gamma=2)
    assert step_time(overlapping, 1, 2, 1) == pytest.approx(0.5)


@pytest.mark.parametrize(("growth", "factor"), [(1, 6), (0.5, 4), (0, 4 * math.log(2)), (-1, 1.5)])
def test_synchronisation_grows_less_than_in_proportion(growth, factor):
    """K = 8, K/2 = 4: 4 - 1 = 3 twice; (2 - 1) / 0.5 twice; ln 4 twice; (1/4 - 1) / -1 = 0.75 twice."""
    grown = dataclasses.replace(PARAMS, growth=growth)
    assert sync_time(grown, 1, 8) == pytest.approx(0.05 + 0.01 * factor)
    assert sync_time(grown, 2, 8) == pytest.approx(0.2 + 0.02 * factor)
    assert sync_time(grown, 1, 2) == 0.05
    assert sync_time(grown, 1, 1) == 0


@given(params, st.integers(1, 16), st.integers(1, 1000))
def test_more_replicas_never_synchronise_faster(params, nodes, replicas):
    few, many = sync_time(params, nodes, [nodes + replicas, nodes + 2 * replicas])
    assert few <= many * (1 + 1e-12)


def test_arguments_broadcast():
    nodes_CB, gpus_CB = np.array([[1], [1], [2]]), np.array([[1], [4], [4]])
    batch_B = np.array([10, 20])
    time_CB = step_time(PARAMS, nodes_CB, gpus_CB, batch_B)
    assert time_CB.shape == (3, 2)
    assert time_CB[2, 1] == step_time(PARAMS, 2, 4, 20)


@given(params, steps())
def test_a_step_takes_between_the_longer_part_and_the_sum(params, step):
    nodes, replicas, atomic, accumulation = step
    compute, sync = compute_time(params, atomic), sync_time(params, nodes, replicas)
    time = step_time(params, nodes, replicas, atomic, accumulation)
    assert (accumulation * compute + max(compute, sync)) * (1 - 1e-9) <= time
    assert time <= ((accumulation + 1) * compute + sync) * (1 + 1e-9)


@given(
    params, steps(), st.sampled_from(["alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n"]), st.floats(0, 1)
)
def test_a_smaller_parameter_never_slows(params, step, name, factor):
    smaller = {name: getattr(params, name) * factor}
    if smaller.get("alpha_c") == 0 and params.beta_c == 0:
        return
    faster = dataclasses.replace(params, **smaller)
    assert step_time(faster, *step) <= step_time(params, *step) * (1 + 1e-9)


@given(params, steps(), st.floats(1, 10))
def test_more_overlap_never_slows(params, step, gamma):
    low, high = sorted([params.gamma, gamma])
    slow, fast = dataclasses.replace(params, gamma=low), dataclasses.replace(params, gamma=high)
    assert step_time(fast, *step) <= step_time(slow, *step) * (1 + 1e-9)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ThroughputParams)])
@pytest.mark.parametrize("value", [-1.1, math.nan, math.inf])
def test_refuses_parameters_that_are_no_times(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        dataclasses.replace(PARAMS, **{field: value})


def test_refuses_growth_beyond_proportion():
    with pytest.raises(ValueError, match=r"growth=1\.5 is not a finite number of at least -1 and at most 1"):
        dataclasses.replace(PARAMS, growth=1.5)


def test_refuses_free_computing():
    with pytest.raises(ValueError, match="alpha_c=0 and beta_c=0"):
        dataclasses.replace(PARAMS, alpha_c=0.0, beta_c=0.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 1, 0), "nodes=0"),
        ((1, 0, 1, 0), "replicas=0"),
        ((1, 1, 0, 0), "atomic_batch=0"),
        ((1, 1, math.nan, 0), "atomic_batch=nan"),
        ((1, 1, math.inf, 0), "atomic_batch=inf"),
        ((1, 1, 1, -1), "accumulation_steps=-1"),
        ((3, 2, 1, 0), "nodes=3 is more than replicas=2"),
    ],
)
def test_refuses_steps_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        throughput(PARAMS, *arguments)
