import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock_profiles.throughput import efficiency, gain

noises = st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)).filter(lambda noise: sum(noise) > 1e-300)


def test_worked_example():
    """sqr 1, var 3, S = 400 / 100 = 4: r = (3 + 1) / (3/4 + 1) = 16/7; efficiency = r / 4 = 4/7."""
    assert gain(1, 3, 400, 100) == pytest.approx(16 / 7)
    assert efficiency(1, 3, 400, 100) == pytest.approx(4 / 7)


def test_pure_noise_loses_nothing_and_no_noise_gains_nothing():
    assert gain(0, 1, 640, 10) == 64
    assert gain(1, 0, 640, 10) == 1


@given(noises, st.integers(1, 4096), st.lists(st.floats(1, 1e6), min_size=1, max_size=8))
def test_efficiency_is_in_0_1_and_never_rises_with_the_batch(noise, initial, scales):
    batches = initial * np.sort(scales)
    values = efficiency(*noise, batches, initial)
    assert values.shape == batches.shape
    assert np.all((values > 0) & (values <= 1))
    assert np.all(np.diff(values) <= 0)
    assert efficiency(*noise, initial, initial) == 1


@given(noises, st.integers(1, 4096), st.floats(1, 1e6))
def test_gain_is_between_1_and_the_scale(noise, initial, scale):
    assert 1 - 1e-9 <= gain(*noise, initial * scale, initial) <= scale * (1 + 1e-9)


@given(noises, st.floats(0.01, 100), st.floats(1, 100))
def test_only_the_ratio_of_the_two_matters(noise, unit, scale):
    sqr, var = noise
    assume(max(noise) > 1e-290)  # smaller ones lose their digits when they are multiplied
    assert efficiency(sqr * unit, var * unit, 8 * scale, 8) == pytest.approx(float(efficiency(sqr, var, 8 * scale, 8)))


@pytest.mark.skipif("PENSTOCK_TEST_DATA" not in os.environ, reason="needs the public data: see docs/developer/data.md")
@pytest.mark.parametrize("model", ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"])
def test_recorded_progress_is_our_gain_by_the_recorded_noise(model):
    """Progress per step of each recorded epoch, whose noise is stated at the initial batch size, as ours is."""
    folder = Path(os.environ["PENSTOCK_TEST_DATA"]) / "sia/profiles" / model
    runs = {int(file.stem.removeprefix("validation-")): pd.read_csv(file) for file in folder.glob("validation-*.csv")}
    errors = [
        float(gain(now.grad_sqr, now.grad_var, batch, min(runs)))
        / ((now.progress - before.progress) / (now.iteration - before.iteration))
        - 1
        for batch, run in runs.items()
        for before, now in zip(run.iloc[:-1].itertuples(), run.iloc[1:].itertuples(), strict=True)
    ]
    assert errors
    assert np.median(np.abs(errors)) < 0.002


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 1, 10, 10), "grad_sqr=-1"),
        ((1, math.nan, 10, 10), "grad_var=nan"),
        ((math.inf, 1, 10, 10), "grad_sqr=inf"),
        ((0, 0, 10, 10), "no gradient"),
        ((1, 1, 9, 10), "batch=9 is below initial_batch=10"),
        ((1, 1, math.nan, 10), "batch=nan"),
        ((1, 1, 10, 0), "initial_batch=0"),
    ],
)
def test_refuses_what_describes_no_gradient_or_batch(arguments, words):
    with pytest.raises(ValueError, match=words):
        efficiency(*arguments)
