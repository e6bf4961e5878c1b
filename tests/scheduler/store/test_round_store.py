"""Which rounds and reports a store keeps and finds, at the borders."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa

from penstock_profiles.wire import Checkpointed, Observation, Report
from penstock_scheduler.model import Hold, Outcome, Progress, Stop, StopCode
from penstock_scheduler.model.records import UnreadableRound
from penstock_scheduler.store.rounds import summarise
from penstock_scheduler.store.sql import open_store
from tests.scheduler.store.test_store import numbered, report


def measured(sequence: int, job: str) -> Report:
    body = Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=8, steps=1, step_time_s=1.0, progress=sequence)
    return Report(job_id=job, epoch=1, sequence=sequence, time_s=1.0, body=body)


def stored(store) -> dict[int, int | None]:
    """Each round, and the one from which it is stored as a difference."""
    with store.read() as db:
        rows = db.execute(sa.text("SELECT round, key_round FROM rounds ORDER BY round"))
        return {row.round: row.key_round for row in rows}


def test_every_round_but_the_newest_is_stored_as_its_difference_from_the_first(store):
    for number in (1, 2, 3):
        store.save_round(numbered(number))
    assert stored(store) == {1: None, 2: 1, 3: None}
    store.save_round(numbered(4))
    assert stored(store) == {1: None, 3: 1, 4: None}, "two are kept, and the one from which they differ"
    assert store.round(3) == numbered(3)


def test_a_process_that_has_started_anew_stores_its_first_round_whole_and_frees_the_old_ones(where):
    store = open_store(where, writer=True, keep_rounds=2)
    for number in (1, 2, 3):
        store.save_round(numbered(number))
    store.close()
    store = open_store(where, writer=True, keep_rounds=2)
    store.save_round(numbered(4))
    assert stored(store) == {3: None, 4: None}, "no round that is kept differs from round 1"
    store.save_round(numbered(5))
    store.save_round(numbered(6))
    assert stored(store) == {4: None, 5: 4, 6: None}
    store.close()


def test_a_round_that_is_saved_again_takes_the_place_of_the_old_one(store):
    for number in (1, 2, 2, 1):
        store.save_round(numbered(number, time_s=1000.0 + number))
    assert store.round(1) == numbered(1, time_s=1001.0)
    store.save_round(numbered(2, time_s=5.0))
    assert store.round(2) == numbered(2, time_s=5.0)
    assert store.last_round() == numbered(2, time_s=5.0)
    assert store.round_numbers() == [1, 2]


def test_a_round_whose_key_round_is_gone_or_damaged_is_damaged_and_the_log_says_so(store, caplog):
    for number in (1, 2, 3):
        store.save_round(numbered(number))
    with store.write() as db:
        db.execute(sa.text("UPDATE rounds SET record = :junk WHERE round = 3"), {"junk": b"junk"})
        db.execute(sa.text("DELETE FROM rounds WHERE round = 1"))
    with pytest.raises(
        UnreadableRound, match=r"round 2 in .* is damaged: round 1, from which it differs, is not there"
    ):
        store.round(2)
    with caplog.at_level(logging.WARNING):
        assert store.last_round() is None
    assert [line.message for line in caplog.records] == ["round skipped", "round skipped"]


def test_rounds_in_numbers_come_newest_first_from_before_a_round(store):
    for number in (1, 2):
        store.save_round(numbered(number))
    newest, older = summarise(numbered(2)), summarise(numbered(1))
    assert store.summaries(None, 1) == [newest]
    assert store.summaries(None, 5) == [newest, older]
    assert store.summaries(2, 5) == [older]
    assert store.summaries(1, 5) == []
    plan = numbered(2).plan
    counts = newest.jobs, newest.placed, newest.waiting, newest.round, newest.time_s
    assert counts == (len(numbered(2).snapshot.jobs), len(plan.assignments), len(plan.waiting), 2, 1000.0)


def test_old_rows_go_with_every_hundredth_round_alone(store):
    store.begin_submission("ada", "k", "digest")
    with store.write() as db:
        db.execute(sa.text("UPDATE submissions SET created_s = 0, job = '1'"))
    for number in (99, 101, 150):
        store.save_round(numbered(number, time_s=86_401.0))
        assert store.submission("ada", "k") == "1"
    store.save_round(numbered(200, time_s=86_400.0))
    assert store.submission("ada", "k") == "1", "it is kept for a whole day"
    store.save_round(numbered(300, time_s=86_400.1))
    assert store.submission("ada", "k") is None


def test_the_newest_reason_of_the_stops_since_a_time(store):
    stop, other = Stop(StopCode.PREEMPTED, "a"), Stop(StopCode.SHARING, "b")
    for time_s, why, job in ((1.0, stop, "1"), (2.0, other, "1"), (3.0, None, "1"), (4.0, stop, "2")):
        store.add_outcomes(time_s, [Outcome(Hold(job, 1), Progress.DONE, "", why)])
    assert store.newest_stop("1", 0.0) == other
    assert store.newest_stop("1", 2.0) == other
    assert store.newest_stop("1", 2.1) is None
    assert store.newest_stop("3", 0.0) is None
    assert [(line.time_s, line.stop) for line in store.outcomes("1")] == [(1.0, stop), (2.0, other), (3.0, None)]
    assert [line.time_s for line in store.outcomes("2")] == [4.0]
    assert [line.time_s for line in store.outcomes()] == [1.0, 2.0, 3.0, 4.0]


def test_jobs_with_measurements_since_a_row_a_thousand_rows_back_are_named_again(store):
    """Another process may write a row late, under a lower number."""
    store.add_reports([measured(0, "a"), measured(0, "b")] + [report(number, "c") for number in range(999)])
    row, jobs = store.observed_since(None)
    assert (row, jobs) == (1001, frozenset())
    assert store.observed_since(row) == (row, frozenset())
    assert store.observed_since(row + 1) == (row, frozenset())
    store.add_reports([measured(0, "d")])
    assert store.observed_since(row) == (row + 1, {"b", "d"})


def test_the_newest_reports_of_some_kinds_are_in_their_order(store):
    store.add_reports([measured(0, "1"), report(1), measured(2, "1"), measured(0, "2"), measured(3, "1")])
    assert store.newest_reports("1", ("observation", "checkpointed")) == [
        measured(0, "1"),
        report(1),
        measured(2, "1"),
        measured(3, "1"),
    ]
    assert store.newest_reports("1", ("observation",), 2) == [measured(2, "1"), measured(3, "1")]
    assert store.newest_reports("1", ("checkpointed",), 1) == [report(1)]
    assert report(1).body == Checkpointed(progress=1.0, seconds=0.1)


def test_a_report_that_comes_twice_at_once_is_new_once(store):
    assert store.add_reports([report(0), report(0), report(0, epoch=2), report(0, job="2")]) == [
        True,
        False,
        True,
        True,
    ]
    assert (store.newest_epoch("1"), store.newest_epoch("2"), store.newest_epoch("3")) == (2, 1, None)
