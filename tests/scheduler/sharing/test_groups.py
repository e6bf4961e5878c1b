"""Trials of one search: worked by hand, and the experiment of Gandiva's authors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.sharing.groups import GroupSettings, TrialSeen, judge
from penstock_scheduler.simulator.groups import (
    Configuration,
    by_early_results,
    by_policy,
    configurations,
    run_to_completion,
)

SETTINGS = GroupSettings(first_s=100.0, eta=2)


def trial(name: str, trained_s: float, *metrics: float) -> TrialSeen:
    """With results that came evenly."""
    count = len(metrics)
    return TrialSeen(name, trained_s, tuple((trained_s * (n + 1) / count, m) for n, m in enumerate(metrics)))


def test_new_trials_go_on_until_the_first_rung() -> None:
    verdict = judge([trial("a", 0.0), trial("b", 99.0, 0.1)], SETTINGS)
    assert verdict.order == ("a", "b")
    assert verdict.resting == ()


def test_the_better_half_goes_on_and_goes_first() -> None:
    """Four at the first rung: two go on, the best first, then the one that is new."""
    trials = [trial("a", 100.0, 0.1), trial("b", 100.0, 0.4), trial("c", 100.0, 0.3), trial("d", 100.0, 0.2)]
    verdict = judge([trial("new", 0.0), *trials], SETTINGS)
    assert verdict.order == ("b", "c", "new")
    assert verdict.resting == ("a", "d")


def test_who_is_alone_on_a_rung_waits_for_others_and_goes_on_when_there_are_none() -> None:
    assert judge([trial("a", 100.0, 0.5), trial("new", 0.0)], SETTINGS).order == ("new",)
    assert judge([trial("a", 100.0, 0.5)], SETTINGS).order == ("a",)


def test_it_is_judged_by_what_it_had_at_the_rung() -> None:
    """b had less after 100 s, though it has more now."""
    a, b = trial("a", 100.0, 0.5), TrialSeen("b", 200.0, ((100.0, 0.3), (200.0, 0.9)))
    verdict = judge([a, b], SETTINGS)
    assert (verdict.order, verdict.resting) == (("a",), ("b",))


def test_with_eta_four_a_quarter_goes_on_and_rungs_are_four_times_as_far() -> None:
    """Four at 100 s, one goes on; at 399 s it has not reached 400 s, the next rung, at which it would be alone."""
    settings = GroupSettings(first_s=100.0, eta=4)
    rest = [trial("b", 100.0, 0.3), trial("c", 100.0, 0.2), trial("d", 100.0, 0.1)]
    assert judge([trial("a", 100.0, 0.4), *rest], settings).order == ("a",)
    late = TrialSeen("a", 399.0, ((100.0, 0.1), (399.0, 0.9)))
    assert judge([late, *rest], settings).order == ("b",), "it is judged by the first rung still"


def test_who_reports_nothing_is_not_judged() -> None:
    assert judge([trial("a", 9000.0), trial("b", 9000.0)], SETTINGS).resting == ()


@given(st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 1)), min_size=1, max_size=12))
def test_somebody_always_goes_on_and_nobody_is_lost(seen: list[tuple[float, float]]) -> None:
    trials = [TrialSeen(f"{n}", trained_s, ((0.0, metric),)) for n, (trained_s, metric) in enumerate(seen)]
    verdict = judge(trials, SETTINGS)
    assert verdict.order
    assert sorted((*verdict.order, *verdict.resting)) == sorted(each.job for each in trials)


def begun(trials: Sequence[Configuration], gpus: int, by_s: float) -> int:
    """Configurations that have begun to train by then, run to completion."""
    return gpus * math.ceil(by_s / trials[0].training_s)


@pytest.mark.parametrize("gpus", [4, 16])
@pytest.mark.parametrize("at", [0.25, 0.5, 0.75])
def test_a_search_finds_the_good_one_sooner_by_early_results_and_tries_more(gpus: int, at: float) -> None:
    ratios, tried = [], []
    for seed in range(3):
        trials = configurations(100, at, random.Random(seed))
        slow, soon = run_to_completion(trials, gpus), by_early_results(trials, gpus, GroupSettings())
        assert math.isfinite(soon.found_s)
        ratios.append(slow.found_s / soon.found_s)
        tried.append(soon.seen / begun(trials, gpus, soon.found_s))
    assert sum(ratios) / 3 > 2.5
    assert sum(tried) / 3 > 4


@pytest.mark.parametrize("at", [0.25, 0.5])
def test_the_policy_in_the_round_loop_finds_it_sooner_and_tries_more(at: float) -> None:
    """With turns, starts and rounds, as on a cluster. Without early results it would try twice as many: those that take turns."""
    trials = configurations(100, at, random.Random(0))
    slow, soon = run_to_completion(trials, 4), by_policy(trials, 4)
    assert slow.found_s / soon.found_s > 2.5
    assert soon.seen / begun(trials, 4, soon.found_s) > 4
