"""The report of a simulation: one HTML page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from penstock_scheduler.people.drawing import svg
from penstock_scheduler.people.drawing.gantt import gantt
from penstock_scheduler.people.drawing.svg import key, legend, page, wide
from penstock_scheduler.simulator.figures import Figures, Lines

ROWS = {
    "avg_jct_h": ("Average time from submission to end, h", 1, ".2f"),
    "p50_jct_h": ("Half of the jobs are done within, h", 1, ".2f"),
    "p99_jct_h": ("99 of 100 jobs are done within, h", 1, ".2f"),
    "makespan_h": ("From the first submission to the last end, h", 1, ".2f"),
    "queue_h": ("Waiting without GPUs, h a job", 1, ".2f"),
    "feedback_min": ("From submission until a job has trained for a minute, min", 1, ".1f"),
    "gpu_h_per_job": ("GPU-hours a job", 1, ".2f"),
    "restarts_per_job": ("Restarts a job", 1, ".2f"),
    "suspends_per_job": ("Times that a job was suspended", 1, ".1f"),
    "packs": ("Pairs of jobs that ran on one GPU at once", 1, ".0f"),
    "packs_at_a_loss": ("Pairs among them that did less than in time slices", 1, ".0f"),
    "utilisation": ("GPUs in use, % of the time", 100, ".1f"),
    "contention": ("Jobs in the cluster, on average", 1, ".1f"),
    "unfair_share": ("Jobs that would have been faster on a fair share of their own, %", 100, ".1f"),
    "worst_ftf": ("Slowest of these: times its time on a fair share", 1, ".2f"),
    "failures": ("Node failures under jobs", 1, ".1f"),
    "cost": ("Cost of the GPU-hours", 1, ".2f"),
}
"""Figure of a summary -> (label, factor, format)."""


MOST_RUNS = 4000
"""Bars of one Gantt chart that a browser still draws at once."""


def render(drawn: Figures, document: Mapping[str, Any]) -> str:
    """The page, from the figures and the summary (`results.over_seeds`)."""
    policies: Mapping[str, Any] = document["policies"]
    notes = [str(note) for note in document.get("notes", ["Simulated, not run."])]
    if drawn.seeds > 1:
        notes.append(
            f"± and the bands and whiskers in pictures are 95 % confidence intervals of the mean over {drawn.seeds} seeds "
            "(Student's t); pictures of GPUs are of the first seed."
        )
    else:
        notes.append("One seed, so there are no confidence intervals; use --seeds 5 for some.")
    parts = [_verdict(policies)]
    parts += [f"<p class=soft>{escape(note)}</p>" for note in notes]
    parts.append(_figures(policies, drawn.colours))
    parts.append("<h2>Policy against policy</h2>" + legend(drawn.colours) + wide(_bars(drawn)))
    for lines in drawn.lines:
        title = f"<h2>{escape(lines.title)}</h2><p class=soft>{escape(lines.about)}</p>"
        parts.append(title + legend(drawn.colours) + wide(_chart(lines, drawn.colours)))
    for each in drawn.gantts:
        about = f"One row for each GPU, one colour for each job. {each.note}"
        parts.append(f"<h2>{escape(each.title)}: the job on each GPU</h2><p class=soft>{escape(about)}</p>")
        runs = sum(len(job.spans) for job in each.jobs)
        too_many = f"<p>{runs} runs are too many for this page; simulate fewer jobs to see them.</p>"
        parts.append(wide(gantt(each, drawn.end_s)) if runs <= MOST_RUNS else too_many)
    parts.append(
        "<h2>What this is, and is not</h2><p>Every policy got the same jobs. Jobs progress as measured tables or "
        "models of their speed say, and lose time when they start or move. The scheduler sees what it would see on a real "
        "cluster. "
        "<code>jobs.csv</code>, <code>rounds.csv</code> and <code>summary.json</code> beside this page have all the numbers.</p>"
    )
    return page(drawn.heading, parts)


def _verdict(policies: Mapping[str, Any]) -> str:
    (mine, figures), *others = policies.items()
    average = figures["mean"]["avg_jct_h"]
    if average is None:
        return f"<p class=card>Under {escape(mine)} no job has ended.</p>"
    text = f"{mine}: a job takes {_words(average)} from submission to end, on average"
    for name, other in others:
        if (theirs := other["mean"]["avg_jct_h"]) is not None:
            change = average / theirs - 1
            text += (
                f"; that is {abs(change):.0%} {'less' if change < 0 else 'more'} than with {name} ({_words(theirs)})"
            )
    left = [
        f"{name} left {figures['mean']['jobs'] - figures['mean']['ended']:.0f} jobs unfinished"
        for name, figures in policies.items()
        if figures["mean"]["ended"] < figures["mean"]["jobs"]
    ]
    return f"<p class=card>{escape('. '.join([text, *left]))}.</p>"


def _words(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 2 else f"{hours * 60:.0f} min" if hours >= 1 / 30 else f"{hours * 3600:.0f} s"


def _figures(policies: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    head = "".join(f"<th class=n>{key(colours[name])}{escape(name)}" for name in policies)
    rows = []
    for name, (label, factor, form) in ROWS.items():
        cells = []
        for figures in policies.values():
            mean, half = figures["mean"][name], figures["ci95"][name]
            text = "–" if mean is None else f"{mean * factor:{form}}"
            cells.append(text if half is None else f"{text} ± {half * factor:{form}}")
        if set(cells) != {"–"}:
            rows.append(f"<tr><td>{label}" + "".join(f"<td class=n>{cell}" for cell in cells))
    return wide(f"<table><tr><th>{head}{''.join(rows)}</table>")


def _bars(drawn: Figures) -> str:
    """A small chart for each figure, side by side, with confidence intervals as whiskers."""
    across = 3
    cell, top, height, below = (svg.WIDTH - 8) / across, 34.0, 120.0, 20.0
    parts = []
    for number, figure in enumerate(drawn.comparison):
        left, up = number % across * cell, number // across * (top + height + below)
        parts.append(f'<text x="{left + 8:.0f}" y="{up + 14:.0f}" class="strong">{escape(figure.label)}</text>')
        highest = max(bar.mean + (bar.half or 0.0) for bar in figure.bars) or 1.0
        foot, wide = up + top + height, (cell - 24) / len(figure.bars)
        parts.append(f'<line class=grid x1="{left + 8:.1f}" x2="{left + cell - 16:.1f}" y1="{foot}" y2="{foot}"/>')
        for place, bar in enumerate(figure.bars):
            x, tall = left + 8 + place * wide, bar.mean / highest * height
            middle, width = x + wide / 2, min(wide * 0.7, 60.0)
            parts.append(
                f'<rect x="{middle - width / 2:.1f}" y="{foot - tall:.1f}" width="{width:.1f}" height="{tall:.1f}" '
                f'fill="{drawn.colours[bar.policy]}"><title>{escape(bar.policy)}</title></rect>'
            )
            above = foot - tall
            if bar.half is not None:
                low, above = (foot - max(bar.mean + part * bar.half, 0.0) / highest * height for part in (-1, 1))
                path = (
                    f"M{middle:.1f} {low:.1f}V{above:.1f}M{middle - 5:.1f} {above:.1f}h10M{middle - 5:.1f} {low:.1f}h10"
                )
                parts.append(f'<path class="whisker" d="{path}"/>')
            parts.append(f'<text x="{middle:.1f}" y="{above - 4:.1f}" text-anchor="middle">{bar.mean:.3g}</text>')
    rows = -(-len(drawn.comparison) // across)
    return svg.picture("Policy against policy", rows * (top + height + below), parts)


def _chart(picture: Lines, colours: Mapping[str, str]) -> str:
    """A line for each policy, perhaps with a band."""
    tops = [line.mean if line.high is None else line.high for line in picture.lines]
    highest = picture.most or max((float(each.max()) for each in tops), default=0.0) or 1.0
    x, end = picture.x.tolist(), float(picture.x[-1]) or 1.0
    lines = []
    for line in picture.lines:
        band: list[svg.Point] = []
        if line.low is not None and line.high is not None:
            band = [*zip(x, line.high.tolist(), strict=True), *reversed([*zip(x, line.low.tolist(), strict=True)])]
        lines.append(svg.Line(colours[line.policy], [*zip(x, line.mean.tolist(), strict=True)], band))
    across = (
        svg.Axis(0, end, svg.ticks(end, 12)) if picture.ticks is None else svg.Axis(x[0], end, picture.ticks, log=True)
    )
    up = svg.Axis(0, highest, svg.ticks(highest, 5))
    return svg.chart(picture.title, f"{picture.x_label}; up: {picture.y_label}", lines, across, up)
