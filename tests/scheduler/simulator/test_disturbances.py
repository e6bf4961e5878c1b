from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.disturbances import Disturbances


def test_nothing_goes_wrong_unless_asked_for():
    quiet = Disturbances()
    assert quiet.straggler("a", 1) == 1
    assert list(quiet.failures("n", 1e9)) == []
    assert quiet.measured(2.5, "a", 1) == 2.5
    assert quiet.profiling_s(4, 3) == 0


def test_draws_depend_on_what_is_asked_and_not_on_when():
    one, other = Disturbances(straggler_share=0.5, seed=3), Disturbances(straggler_share=0.5, seed=3)
    asked = [(job, start) for job in "abcdef" for start in range(5)]
    backwards = {what: other.straggler(*what) for what in reversed(asked)}
    assert {what: one.straggler(*what) for what in asked} == backwards
    assert backwards != {what: Disturbances(straggler_share=0.5, seed=4).straggler(*what) for what in asked}


def test_stragglers_come_as_often_and_are_as_slow_as_asked_for():
    factors = [Disturbances(straggler_share=0.2, straggler_slowdown=1.5).straggler("a", n) for n in range(4000)]
    slow = [factor for factor in factors if factor > 1]
    assert len(slow) / 4000 == pytest.approx(0.2, abs=0.025)
    assert np.median(slow) == pytest.approx(1.5, abs=0.04)


def test_nodes_fail_and_come_back_in_order():
    """A failure every 100 h and 10 h away: of 100,000 h about 909 failures."""
    failures = list(Disturbances(node_mtbf_h=100, node_repair_h=10).failures("n", 1e5 * 3600))
    assert len(failures) == pytest.approx(909, rel=0.12)
    assert all(fails < back for fails, back in failures)
    assert all(back <= again for (_, back), (again, _) in itertools.pairwise(failures))


def test_measurements_scatter_about_the_truth():
    logs = [math.log(Disturbances(estimation_error=0.1).measured(2.0, "a", n) / 2.0) for n in range(2000)]
    assert np.mean(logs) == pytest.approx(0, abs=0.01)
    assert np.std(logs) == pytest.approx(0.1, rel=0.1)


def test_profiling_costs_gpu_seconds():
    assert Disturbances(profiling_gpu_s=20).profiling_s(gpus=4, gpu_types=3) == 15


@pytest.mark.parametrize(
    "fields",
    [{"interference": 1.0}, {"straggler_share": 2}, {"node_mtbf_h": 0}, {"seed": -1}, {"estimation_error": math.nan}],
)
def test_out_of_range(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Disturbances(**fields)
