"""Trials of one search: worked by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.rounds.sharing.groups import GroupSettings, TrialSeen, judge

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


def test_a_trial_alone_on_a_rung_waits_for_others_and_goes_on_when_there_are_none() -> None:
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


def test_a_trial_that_reports_nothing_is_not_judged() -> None:
    assert judge([trial("a", 9000.0), trial("b", 9000.0)], SETTINGS).resting == ()


@given(st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 1)), min_size=1, max_size=12))
def test_a_trial_always_goes_on_and_none_is_lost(seen: list[tuple[float, float]]) -> None:
    trials = [TrialSeen(f"{n}", trained_s, ((0.0, metric),)) for n, (trained_s, metric) in enumerate(seen)]
    verdict = judge(trials, SETTINGS)
    assert verdict.order
    assert sorted((*verdict.order, *verdict.resting)) == sorted(each.job for each in trials)
