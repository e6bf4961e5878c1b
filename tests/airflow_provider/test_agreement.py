"""The comparison that the storm of tests/airflow_provider/test_storm.py ends with finds each kind of lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.airflow_provider.agreement import Ran, Shown, disagreements, with_noted_ends

FOREVER = float("inf")
FIRST = Ran("1", "airflow:tests:storm:a:job:-1:1001", "FAILED", 10.0, 20.0)
AGAIN = Ran("2", "airflow:tests:storm:a:job:-1:1002", "REQUEUED", 20.0, 30.0)
THEN = Ran("2", "airflow:tests:storm:a:job:-1:1002", "COMPLETED", 31.0, 40.0)
"""Its second run, after Slurm requeued the job."""
NEVER = Ran("3", "airflow:tests:storm:b:job:-1:1001", "CANCELLED", FOREVER, 41.0)
DELETED = Ran("4", "airflow:tests:storm:gone:job:-1:1001", "COMPLETED", 12.0, 50.0)
RECORDS = [FIRST, AGAIN, THEN, NEVER, DELETED]
A, B = "airflow:tests:storm:a:job:-1", "airflow:tests:storm:b:job:-1"
SHOWN = {A: Shown("success", "2", ""), B: Shown("failed", "3", "")}


def test_the_truth_is_accepted() -> None:
    assert disagreements(SHOWN, RECORDS) == []
    assert disagreements(SHOWN | {A: Shown("failed", "2", "a user marked it")}, RECORDS) == []


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([FIRST, AGAIN, replace(THEN, start_s=29.0)], "ran at once"),
        ([FIRST, AGAIN, THEN, replace(THEN, job="9", start_s=50.0, end_s=60.0)], "is the key of"),
        ([FIRST, AGAIN, THEN, replace(DELETED, state="RUNNING", end_s=FOREVER)], "nobody owns"),
        ([FIRST, AGAIN, THEN, replace(DELETED, state="PENDING", start_s=FOREVER, end_s=FOREVER)], "nobody owns"),
        ([FIRST, AGAIN, replace(THEN, state="FAILED")], "shows success, and its newest job is"),
        ([FIRST, replace(THEN, key=f"{A}:1000")], "shows success, and its newest job is"),
        ([], "shows success, and its newest job is None"),
        ([FIRST, replace(THEN, job="5")], "shows job 2, and its newest job is"),
    ],
)
def test_what_slurm_has_otherwise_is_found(records: list[Ran], sentence: str) -> None:
    assert sentence in "\n".join(disagreements(SHOWN, [*records, NEVER]))


@pytest.mark.parametrize(
    ("shown", "sentence"),
    [
        (Shown("failed", "2", ""), "shows failure, and its newest job is"),
        (Shown("deferred", "2", ""), "is deferred"),
        (Shown("success", None, ""), "shows job None"),
    ],
)
def test_what_airflow_shows_otherwise_is_found(shown: Shown, sentence: str) -> None:
    (found,) = disagreements(SHOWN | {A: shown}, RECORDS)
    assert sentence in found


def test_what_a_run_noted_itself_counts_where_slurmctld_has_forgotten_it() -> None:
    """A job that completed a moment before a kill was cancelled as it came back; another one's last run was never recorded."""
    cancelled = replace(THEN, state="CANCELLED", end_s=90.0)
    for records in ([FIRST, AGAIN, cancelled], [FIRST, AGAIN]):
        assert disagreements({A: SHOWN[A]}, records) != []
        assert disagreements({A: SHOWN[A]}, with_noted_ends(records, {("2", A): [35.0]})) == []
    assert with_noted_ends(RECORDS, {("2", A): [40.0], ("9", B): [40.0]}) == RECORDS, "of another job of the same id"
