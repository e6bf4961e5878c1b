"""How wide ranges become by what happened to earlier ones. Worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock_scheduler.simulator.estimates.estimating import JobRanges, Range
from penstock_scheduler.simulator.estimates.held import AT_ONCE, FIRST, KEPT_S, MOST, Held, Noted, Notes
from penstock_scheduler.simulator.estimates.past import Past, PastJob
from tests.scheduler.builders import job

DRAWN = Range(540.0, 1140.0, 2340.0)
"""10, 20 and 40 minutes, each less the minute that is added for the logarithm: both ends are a factor of 2 from the middle."""


def past(after_s: list[float], now_s: float = 90_000.0) -> Past:
    """Jobs that started so many seconds after their range was drawn."""
    jobs = [PastJob(job(f"j{n}"), 1.0, None, n + each) for n, each in enumerate(after_s)]
    return Past(jobs, now_s)


def drawn(count: int, each: Range = DRAWN) -> Held:
    noted = [
        Noted(at_s=float(n), job=f"j{n}", low_s=each.low_s, middle_s=each.middle_s, high_s=each.high_s)
        for n in range(count)
    ]
    return Held(Notes(start=noted))


def test_while_nothing_is_known_ranges_are_wider_than_drawn():
    assert Held().widths(past([])).start == pytest.approx(FIRST, rel=0.05)
    assert drawn(50).widths(Past([], 90_000.0)).start == pytest.approx(FIRST, rel=0.05), (
        "nothing is known of these jobs"
    )


def test_ranges_become_as_wide_as_four_of_five_had_to_be():
    """150 started in the middle of their ranges, and 50 a factor of 8 later: 3 times as wide as was drawn would hold them."""
    middle_s, late_s = 1140.0, 1200.0 * 8 - 60
    assert drawn(200).widths(past([middle_s] * 150 + [late_s] * 50)).start == pytest.approx(3.0)
    assert drawn(200).widths(past([middle_s] * 190 + [late_s] * 10)).start < FIRST
    assert drawn(200).widths(past([middle_s] * 50 + [1e9] * 150)).start == MOST


def test_only_the_newest_count():
    late_s, middle_s = 1200.0 * 8 - 60, 1140.0
    assert drawn(400).widths(past([late_s] * 200 + [middle_s] * 200)).start < 1.0


def test_a_job_that_is_overdue_counts_before_it_starts():
    """80 jobs have waited 8 times as long as the middle of their ranges, and still wait."""
    waiting = [PastJob(job(f"j{n}"), 0.0, None) for n in range(80)]
    assert drawn(80).widths(Past(waiting, 1200.0 * 8)).start == pytest.approx(3.0, rel=0.05)
    assert drawn(80).widths(Past(waiting, 600.0)).start == pytest.approx(FIRST, rel=0.05), "they are not late yet"


def test_what_happened_before_a_range_was_drawn_says_nothing():
    """A job that had run before, or a clock that was set back."""
    assert drawn(50).widths(past([-100_000.0] * 50)).start == pytest.approx(FIRST, rel=0.05)


def test_a_range_without_an_end_holds_all_that_is_late():
    assert Noted(at_s=0.0, job="1", low_s=540.0, middle_s=1140.0, high_s=None).needed(1e9) == 0.0
    assert Noted(at_s=0.0, job="1", low_s=540.0, middle_s=None, high_s=None).needed(1e9) == 1.0
    assert Noted(at_s=0.0, job="1", low_s=540.0, middle_s=None, high_s=None).needed(180.0) == 3.0


def test_a_few_jobs_of_a_round_are_noted_and_kept_for_days():
    held = Held()
    jobs = [job(str(n)) for n in range(100)]
    found = {each.id: JobRanges(start=DRAWN, end=Range(540.0, math.inf, math.inf)) for each in jobs}
    for round_, at_s in enumerate((1000.0, 2000.0, 1500.0 + KEPT_S)):
        held.note(jobs, found, at_s, np.random.default_rng(round_))
    assert {each.at_s for each in held.notes.start} == {2000.0, 1500.0 + KEPT_S}
    assert len(held.notes.start) == len(held.notes.end) == 2 * AT_ONCE
    assert Notes.model_validate(held.notes.model_dump(mode="json")) == held.notes
    moved = [job(str(n), restarts=1) for n in range(3)]
    held.note(moved, found, 1600.0 + KEPT_S, np.random.default_rng(9))
    assert {each.at_s for each in held.notes.start} == {2000.0, 1500.0 + KEPT_S}, "it has started before"
