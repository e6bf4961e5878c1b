"""The page of a job: what its figures say, worked by hand."""

from __future__ import annotations

import re

from penstock_scheduler.api.history_messages import AllocationSpan, JobSample
from penstock_scheduler.api.messages import ConfigurationView, ExplanationView, JobView
from penstock_scheduler.daemon.service.web import drawings
from penstock_scheduler.daemon.service.web.job import Facts, _end
from penstock_scheduler.model import JobSpec


def span(from_s: float, to_s: float | None = None) -> AllocationSpan:
    return AllocationSpan(job="1", user="ada", gpu_type="t4", nodes={"n1": 2}, run_s=from_s, from_s=from_s, to_s=to_s)


def test_after_a_move_the_end_is_by_the_speed_on_the_new_gpus():
    """4,000 of 10,000 samples are left at 60,000 s. 100 a second on the former GPUs, 10 on the new ones: 400 s."""
    view = JobView(
        id="1", version=1, name="", user="ada", state="running", submit_s=0.0, spec=JobSpec(max_gpus=2), progress=6000.0,
        total=10_000.0,
    )  # fmt: skip
    why = ExplanationView(job=view, code="kept", text="", goodput=10.0)
    before = JobSample(time_s=59_900.0, span_s=0, gpus=8, progress=5000.0, goodput=100.0)
    after = JobSample(time_s=59_990.0, span_s=0, gpus=2, progress=6000.0, goodput=20.0)
    spans = [span(50_000.0, 59_940.0), span(59_950.0)]
    facts = Facts(view, why, spans, [before], None, None)
    assert _end(facts, 60_000.0) == 60_420.0  # 60,400, to the minute
    assert _end(Facts(view, why, spans, [before, after], None, None), 60_000.0) == 60_180.0  # 200 s, to the minute


def test_figures_of_an_axis_are_short():
    """They have room for 44 units left of the axis, which "1.04e+04" does not fit into."""
    figures = {0.0: "0", 0.35: "0.35", 12.0: "12", 999.0: "999", 10_400.0: "10.4 k", 2e6: "2 M", 5.19e9: "5.19 G"}
    assert {value: drawings.short(value) for value in figures} == figures
    options = [
        ConfigurationView(gpu_type="t4", nodes=1, gpus=gpus, goodput=goodput) for gpus, goodput in ((1, 5e3), (2, 1e4))
    ]
    drawn = drawings.curve(options, None)
    assert re.findall(r'text-anchor="end">([^<]+)<', drawn)[:3] == ["0", "5 k", "10 k"]


def test_the_text_of_a_low_block_stands_above_it():
    """Of at most 16 GPUs, one is 9 of 150 units high: less than a line of text."""
    tall, low = (
        span(0.0, 500.0).model_copy(update={"nodes": {"n1": 16}}),
        span(500.0).model_copy(update={"nodes": {"n1": 1}}),
    )
    drawn = drawings.strip([tall, low], 0.0, 1000.0, 16)
    blocks = [float(y) for y in re.findall(r'<rect class="block"[^>]* y="([0-9.]+)"', drawn)]
    texts = {text: float(y) for y, text in re.findall(r'y="([0-9.]+)">([0-9]+) t4<', drawn)}
    assert texts == {"16": blocks[0] + 14, "1": blocks[1] - 4}
