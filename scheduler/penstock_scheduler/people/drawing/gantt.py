"""The Gantt chart: which job had which GPU when. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby

from penstock_scheduler.people.drawing.history import History, JobHistory, Span
from penstock_scheduler.people.drawing.svg import LEFT, RIGHT, WIDTH, clock, is_dark, job_colour, picture, time_ticks

ROW, TOP = 9, 8
"""Pixels: height of the row of one GPU, and above the first."""

GAP = 0.6
"""Rows that are left free between two nodes."""

INDICES = 256
"""GPUs up to which each row has its GPU's index."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each GPU is drawn."""

    of: Mapping[tuple[str, int], float]
    """(node, GPU index) -> row."""
    nodes: Mapping[str, float]
    """Node -> the middle of its rows."""
    end: float
    """Below the last row."""


def rows(history: History) -> Rows:
    """A row for each GPU, node by node."""
    of: dict[tuple[str, int], float] = {}
    nodes, at = {}, 0.0
    for node in history.nodes:
        of |= {(node.name, gpu): at + gpu for gpu in range(node.gpus)}
        nodes[node.name] = at + node.gpus / 2
        at += node.gpus + GAP
    return Rows(of, nodes, max(at - GAP, 0.0))


def bars(history: History) -> Iterator[tuple[JobHistory, Span, str, tuple[int, ...]]]:
    """What is drawn: (job, its run, node, indices of adjacent GPUs on it)."""
    known = {node.name: node.gpus for node in history.nodes}
    for job in history.jobs:
        for span in job.spans:
            for node, gpus in span.gpu_ids.items():
                there = sorted(gpu for gpu in gpus if gpu < known.get(node, 0))
                for _, adjacent in groupby(enumerate(there), lambda pair: pair[1] - pair[0]):
                    yield job, span, node, tuple(gpu for _, gpu in adjacent)


def gantt(history: History, span_s: float, time_scale: float = 1.0) -> str:
    """A row for each GPU, and a bar for each run of a job, in the job's colour.

    Args:
        history: the jobs and the nodes.
        span_s: seconds that the chart is long.
        time_scale: seconds of emulated time in one second; 1: time was not compressed.
    """
    drawn, plot = rows(history), WIDTH - LEFT - RIGHT
    foot = TOP + drawn.end * ROW
    parts = []
    for node in history.nodes:
        y = TOP + drawn.nodes[node.name] * ROW
        parts.append(
            f'<rect class="back" x="{LEFT}" y="{y - node.gpus / 2 * ROW:g}" width="{plot}" height="{node.gpus * ROW}"/>'
            f'<text x="{LEFT - 16}" y="{y + 4:g}" text-anchor="end">{escape(node.name)}</text>'
        )
    if len(drawn.of) <= INDICES:
        for (_, gpu), row in drawn.of.items():
            parts.append(
                f'<text class="soft index" x="{LEFT - 4}" y="{TOP + row * ROW + 7:g}" text-anchor="end">{gpu}</text>'
            )
    unit, ticks = time_ticks(span_s)
    for at_s, label in ticks:
        x = round(LEFT + at_s / span_s * plot, 1)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{foot:g}"/>')
        parts.append(f'<text x="{x}" y="{foot + 15:g}" text-anchor="middle">{label}</text>')
    scale = f"; one second stands for {time_scale:g} s" if time_scale != 1 else ""
    parts.append(f'<text class="soft" x="{LEFT}" y="{foot + 31:g}">{unit} since the start{scale}</text>')
    named: set[tuple[str, float]] = set()
    for job, span, place, gpus in bars(history):
        x = LEFT + (span.start_s - history.start_s) / span_s * plot
        width = max((span.end_s - span.start_s) / span_s * plot, 1.5)
        y, height = TOP + drawn.of[place, gpus[0]] * ROW, len(gpus) * ROW
        colour = job_colour(job.id)
        parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height - 1}" rx="1.5" fill="{colour}">'
            f"<title>{escape(_tip(history, job, span))}</title></rect>"
        )
        if (job.id, span.start_s) not in named and width > 6.2 * len(job.name) + 6:
            named.add((job.id, span.start_s))
            dark = " dark" if is_dark(colour) else ""
            small = " small" if height <= ROW else ""
            parts.append(
                f'<text class="on{dark}{small}" x="{x + 4:.1f}" y="{y + height / 2 + 3.5:g}">{escape(job.name)}</text>'
            )
    return picture(f"Gantt chart: {history.title}", foot + 38, parts)


def _tip(history: History, job: JobHistory, span: Span) -> str:
    where = ", ".join(f"{node} GPU {_numbers(gpus)}" for node, gpus in span.gpu_ids.items())
    begin, end = clock(span.start_s - history.start_s), clock(span.end_s - history.start_s)
    return f"{job.name} (job {job.id}): {span.gpus} {span.gpu_type}, {begin} to {end}; {where}"


def _numbers(gpus: tuple[int, ...]) -> str:
    """Indices, adjacent ones as a range: "0-3, 6"."""
    runs = [[pair[1] for pair in run] for _, run in groupby(enumerate(sorted(gpus)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
