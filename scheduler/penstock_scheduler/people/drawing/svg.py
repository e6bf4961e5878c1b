"""Line charts and what else pictures as SVG have in common. Pure. No `style` attributes, which the web pages' policy forbids.

Classes are those of `style.css`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files

from penstock_scheduler.people.safe_text import visible

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


_REPORT = """
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 + .card { font-size: 1.1rem; }
td.n { white-space: nowrap; }
code { background: var(--card); padding: .1em .3em; border-radius: 3px; }
"""


@cache
def style() -> str:
    """What pages and reports share, as CSS."""
    return files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def page(heading: str, parts: Sequence[str]) -> str:
    """A report with this heading. `parts`: HTML."""
    return visible(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(heading)}</title><style>{style()}{_REPORT}</style>"
        f"<body><h1>{escape(heading)}</h1>{''.join(parts)}</body></html>\n"
    )


def key(colour: str) -> str:
    """A spot of a colour, before what it stands for."""
    return f'<span class="key" style="background:{colour}"></span>'


def legend(colours: Mapping[str, str]) -> str:
    """Which line stands for what: name -> colour."""
    return f"<p>{' &emsp; '.join(key(colour) + escape(name) for name, colour in colours.items())}</p>"


def wide(inside: str) -> str:
    """A table or a picture that scrolls sideways where the page is narrower."""
    return f'<div class="wide">{inside}</div>'


HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Okabe and Ito's colours, which people tell apart whatever colours they see."""

LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b8a800")
"""The same for lines, on a light and on a dark ground: the yellow is darker, and black is grey."""

_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


def _mixed(colour: str, other: tuple[int, int, int], share: float) -> str:
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (to - part) * share):02x}" for part, to in zip(parts, other, strict=True))


COLOURS = (
    *HUES,
    *(_mixed(hue, _WHITE, 0.45) for hue in HUES),
    *(_mixed(hue, _BLACK, 0.35) for hue in HUES),
)
"""The hues as they are, lighter, and darker."""


def number(job: str) -> int:
    """A number that follows from a job's id, evenly spread."""
    return int.from_bytes(hashlib.blake2s(job.encode(errors="replace"), digest_size=4).digest())


def index(job: str) -> int:
    """Index in `COLOURS` of a job's colour."""
    return number(job) % len(COLOURS)


def job_colour(job: str) -> str:
    """The colour of a job, such as "#0072b2"."""
    return COLOURS[index(job)]


def rules() -> str:
    """The colours as CSS: for jobs, the class `c` and an index, in SVG and for keys; for lines, `--line-` and an index."""
    jobs = (f".c{at}{{fill:{colour};background:{colour}}}" for at, colour in enumerate(COLOURS))
    lines = ";".join(f"--line-{at}:{colour}" for at, colour in enumerate(LINES))
    return "\n".join((*jobs, f":root{{{lines}}}")) + "\n"


def is_dark(colour: str) -> bool:
    """Whether white text on this colour is easier to read than black text (WCAG's contrast)."""

    def linear(part: int) -> float:
        share = part / 255
        return float(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)

    red, green, blue = (linear(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05
