"""The report of a simulation: one HTML page for who runs the cluster, which opens offline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from penstock_scheduler.report import History, JobHistory, NodeShape, Span
from penstock_scheduler.report.html import COLOURS, LEFT, LINES, STYLE, WIDTH, chart, gantt, legend
from penstock_scheduler.simulator.cluster import SimulatedJob
from penstock_scheduler.simulator.outcomes import Result
from penstock_scheduler.simulator.run import Simulation

ROWS = {
    "avg_jct_h": ("Average time from submission to end, h", 1, ".2f"),
    "p50_jct_h": ("Half of the jobs are done within, h", 1, ".2f"),
    "p99_jct_h": ("99 of 100 jobs are done within, h", 1, ".2f"),
    "makespan_h": ("From the first submission to the last end, h", 1, ".2f"),
    "queue_h": ("Waiting without GPUs, h a job", 1, ".2f"),
    "gpu_h_per_job": ("GPU-hours a job", 1, ".2f"),
    "restarts_per_job": ("Restarts a job", 1, ".2f"),
    "utilisation": ("GPUs in use, % of the time", 100, ".1f"),
    "contention": ("Jobs in the cluster, on average", 1, ".1f"),
    "unfair_share": ("Jobs that a fair share of their own would have served better, %", 100, ".1f"),
    "worst_ftf": ("The worst of them took times as long as there", 1, ".2f"),
    "failures": ("Times that a node failed under a job", 1, ".1f"),
    "cost": ("Cost of the GPU-hours", 1, ".2f"),
}
"""Figure of a summary -> what an admin reads, factor, format."""


def render(results: Sequence[Result], document: Mapping[str, Any]) -> str:
    """The page, from all simulations and their summary (`outcomes.over_seeds`); pictures over time are of the first seed."""
    policies: Mapping[str, Any] = document["policies"]
    first = [next(result for result in results if result.policy == name) for name in policies]
    histories = [history(result.simulation, result.policy) for result in first]
    span_s = max([each.end_s for each in histories], default=0.0) or 1.0
    colours = {job.name: COLOURS[index % len(COLOURS)] for index, job in enumerate(histories[0].jobs)}
    heading = f"{document['workload']} on {document['cluster']}"
    seeds = max(len(figures["seeds"]) for figures in policies.values())
    spread = f" ± is half of a 95 % confidence interval over {seeds} seeds." if seeds > 1 else ""
    parts = [f"<h1>{escape(heading)}</h1>", _verdict(policies), f"<p class=soft>Simulated, not run.{spread}</p>"]
    parts.append(_figures(policies))
    parts.append("<h2>How soon jobs are done</h2><p class=soft>Share of the jobs (%) that took at most so long.</p>")
    parts.append(legend(histories) + _wide(_done_within(first)))
    over_time = (
        ("Jobs that wait for GPUs", "Submitted, not ended, and without GPUs.", History.queue, "jobs without GPUs"),
        ("GPUs in use", "Held by jobs, in % of all.", History.utilisation, "GPUs in use"),
        ("Goodput", "Work done a minute, in whole jobs, summed over all jobs.", History.goodput, "jobs per minute"),
    )
    for title, note, series, unit in over_time:
        parts.append(f"<h2>{title}</h2><p class=soft>{note}</p>{legend(histories)}")
        parts.append(_wide(chart(histories, series, span_s, 1.0, unit)))
    for each in histories:
        parts.append(
            f"<h2>{escape(each.title)}: who had which GPU</h2><p class=soft>One row a GPU, one colour a job.</p>"
        )
        parts.append(_wide(gantt(each, span_s, 1.0, colours)))
    parts.append(
        "<h2>What this is, and is not</h2><p>Every policy was given the same jobs. Jobs progress as measured tables or "
        "models of their speed say, and lose time when they start or move. A scheduler sees what it would on a real cluster. "
        "<code>jobs.csv</code>, <code>looks.csv</code> and <code>summary.json</code> beside this page have all the numbers.</p>"
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(heading)}</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def history(simulation: Simulation, title: str) -> History:
    """What happened, with the GPUs of each node numbered as jobs took them: the lowest that are free."""
    free = {node.name: list(range(node.gpus)) for node in simulation.scenario.nodes}
    spans: dict[str, list[Span]] = {job.id: [] for job in simulation.jobs}
    held: list[tuple[float, int, dict[str, tuple[int, ...]]]] = []
    runs = sorted(((run, job.id) for job in simulation.jobs for run in job.runs), key=lambda pair: pair[0].start_s)
    for number, (run, job_id) in enumerate(runs):
        while held and held[0][0] <= run.start_s:
            for node, left in heapq.heappop(held)[2].items():
                free[node] = sorted([*free[node], *left])
        ids = {share.node: tuple(free[share.node][: share.gpus]) for share in run.placement.shares}
        for node, taken in ids.items():
            free[node] = free[node][len(taken) :]
        heapq.heappush(held, (run.end_s, number, ids))
        spans[job_id].append(Span(run.start_s, run.end_s, run.placement.gpu_type, ids))
    return History(
        title=title,
        nodes=tuple(NodeShape(node.name, node.gpu_type, node.gpus) for node in simulation.scenario.nodes),
        jobs=tuple(_seen(job, tuple(spans[job.id])) for job in simulation.jobs if job.submit_s <= simulation.end_s),
        start_s=0.0,
        end_s=simulation.end_s,
    )


def _seen(job: SimulatedJob, spans: tuple[Span, ...]) -> JobHistory:
    goodput: list[tuple[float, float]] = []
    for run in job.runs:
        goodput += [(at_s, rate / job.work) for at_s, rate in run.rates]
        goodput.append((run.end_s, 0.0))
    low, high = job.wish.min_gpus, job.wish.max_gpus
    return JobHistory(
        id=job.id,
        name=job.name,
        asks=f"{job.wish.adaptivity.value} {low if low == high else f'{low}-{high}'}",
        submit_s=job.submit_s,
        start_s=spans[0].start_s if spans else None,
        end_s=job.finish_s,
        state="COMPLETED" if job.finish_s is not None else "PENDING",
        spans=spans,
        goodput=tuple(goodput),
        restarts=job.restarts,
    )


def _verdict(policies: Mapping[str, Any]) -> str:
    (mine, figures), *others = policies.items()
    average = figures["mean"]["avg_jct_h"]
    if average is None:
        return f"<p class=verdict>Under {escape(mine)} no job has ended.</p>"
    text = f"Under {mine} a job takes {_words(average)} from submission to end, on average"
    for name, other in others:
        if (theirs := other["mean"]["avg_jct_h"]) is not None:
            change = average / theirs - 1
            text += (
                f"; that is {abs(change):.0%} {'less' if change < 0 else 'more'} than under {name} ({_words(theirs)})"
            )
    left = [
        f"{name} left {figures['mean']['jobs'] - figures['mean']['ended']:.0f} jobs unfinished"
        for name, figures in policies.items()
        if figures["mean"]["ended"] < figures["mean"]["jobs"]
    ]
    return f"<p class=verdict>{escape('. '.join([text, *left]))}.</p>"


def _words(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 2 else f"{hours * 60:.0f} min" if hours >= 1 / 30 else f"{hours * 3600:.0f} s"


def _figures(policies: Mapping[str, Any]) -> str:
    head = "".join(
        f'<th class=n><span class=key style="background:{LINES[index % len(LINES)]}"></span>{escape(name)}'
        for index, name in enumerate(policies)
    )
    rows = []
    for name, (label, factor, form) in ROWS.items():
        cells = []
        for figures in policies.values():
            mean, half = figures["mean"][name], figures["ci95"][name]
            text = "–" if mean is None else f"{mean * factor:{form}}"
            cells.append(text if half is None else f"{text} ± {half * factor:{form}}")
        if set(cells) != {"–"}:
            rows.append(f"<tr><td>{label}" + "".join(f"<td class=n>{cell}" for cell in cells))
    return _wide(f"<table><tr><th>{head}{''.join(rows)}</table>")


def _done_within(results: Sequence[Result]) -> str:
    """Cumulative distribution of completion times, on a logarithmic axis."""
    times = [np.sort([row.jct_s for row in result.rows if row.jct_s is not None]) for result in results]
    ended = [each for each in times if len(each)]
    if not ended:
        return "<p>No job has ended.</p>"
    low = math.floor(math.log10(max(min(each[0] for each in ended), 1.0)))
    high = max(math.log10(max(each[-1] for each in ended)), low + 1.0)
    plot, top, bottom = WIDTH - LEFT - 8, 8.0, 208.0

    def x(seconds: float) -> float:
        return LEFT + (math.log10(max(seconds, 10.0**low)) - low) / (high - low) * plot

    parts = []
    for seconds, label in (
        (1, "1 s"), (10, "10 s"), (60, "1 min"), (300, "5 min"), (900, "15 min"), (3600, "1 h"), (4 * 3600, "4 h"),
        (12 * 3600, "12 h"), (48 * 3600, "2 days"), (7 * 86400, "1 week"), (28 * 86400, "4 weeks"),
    ):  # fmt: skip
        if low <= math.log10(seconds) <= high:
            parts.append(f'<line class=grid x1="{x(seconds):.1f}" x2="{x(seconds):.1f}" y1="{top}" y2="{bottom}"/>')
            parts.append(f'<text x="{x(seconds):.1f}" y="{bottom + 14}" text-anchor="middle">{label}</text>')
    for share in (0, 50, 100):
        y = bottom - share / 100 * (bottom - top)
        parts.append(f'<line class=grid x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{share}</text>')
    for index, (each, result) in enumerate(zip(times, results, strict=True)):
        path = [f"M{LEFT} {bottom}"]
        for place, seconds in enumerate(each.tolist()):
            before, after = (bottom - count / len(result.rows) * (bottom - top) for count in (place, place + 1))
            path.append(f"L{x(seconds):.1f} {before:.1f}L{x(seconds):.1f} {after:.1f}")
        line = LINES[index % len(LINES)]
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{line}" stroke-width="2"/>')
    label = "Share of jobs done within a time"
    return f'<svg viewBox="0 0 {WIDTH} 235" width="{WIDTH}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _wide(inside: str) -> str:
    return f"<div class=wide>{inside}</div>"
