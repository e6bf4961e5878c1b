from __future__ import annotations

import re

import pytest

from penstock_loopback.demo.report import render_page
from penstock_scheduler.people.drawing.history import History, JobHistory, NodeShape, Span

NODES = (NodeShape("t4-00", "t4", 4), NodeShape("a100-00", "a100", 8))


def job(name: str, submit_s: float, *spans: Span, end_s: float | None = None) -> JobHistory:
    goodput = tuple(point for span in spans for point in ((span.start_s, 0.01), (span.end_s, 0.0)))
    start_s = spans[0].start_s if spans else None
    state = "COMPLETED" if end_s is not None else "PENDING"
    return JobHistory(
        name, name, "adaptive 1-8", submit_s, start_s, end_s, state, spans, goodput, max(len(spans) - 1, 0)
    )


def history(title: str = "Ours", **fields: object) -> History:
    jobs = (
        job(
            "a",
            100.0,
            Span(110.0, 130.0, "t4", {"t4-00": (0, 1)}),
            Span(133.0, 150.0, "a100", {"a100-00": (0, 1, 2, 3)}),
            end_s=150.0,
        ),
        job("<script>", 105.0, Span(120.0, 120.0, "t4", {"t4-00": (3,)}), end_s=120.0),
        job("never", 110.0),
    )
    return History(title, NODES, fields.pop("jobs", jobs), 100.0, 160.0)  # type: ignore[arg-type]


def test_the_figures_are_those_of_the_spans():
    """Job a: 20 s on 2 T4 and 17 s on 4 A100; 50 s and 15 s from submission to end."""
    found = history()
    assert found.gpu_seconds == {"a100": pytest.approx(68.0), "t4": pytest.approx(40.0)}
    assert found.average_jct_s == pytest.approx((50 + 15) / 2)
    assert found.makespan_s is None
    assert found.average_wait_s == pytest.approx((10 + 15) / 2)


def test_the_queue_counts_jobs_without_gpus():
    """a waits from 100 to 110, then between its two runs; never waits for ever."""
    queue = dict(history().queue())
    assert queue[100.0] == 1
    assert queue[105.0] == 2
    assert queue[110.0] == 2  # a has started, never has come
    assert queue[120.0] == 1
    assert queue[130.0] == 2
    assert queue[150.0] == 1


def test_goodput_is_in_jobs_per_minute():
    assert dict(history().goodput())[110.0] == pytest.approx(0.6)


def test_the_page_is_self_contained_and_escapes_names():
    page = render_page(
        [history(), history("Theirs")], heading="A & B", facts={"k": "v<"}, time_scale=20, next_steps=[("l", "t")]
    )
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|https?://", page)
    assert "0% longer than theirs" in page
    assert "2 t4 → 4 a100" in page


def test_empty_histories_and_jobs_that_never_ran_still_make_a_page():
    empty = History("Empty", (), (), 0.0, 0.0)
    for histories in ([], [empty], [empty, empty], [history(jobs=(job("never", 100.0),))] * 2):
        assert "Nothing can be compared" in render_page(histories, heading="h", facts={}, time_scale=1, next_steps=[])
