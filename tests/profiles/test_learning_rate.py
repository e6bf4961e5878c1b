import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.learning_rate import RULES, adascale, linear, square_root
from penstock_profiles.noise import GradientNoise
from penstock_profiles.throughput import efficiency

noises = st.builds(GradientNoise, st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
scales = st.floats(1, 1e4)


def test_worked_example():
    """sqr 1, var 3, S = 4: AdaScale (3 + 1) / (3/4 + 1) = 16/7; linear 4; square root 2."""
    noise = GradientNoise(1, 3)
    assert adascale(4, noise) == pytest.approx(16 / 7)
    assert (linear(4, noise), square_root(4, noise)) == (4, 2)


def test_adascale_trusts_nothing_that_is_not_measured():
    assert adascale(64, None) == 1


@given(noises, scales, scales)
def test_adascale_is_between_1_and_linear_and_never_falls_with_the_scale(noise, scale, other):
    low, high = sorted((scale, other))
    assert 1 - 1e-9 <= adascale(low, noise) <= linear(low, noise) * (1 + 1e-9)
    assert adascale(low, noise) <= adascale(high, noise) * (1 + 1e-9)


@given(noises, scales)
def test_adascale_moves_a_sample_as_far_as_it_teaches(noise, scale):
    """Factor / scale is the efficiency: the learning rate that a sample has is worth its progress."""
    assert adascale(scale, noise) / scale == pytest.approx(
        float(efficiency(noise.grad_sqr, noise.grad_var, scale * 8, 8))
    )


@given(st.sampled_from(sorted(RULES)), noises)
def test_every_rule_leaves_the_initial_batch_alone(name, noise):
    assert RULES[name](1, noise) == pytest.approx(1)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("scale", [0.5, 0, -1, math.nan, math.inf])
def test_wrong_scale_is_named(name, scale):
    with pytest.raises(ValueError, match=f"scale={scale} is not a finite number of at least 1; no batch"):
        RULES[name](scale, GradientNoise(1, 1))
