"""Allocation spans in the store, and the charges that they split."""

from __future__ import annotations

import itertools

import pytest

from penstock_scheduler.accounts.usage import between, share_between
from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.model import JobSpec


def span(from_s: float, to_s: float | None, gpus: int = 2, job: str = "1", **fields: object) -> AllocationSpan:
    wanted = {"user": "ada", "gpu_type": "t4", "nodes": {"n0": gpus}, "run_s": from_s} | fields
    return AllocationSpan(job=job, from_s=from_s, to_s=to_s, **wanted)


def charge(
    job: str, time_s: float, amount: float, text: str = "t4", kind: str = "gpu-seconds", key: str = ""
) -> LedgerLine:
    key = f"{kind}:{job}:{text}{key}"
    return LedgerLine(
        id=0, key=key, time_s=time_s, account="vision", user="ada", job=job, kind=kind, amount=amount, text=text
    )


def used(store, from_s: float, to_s: float) -> dict[str, float]:
    return {row.gpu_type: row.amount for row in store.used("user", from_s, to_s)}


def test_a_span_is_replaced_by_its_end_and_added_only_once(store):
    whole = span(1.0, None, gpu_ids=None, cause="chosen: it fits", shared=True, where="cloud", restarts=3)
    store.save_spans([whole, span(1.0, None, job="2")])
    ended = whole.model_copy(update={"to_s": 5.0, "exact": False, "gpu_ids": {"n0": (0, 3)}, "end": "gain"})
    store.save_spans([ended], once=[span(1.0, 99.0), span(7.0, 9.0)])
    assert store.job_spans("1") == [ended, span(7.0, 9.0)]
    assert [each.job for each in store.open_spans()] == ["2"]
    assert store.estimated_spans(5.0, 10) == [ended]
    assert store.estimated_spans(5.1, 10) == []
    assert store.spans_of(["1", "9"]) == {"1": [ended, span(7.0, 9.0)]}


def test_the_spans_of_a_time_in_pages(store):
    store.save_spans([span(1.0, 4.0), span(5.0, 9.0), span(6.0, None, job="2"), span(2.0, 3.0, job="3")])
    found = store.spans_between(3.5, 7.0, 10)
    assert [(each.job, each.from_s) for each in found] == [("1", 1.0), ("1", 5.0), ("2", 6.0)]
    assert store.spans_between(3.5, 7.0, 2) == found[:2]
    assert store.spans_between(3.5, 7.0, 2, after=("1", 1.0)) == found[1:]
    assert store.spans_between(9.0, 10.0, 10) == found[2:]


def test_a_charge_is_split_at_the_border_of_a_period(store):
    """2 GPUs for 1,800 s and then 4 GPUs from 2,000 s to 3,800 s: 3,600 + 7,200 GPU-seconds, charged at 3,800 s."""
    store.save_spans([span(0.0, 1800.0), span(2000.0, 3800.0, 4), span(0.0, 9e9, 8, where="cloud", job="2")])
    store.charge([charge("1", 3800.0, 10_800.0)])
    assert used(store, 0.0, 900.0) == {"t4": 1800.0}
    assert used(store, 900.0, 2900.0) == {"t4": 1800.0 + 3600.0}
    assert used(store, 1800.0, 2000.0) == {}
    assert used(store, 2900.0, 1e9) == {"t4": 3600.0}
    assert used(store, 3800.0, 1e9) == {}
    (whole,) = store.used("partition", 0.0, 1e9)
    assert (whole.jobs, whole.amount) == (1, 10_800.0)


def test_periods_add_up_to_the_ledger(store):
    """Also where the cluster's accounts have corrected the charge, and where the job held GPUs of two types."""
    store.save_spans([span(0.0, 1000.0), span(1000.0, 1500.0, gpu_type="a100"), span(1600.0, 1900.0, 7)])
    store.charge([charge("1", 1900.0, 4000.0), charge("1", 1900.0, 900.0, "a100"), charge("1", 1900.0, -55.0, key="c")])
    borders = [0.0, 10.0, 999.0, 1250.0, 1650.0, 1890.0, 2000.0]
    parts = [used(store, *border) for border in itertools.pairwise(borders)]
    assert sum(part.get("t4", 0.0) for part in parts) == pytest.approx(3945.0)
    assert sum(part.get("a100", 0.0) for part in parts) == pytest.approx(900.0)


def test_without_spans_and_in_the_cloud_a_charge_counts_at_its_time(store):
    store.save_spans([span(0.0, 100.0)])
    store.charge([charge("2", 50.0, 7.0), charge("1", 60.0, 9.0, kind="cloud-gpu-seconds")])
    assert used(store, 0.0, 50.0) == {}
    assert used(store, 50.0, 51.0) == {"t4": 7.0}
    assert used(store, 51.0, 100.0) == {"t4": 9.0}


def test_a_job_that_has_not_ended_is_split_as_well():
    """2 GPUs from 100 s to 200 s and since 300 s; it is 400 s, and 360 GPU-seconds were counted for 400 held."""
    spans = [span(100.0, 200.0), span(300.0, None), span(0.0, 50.0, 9, where="cloud"), span(0.0, 9.0, gpu_type="a100")]
    assert share_between(spans, "t4", 0.0, 150.0, 400.0) == 100 / 400
    assert share_between(spans, "t4", 350.0, 1e9, 400.0) == 100 / 400
    assert share_between(spans, "h100", 0.0, 1e9, 400.0) is None
    view = JobView(id="1", version=1, name="n", user="ada", state="running", submit_s=1.0, spec=JobSpec())
    view = view.model_copy(update={"gpu_seconds": {"t4": 360.0, "h100": 5.0}})
    assert between(view, spans, 100.0, 200.0, 400.0).gpu_seconds == {"t4": 180.0}
    assert between(view, spans, 390.0, 400.0, 400.0).gpu_seconds == {"t4": 18.0, "h100": 5.0}
    assert between(view, spans, 390.0, 399.0, 400.0).gpu_seconds == {"t4": pytest.approx(16.2)}


def test_spans_go_with_the_history_of_their_job(store):
    from tests.scheduler.store.test_store import numbered, view

    store.save_spans([span(0.0, 9.0), span(0.0, None, job="2")])
    store.save_jobs([view("1", state="ended", end_s=9.0), view("2")])
    store.save_round(numbered(100, time_s=200_000.0))
    assert [each.job for each in store.spans_between(0.0, 1e9, 10)] == ["2"]
