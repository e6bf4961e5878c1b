"""Reports over HTTP: each is stored once, and what is not plausible is refused."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing

import httpx
import pytest

from penstock_profiles.wire import Observation
from penstock_scheduler.api.client import ApiError
from penstock_scheduler.daemon.service.guard import check_report
from penstock_scheduler.jobs import report_quota
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import schema
from tests.scheduler.service.api import OBSERVED, report, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_reports_are_stored_once_and_only_from_the_present_epoch(api):
    api.submitter.given_epoch = 2
    with api.client("ada") as ada:
        receipt = ada.report("1", [report(0, 1), report(0, 2), report(1, 2), report(1, 2)])
        assert (receipt.accepted, receipt.duplicates) == (2, 1)
        (refused,) = receipt.refused
        assert refused.index == 0
        assert "present epoch is 2" in refused.message
        assert ada.report("1", [report(0, 2)]).duplicates == 1
        assert ada.report("1", [report(0, 3)]).accepted == 1, "a run that Slurm restarted by itself"
        assert ada.report("1", [report(2, 2)]).accepted == 0
    assert [(each.epoch, each.sequence) for each in api.board.store.reports("1")] == [(2, 0), (2, 1), (3, 0)]
    assert api.board.counters["reports refused"] == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"step_time_s": math.nan}, "finite"),
        ({"step_time_s": -1.0}, "greater than 0"),
        ({"step_time_s": 1e-8}, "samples/s are not plausible"),
        ({"goodput": 1e9}, "samples/s are not plausible"),
        ({"atomic_batch": 10**30}, "atomic_batch must be at most 1,000,000,000"),
        ({"sync_time_s": 0.6}, "must not be longer than step_time_s"),
        ({"nodes": 3}, "more nodes than GPUs"),
        ({"gpu_typ": "t4"}, "gpu_typ"),
    ],
)
def test_implausible_reports_are_refused(wrong, words):
    given = {"job_id": "1", "epoch": 1, "sequence": 0, "time_s": 1.0, "body": OBSERVED}
    assert isinstance(check_report(given, "1", 100.0).body, Observation)
    with pytest.raises(ValueError, match=words):
        check_report(given | {"body": OBSERVED | wrong}, "1", 100.0)
    with pytest.raises(ValueError, match="not of 2"):
        check_report(given, "2", 100.0)
    with pytest.raises(ValueError, match="ahead"):
        check_report(given | {"time_s": 1e9}, "1", 100.0)


def test_a_bad_report_among_good_ones_is_refused_alone(api):
    bad = {"job_id": "1", "epoch": 1, "sequence": 5, "time_s": -1.0, "body": OBSERVED}
    good = report(0).model_dump(mode="json")
    answer = httpx.post(
        f"{api.url}/v1/jobs/1/reports",
        json={"reports": [good, bad]},
        headers={"Authorization": f"Bearer {api.tokens['ada']}"},
    ).json()
    assert (answer["accepted"], [each["index"] for each in answer["refused"]]) == (1, [1])


def test_a_store_that_is_away_is_a_503_and_nothing_is_acknowledged(api, monkeypatch):
    def full(*arguments: object) -> None:
        raise StoreError("the disk is full")

    with api.client("ada") as ada, monkeypatch.context() as patch:
        patch.setattr("penstock_scheduler.api.client.RETRY_PAUSES_S", ())
        patch.setattr(api.board.store, "add_reports", full)
        with pytest.raises(ApiError, match="full") as error:
            ada.report("1", [report()])
        assert error.value.status == 503
    with api.client("ada") as ada:
        assert ada.report("1", [report()]).accepted == 1


def test_a_report_is_acknowledged_when_a_lock_on_the_store_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "BUSY_S", 0.1)
    monkeypatch.setattr("penstock_scheduler.api.client.RETRY_PAUSES_S", ())
    with serving(tmp_path) as api, api.client("ada") as ada:
        assert ada.report("1", [report(1)]).accepted == 1
        with closing(sqlite3.connect(tmp_path / "state" / schema.FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ApiError) as error:
                ada.report("1", [report(2)])
            assert error.value.code == "store-away"
            assert ada.job("1").state == "running", "what is in memory is answered"
            other.rollback()
        assert ada.report("1", [report(1), report(2)]).model_dump(exclude={"refused", "epoch"}) == {
            "accepted": 1,
            "duplicates": 1,
        }
        assert [each.sequence for each in api.board.store.reports("1")] == [1, 2]


def test_a_job_that_reports_too_much_is_told_so(api, monkeypatch):
    """Its newest report of the kind is kept; another job's batch is untouched."""
    monkeypatch.setattr(report_quota, "BURST_BYTES", 1000)
    with api.client("ada") as ada:
        receipt = ada.report("1", [report(number) for number in range(50)])
        assert 1 < receipt.accepted < 20
        assert receipt.accepted + len(receipt.refused) == 50
        assert {each.message for each in receipt.refused} == {report_quota.TEXT}
        stored = [each.sequence for each in api.board.store.reports("1")]
        assert stored == [*range(len(stored) - 1), 49]
