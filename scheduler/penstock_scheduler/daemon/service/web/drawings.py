"""Pictures of one job as SVG: what it held over time, and how fast it would be with other numbers of GPUs. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.messages import ConfigurationView
from penstock_scheduler.people.drawing.svg import HUES, Axis, Dot, Line, chart, index, picture
from penstock_scheduler.people.units import duration

WIDTH, LEFT, RIGHT = 1000, 44, 12
TYPES = HUES[:6]
"""Colours of GPU types where a picture is about one job."""


def strip(spans: Sequence[AllocationSpan], begin_s: float, end_s: float, most: int) -> str:
    """What a job held from its submission on: one block for each allocation span, as high as its GPUs.

    Args:
        spans: oldest first.
        begin_s, end_s: s since 1970, of the whole picture.
        most: GPUs at the top.
    """
    tall, length_s = 150, max(end_s - begin_s, 1.0)
    colours = type_colours({span.gpu_type for span in spans})

    def x(at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(max((at_s - begin_s) / length_s, 0.0), 1.0), 1)

    def y(gpus: float) -> float:
        return round(10 + tall * (1 - gpus / max(most, 1)), 1)

    parts = []
    for gpus in sorted({0, most // 2, most}):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(gpus)}" y2="{y(gpus)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(gpus) + 4}" text-anchor="end">{gpus}</text>')
    for span in spans:
        to_s = end_s if span.to_s is None else span.to_s
        wide = max(x(to_s) - x(span.from_s), 2.0)
        tip = f"{span.gpus} {span.gpu_type} for {duration(max(to_s - span.from_s, 0.0))}"
        tip += f"; {span.cause}" if span.cause else ""
        tip += f"; then: {span.end_text or span.end}" if span.end else ""
        cloud = " in-cloud" if span.where == "cloud" else ""
        parts.append(
            f'<rect class="block{cloud}" fill="{colours[span.gpu_type]}" x="{x(span.from_s)}" y="{y(span.gpus)}" width="{wide}" '
            f'height="{round(tall + 10 - y(span.gpus), 1)}"><title>{escape(tip)}</title></rect>'
        )
        if wide > 60:
            inside = y(0) - y(span.gpus) > 18  # otherwise the text stands above its block
            place = f'class="on" x="{x(span.from_s) + 5}" y="{y(span.gpus) + 14}"'
            if not inside:
                place = f'x="{x(span.from_s) + 5}" y="{y(span.gpus) - 4}"'
            parts.append(f"<text {place}>{span.gpus} {escape(span.gpu_type)}</text>")
    for first, second in pairwise(spans):
        if second.run_s != first.run_s:
            parts.append(
                f'<path class="restart" d="M{x(second.from_s)} {tall + 12}l-4 8h8z"><title>restart</title></path>'
            )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at_s = begin_s + share * length_s
        form = "%d %b %H:%M" if length_s > 20 * 3600 else "%H:%M" if length_s > 600 else "%H:%M:%S"
        label = time.strftime(form, time.localtime(at_s))
        parts.append(f'<text x="{x(at_s)}" y="{tall + 34}" text-anchor="{anchor}">{label}</text>')
    return picture("GPUs that the job held over time", tall + 42, parts, WIDTH)


def curve(options: Sequence[ConfigurationView], present: tuple[str, int] | None) -> str:
    """How fast a job would be: goodput by number of GPUs, a line for each type, the present configuration marked.

    Args:
        options: configurations that the job may have.
        present: GPU type and number of GPUs that it has; None: it has none.
    """
    found = best(options)
    if not found:
        return ""
    most = max(gpus for line in found.values() for gpus in line)
    top = max(option.goodput for line in found.values() for option in line.values()) or 1.0
    colours = type_colours(found)
    counts = sorted({gpus for line in found.values() for gpus in line})
    shown = counts if len(counts) <= 10 else sorted({counts[0], most // 4, most // 2, most * 3 // 4, most})
    lines = []
    for gpu_type, line in found.items():
        dots = []
        for gpus, option in line.items():
            here = present == (gpu_type, gpus)
            tip = f"{gpus} {gpu_type}: {option.goodput:.4g} samples/s{', the present one' if here else ''}"
            dots.append(Dot((gpus, option.goodput), tip, present=here))
        lines.append(Line(colours[gpu_type], [dot.at for dot in dots], dots=dots))
    keys, left = [], LEFT + 16
    for gpu_type in found:
        keys.append(f'<rect x="{left}" y="2" width="12" height="12" fill="{colours[gpu_type]}"/>')
        keys.append(f'<text class="key-name" x="{left + 18}" y="12">{escape(gpu_type)}</text>')
        left += 40 + 8 * len(gpu_type)
    axes = (
        Axis(0, most, [(gpus, str(gpus)) for gpus in shown]),
        Axis(0, top, [(top * s, short(top * s)) for s in (0, 0.5, 1)]),
    )
    note = "right: GPUs; up: goodput, samples/s"
    drawn = chart("Goodput by number of GPUs", note, lines, *axes, width=WIDTH // 2, left=LEFT + 16, tall=220)
    return drawn + picture("GPU types", 20, keys, WIDTH // 2)


def short(value: float) -> str:
    """A number of at most three digits and a letter, for an axis: 10,400 is "10.4 k"."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{float(f'{value / size:.3g}'):g}{letter}"
    return f"{value:.3g}"


def best(options: Sequence[ConfigurationView]) -> dict[str, dict[int, ConfigurationView]]:
    """GPU type -> number of GPUs -> the fastest configuration."""
    lines: dict[str, dict[int, ConfigurationView]] = {}
    for option in options:
        line = lines.setdefault(option.gpu_type, {})
        if option.gpus not in line or option.goodput > line[option.gpus].goodput:
            line[option.gpus] = option
    return {name: dict(sorted(line.items())) for name, line in sorted(lines.items())}


def type_colours(types: Mapping[str, object] | set[str]) -> dict[str, str]:
    """GPU type -> its colour in a picture of one job."""
    return {name: TYPES[at % len(TYPES)] for at, name in enumerate(sorted(types))}


def key(job: str) -> str:
    """The class of a job's colour."""
    return f"c{index(job)}"
