"""The figures of a history as one HTML page that opens offline. It runs no script and loads nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from penstock_scheduler.cli.ask import local_time
from penstock_scheduler.people.drawing import svg
from penstock_slurm.history.figures import HistoryFigures
from penstock_slurm.history.words import Table, details, overview, period, summary

MOST_TICKS = 8
"""Dates below the picture."""


def write(path: Path, found: HistoryFigures, simulated: Iterable[str | Table]) -> None:
    """Write the page. Until it is whole, readers have the former one. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(render(found, simulated), encoding="utf-8")
    part.replace(path)


def render(found: HistoryFigures, simulated: Iterable[str | Table]) -> str:
    """The page: the figures in a few sentences, the picture of the GPUs, the simulations and all tables."""
    verdict = "<br>".join(map(escape, summary(found)))
    parts = [f"<p class=card>{verdict}</p><p class=soft>{escape(period(found))}</p>", _picture(found)]
    parts += [_shown(each) for each in (*simulated, *overview(found), *details(found))]
    return svg.page("The GPUs and their use", parts)


def _shown(block: str | Table) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block).replace(chr(10), '<br>')}</p>"
    if not block.rows:
        return f"<p>{escape(block.empty)}</p>"
    names = [name.capitalize().replace("Gpu", "GPU") for name in block.columns]
    head, *rows = (
        "".join(f"<{cell}{' class=n' if at else ''}>{escape(text)}" for at, text in enumerate(row))
        for cell, row in (("th", names), *(("td", row) for row in block.rows))
    )
    rows = [f"<tr>{row}" for row in rows]
    return "<br>" + svg.wide(f"<table><tr>{head}{''.join(rows)}</table>")


def _picture(found: HistoryFigures) -> str:
    """The GPUs that jobs held, and with them those that jobs waited for, over the period."""
    held, span_s = found.levels.held, found.end_s - found.begin_s
    wanted = [sum(both) for both in zip(held, found.levels.waited, strict=True)]
    gpus = float(sum(each.gpus for each in found.types))
    after_s = [time_s - found.begin_s for time_s in found.levels.times_s]
    given = (
        ("held by jobs", svg.LINES[0], [*zip(after_s, held, strict=True)]),
        ("held or waited for", svg.LINES[1], [*zip(after_s, wanted, strict=True)]),
        ("all GPUs now", svg.LINES[6], [(0.0, gpus), (span_s, gpus)]),
    )
    legend = svg.legend({name: colour for name, colour, _ in given})
    highest = max(gpus, *wanted, 1.0)
    across, up = svg.Axis(0, span_s, _days(found.begin_s, span_s)), svg.Axis(0, highest, svg.ticks(highest, 5))
    lines = [svg.Line(colour, points) for _, colour, points in given]
    title = "GPUs over the period"
    return f"<h2>{title}</h2>{legend}" + svg.wide(svg.chart(title, "up: GPUs", lines, across, up))


def _days(begin_s: float, span_s: float) -> svg.Ticks:
    """Times of the period, in seconds after its begin, with their dates."""
    step_s = span_s / MOST_TICKS
    return [(at * step_s, local_time(begin_s + at * step_s)[5:16]) for at in range(MOST_TICKS)]
