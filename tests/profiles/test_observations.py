import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.observations import NOTICEABLE, WINDOW, Measured, Observations, check


def average(observations: Observations) -> tuple[float, float]:
    measured = observations.measured()
    return float(measured.step_s[0]), float(measured.sync_s[0])


def test_the_middle_half_by_weight_is_averaged():
    """Four reports of equal weight: the middle two give (2 + 3) / 2 = 2.5 s; 1 and 40 do not count."""
    observations = Observations()
    for step_s in (40, 2, 1, 3):
        observations.add(1, 2, 16, step_s, step_s / 10)
    assert average(observations) == pytest.approx((2.5, 0.25))


def test_a_report_of_many_steps_weighs_more():
    """Weights 1 and 3: the middle half, from 1 to 3 of 4, lies in the second report whole."""
    observations = Observations()
    observations.add(1, 1, 16, 1.0, steps=1)
    observations.add(1, 1, 16, 1.5, steps=2)
    observations.add(1, 1, 16, 2.0, steps=9)
    assert average(observations)[0] == pytest.approx(2.0)


@pytest.mark.parametrize("place", range(8))
def test_a_hiccup_has_no_weight_wherever_it_comes(place):
    calm, shaken = Observations(), Observations()
    for turn in range(8):
        step_s = 1 + 0.001 * turn
        calm.add(1, 4, 32, step_s, 0.1)
        shaken.add(1, 4, 32, 10 * step_s if turn == place else step_s, 0.1)
    assert average(shaken)[0] == pytest.approx(average(calm)[0], rel=0.005)


def test_of_two_the_shorter_counts():
    observations = Observations()
    observations.add(1, 1, 16, 10.0)
    assert observations.add(1, 1, 16, 1.0)
    assert average(observations)[0] == 1.0


def test_a_job_that_has_become_slower_is_followed():
    observations = Observations()
    for step_s in [1.0] * 100 + [2.0] * WINDOW:
        observations.add(1, 1, 16, step_s)
    assert average(observations)[0] == pytest.approx(2.0, rel=NOTICEABLE)


def test_add_returns_whether_the_report_is_news():
    observations = Observations()
    assert observations.add(1, 1, 16, 1.0)
    assert not observations.add(1, 1, 16, 1.01)
    assert observations.add(1, 1, 32, 2.0)
    assert [observations.add(1, 1, 16, 1.5) for _ in range(4)].count(True) >= 1
    assert len(observations) == 2


@given(st.permutations([(1, 1, 8), (1, 1, 16), (1, 2, 8), (2, 2, 8), (2, 8, 8)]))
def test_the_order_of_shapes_is_theirs(shapes):
    observations = Observations()
    for nodes, replicas, batch in shapes:
        observations.add(nodes, replicas, batch, 1.0, 0.1 * (replicas > 1))
    measured = observations.measured()
    assert list(zip(measured.nodes, measured.replicas, measured.atomic_batch, strict=True)) == sorted(shapes)


def test_nothing_measured_has_columns_too():
    assert [column.shape for column in Observations().measured()] == [(0,)] * 5


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ((0, 1, 16, 1.0, 0.0), "nodes=0 "),
        ((1, 0, 16, 1.0, 0.0), "replicas=0 "),
        ((2, 1, 16, 1.0, 0.0), "replicas=1 "),
        ((1, 1.5, 16, 1.0, 0.0), "replicas=1.5 "),
        ((1, 1, 0, 1.0, 0.0), "atomic_batch=0 "),
        ((1, 1, 16, -1.0, 0.0), "step_s=-1 "),
        ((1, 1, 16, math.nan, 0.0), "step_s=nan "),
        ((1, 1, 16, math.inf, 0.0), "step_s=inf "),
        ((1, 2, 16, 1.0, 1.0), "sync_s=1 "),
        ((1, 2, 16, 1.0, -0.1), "sync_s=-0.1 "),
    ],
)
def test_what_no_step_can_have_is_refused_and_not_kept(report, words):
    observations = Observations()
    with pytest.raises(ValueError, match=f"^{words}.*(leave the row out|measure)"):
        observations.add(*report)
    assert len(observations) == 0


def test_a_report_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="steps=0 is not a positive number"):
        Observations().add(1, 1, 16, 1.0, steps=0)


def test_the_row_of_a_wrong_value_is_named():
    columns = [np.array([1.0, 1.0, bad]) for bad in (1, 1, 16)]
    with pytest.raises(ValueError, match="step_s=-3 in row 2 must be more than 0 s"):
        check(Measured(*columns, np.array([1.0, 2.0, -3.0]), np.zeros(3)))
    with pytest.raises(ValueError, match=r"sync_s has shape \(2,\)"):
        check(Measured(*columns, np.ones(3), np.zeros(2)))
