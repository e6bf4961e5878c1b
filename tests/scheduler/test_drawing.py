"""What pages and reports draw alike."""

from __future__ import annotations

import re

import pytest

from penstock_scheduler.people.drawing.gantt import GAP, ROW, TOP, gantt, rows
from penstock_scheduler.people.drawing.history import History, NodeShape, Span
from penstock_scheduler.people.drawing.svg import (
    COLOURS,
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    Dot,
    Line,
    chart,
    job_colour,
    time_ticks,
)
from tests.loopback.test_report import history, job


def rects(picture: str) -> list[dict[str, str]]:
    """The bars of a Gantt chart."""
    found = re.findall(r"<rect (x=[^>]+)><title>([^<]*)</title>", picture)
    return [dict(re.findall(r'(\S+)="([^"]*)"', attributes)) | {"tip": tip} for attributes, tip in found]


def test_a_bar_is_where_and_when_the_job_had_the_gpus():
    """60 s on 980 pixels. a100-00 comes after the four rows of t4-00 and a gap: its GPU 0 is at 8 + 4.6 x 9 = 49.4."""
    first, second, instant = rects(gantt(history(), 60.0))
    plot = WIDTH - LEFT - RIGHT
    assert float(first["x"]) == pytest.approx(LEFT + 10 / 60 * plot, abs=0.1)
    assert float(first["width"]) == pytest.approx(20 / 60 * plot, abs=0.1)
    assert (first["y"], first["height"]) == (f"{TOP}", f"{2 * ROW - 1}")
    assert second["y"] == f"{TOP + (4 + GAP) * ROW:g}"
    assert float(instant["width"]) == 1.5  # still to be seen
    assert first["tip"] == "a (job a): 2 t4, 0:10 to 0:30; t4-00 GPU 0-1"
    assert instant["tip"].endswith("t4-00 GPU 3")


def test_gpus_that_are_not_adjacent_are_bars_of_their_own_and_have_one_tip():
    nodes = (NodeShape("n", "t4", 8),)
    apart = History("h", nodes, (job("a", 0.0, Span(0.0, 10.0, "t4", {"n": (5, 0, 1)})),), 0.0, 10.0)
    first, second = rects(gantt(apart, 10.0))
    assert [each["height"] for each in (first, second)] == [f"{2 * ROW - 1}", f"{ROW - 1}"]
    assert first["tip"] == second["tip"] == "a (job a): 3 t4, 0:00 to 0:10; n GPU 0-1, 5"


def test_a_bar_has_the_colour_of_its_jobs_id_and_not_of_its_name_or_place():
    assert [each["fill"] for each in rects(gantt(history(), 60.0))] == [job_colour("a")] * 2 + [job_colour("<script>")]
    other = [job(str(number), 0.0, Span(0.0, 10.0, "t4", {"n": (number,)})) for number in range(8)]
    nodes = (NodeShape("n", "t4", 8),)
    forward, backward = (gantt(History("h", nodes, tuple(jobs), 0.0, 10.0), 10.0) for jobs in (other, other[::-1]))
    assert {each["tip"]: each["fill"] for each in rects(forward)} == {
        each["tip"]: each["fill"] for each in rects(backward)
    }
    assert {each["fill"] for each in rects(forward)} <= set(COLOURS)


def test_each_row_has_its_gpus_index_unless_there_are_too_many():
    assert gantt(history(), 60.0).count('class="soft index"') == 4 + 8
    large = History("h", tuple(NodeShape(f"n{number}", "t4", 8) for number in range(33)), (), 0.0, 10.0)
    assert "index" not in gantt(large, 10.0)
    assert rows(large).end == pytest.approx(33 * 8 + 32 * GAP)


def test_pictures_have_no_style_attributes_which_the_web_pages_policy_forbids_and_no_markup_of_jobs():
    line = Line("#000000", [(0, 0), (1, 1)], [(0, 0), (1, 1)], [Dot((1, 1), "<b>", "<i>", present=True)])
    for picture in (gantt(history(), 60.0), chart("<b>", "<b>", [line], *[Axis(0, 1, [(0.0, "<b>")])] * 2)):
        assert "style=" not in picture
        assert not re.search("<(b|i|script)>", picture)


def test_a_chart_of_factors_has_equal_steps():
    axis = Axis(1, 100, [], log=True)
    assert [axis.at(value) for value in (1, 10, 100)] == pytest.approx([0, 0.5, 1])
    assert Axis(5, 5, []).at(5) == 0


def test_long_times_are_in_hours():
    assert time_ticks(60.0)[0] == "minutes"
    assert time_ticks(60.0)[1][1] == (5, "0:05")
    assert time_ticks(86400.0)[0] == "hours"
    assert time_ticks(86400.0)[1][1] == (7200, "2")
