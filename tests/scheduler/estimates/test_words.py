"""How estimates are said."""

import pytest

from penstock_scheduler.api.estimate_messages import (
    Estimates,
    JobEstimate,
    TimeRange,
    estimate_lines,
    in_words,
    start_cell,
)

NOW_S = 10_000.0


@pytest.mark.parametrize(
    ("low_s", "high_s", "words"),
    [
        (10 * 60, 40 * 60, "in 10 to 40 minutes (80 %)"),
        (0, 35, "within 1 minute (80 %)"),
        (20, 47 * 60, "within 50 minutes (80 %)"),
        (61 * 60, 200 * 60, "in 60 minutes to 4 hours (80 %)"),
        (3.2 * 3600, 8.1 * 3600, "in 3 to 9 hours (80 %)"),
        (40 * 3600, 60 * 3600, "in 36 hours to 2.5 days (80 %)"),
        (2 * 3600, None, "in 2 hours or later (80 %)"),
        (5, None, "now or later (80 %)"),
    ],
)
def test_ranges_have_sensible_digits(low_s, high_s, words):
    found = TimeRange(from_s=NOW_S + low_s, to_s=None if high_s is None else NOW_S + high_s)
    assert in_words(found, 0.8, NOW_S) == words


def test_sentences():
    start, end = TimeRange(from_s=NOW_S + 600, to_s=NOW_S + 2400), TimeRange(from_s=NOW_S + 3600 * 3, to_s=None)
    found = JobEstimate(at_s=NOW_S, start=start, end=end)
    assert estimate_lines(found, "queued", NOW_S) == [
        "It is expected to start in 10 to 40 minutes (80 %).",
        "It is expected to end in 3 hours or later (80 %).",
    ]
    assert start_cell(found, NOW_S) == "10 to 40 minutes"
    assert estimate_lines(JobEstimate(at_s=NOW_S, unknown="it shares GPUs"), "queued", NOW_S) == [
        "Its start and end are not known: it shares GPUs."
    ]
    assert estimate_lines(None, "queued", NOW_S) == ["Its start and end have not been estimated yet."]
    old = JobEstimate(at_s=NOW_S - 1200, end=TimeRange(from_s=NOW_S, to_s=NOW_S + 60))
    assert estimate_lines(old, "running", NOW_S) == ["It is expected to end within 1 minute (80 %), as of 20 min ago."]


def test_a_job_that_has_got_the_id_of_another_has_no_estimate():
    made = Estimates(round=1, at_s=NOW_S, seconds=0.1, jobs={"7": JobEstimate(at_s=NOW_S)})
    assert made.of("7", NOW_S - 1, waits=True) is not None
    assert made.of("7", NOW_S + 1, waits=True) is None


def test_a_job_that_was_stopped_since_has_no_end_of_the_time_when_it_ran():
    ran = JobEstimate(at_s=NOW_S, end=TimeRange(from_s=NOW_S + 60, to_s=NOW_S + 120))
    made = Estimates(round=1, at_s=NOW_S, seconds=0.1, jobs={"7": ran})
    assert made.of("7", NOW_S - 1, waits=False) == ran
    assert estimate_lines(made.of("7", NOW_S - 1, waits=True), "queued", NOW_S + 30) == [
        "Its start and end are not known: it held GPUs when this was last estimated."
    ]
