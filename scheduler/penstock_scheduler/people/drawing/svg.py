"""Line charts and what else pictures as SVG have in common. Pure. No `style` attributes, which the web pages' policy forbids.

Classes are those of `style.css`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 1080, 92, 8
"""Pixels of a report's picture: its width, and its margins."""

HOURS_FROM_S = 3 * 3600.0
"""Time axes that are longer than this are in hours."""

Point = tuple[float, float]
Ticks = Sequence[tuple[float, str]]
"""(value, label)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The values from one end of an axis to the other. `log`: equal factors are equally long."""

    low: float
    high: float
    ticks: Ticks
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is, as a share of the axis."""
        if self.log:
            return math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a line with a text on hover. `label` is beside it; `present` marks it."""

    at: Point
    tip: str
    label: str = ""
    present: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. `band` is the outline of the area around it."""

    colour: str
    points: Sequence[Point]
    band: Sequence[Point] = ()
    dots: Sequence[Dot] = ()


def chart(
    label: str,
    note: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    width: int = WIDTH,
    left: int = LEFT,
    tall: int = 180,
) -> str:
    """A line chart.

    Args:
        label: what the picture shows, for those who do not see it.
        note: below the chart: what the axes are.
        lines: of the chart, later ones above.
        x, y: the axes.
        width, left, tall: pixels: of the picture, of its left margin, and from the lowest to the highest value.
    """
    top, plot = 8, width - left - RIGHT
    foot = top + tall

    def across(value: float) -> float:
        return round(left + x.at(value) * plot, 1)

    def down(value: float) -> float:
        return round(foot - y.at(value) * tall, 1)

    def path(points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{across(a):g} {down(b):g}" for a, b in points)

    parts = []
    for value, text in x.ticks:
        parts.append(f'<line class="grid" x1="{across(value)}" x2="{across(value)}" y1="{top}" y2="{foot}"/>')
        parts.append(f'<text x="{across(value)}" y="{foot + 15}" text-anchor="middle">{escape(text)}</text>')
    for value, text in y.ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{left + plot}" y1="{down(value)}" y2="{down(value)}"/>')
        parts.append(f'<text x="{left - 8}" y="{down(value) + 4}" text-anchor="end">{escape(text)}</text>')
    for line in lines:
        if line.band:
            parts.append(f'<path class="band" fill="{line.colour}" d="{path(line.band)}Z"/>')
        parts.append(f'<path class="line" stroke="{line.colour}" d="{path(line.points)}"/>')
        for dot in line.dots:
            cx, cy = across(dot.at[0]), down(dot.at[1])
            mark = 'class="present" r="7"' if dot.present else 'r="3.5"'
            parts.append(
                f'<circle {mark} cx="{cx}" cy="{cy}" fill="{line.colour}"><title>{escape(dot.tip)}</title></circle>'
            )
            parts.append(f'<text x="{cx + 7}" y="{cy - 6}">{escape(dot.label)}</text>' if dot.label else "")
    parts.append(f'<text class="soft" x="{left}" y="{foot + 31}">{escape(note)}</text>')
    return picture(label, foot + 38, parts, width)


def picture(label: str, tall: float, parts: Sequence[str], width: int = WIDTH) -> str:
    """A picture of these parts. `label` says what it shows."""
    return f'<svg class="picture" viewBox="0 0 {width} {tall:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def ticks(span: float, most: int) -> Ticks:
    """Round numbers from 0 to `span` > 0: 0 and at most `most` others."""
    power = math.floor(math.log10(span / most))
    step = next(size for part in (1, 2, 5, 10, 20) if span / (size := part * 10.0**power) <= most)
    return [(number * step, f"{number * step:g}") for number in range(int(span / step) + 1)]


def time_ticks(span_s: float) -> tuple[str, Ticks]:
    """The unit of a time axis of this length, and its ticks."""
    in_hours = span_s > HOURS_FROM_S
    steps = (
        (1800, 3600, 7200, 14400, 28800, 86400) if in_hours else (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
    )
    step = next((s for s in steps if span_s / s <= 12), max(steps) * max(round(span_s / max(steps) / 12), 1))
    at = [index * step for index in range(int(span_s // step) + 1)]
    return ("hours", [(s, f"{s / 3600:g}") for s in at]) if in_hours else ("minutes", [(s, clock(s)) for s in at])


def clock(seconds: float | None) -> str:
    """`m:ss`, or a dash."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
