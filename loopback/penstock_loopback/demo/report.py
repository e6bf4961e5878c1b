"""An HTML report of what happened on one cluster, or on several clusters that ran the same jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from penstock_scheduler.people.drawing import svg
from penstock_scheduler.people.drawing.gantt import gantt
from penstock_scheduler.people.drawing.history import History, JobHistory
from penstock_scheduler.people.drawing.svg import LINES, clock, job_colour, key, legend, page, wide


def render_page(
    histories: Sequence[History],
    *,
    heading: str,
    facts: Mapping[str, str],
    time_scale: float,
    next_steps: Sequence[tuple[str, str]],
) -> str:
    """The page as HTML.

    Args:
        histories: of the same jobs, in the same order. The first one is compared with the second.
        heading: title of the page.
        facts: label -> text, what a reader needs to know to judge the figures.
        time_scale: seconds of emulated time in one second; 1: time was not compressed.
        next_steps: (label, text).
    """
    span_s = max([history.end_s - history.start_s for history in histories] or [0.0], default=0.0) or 1.0
    colours = {history.title: LINES[index % len(LINES)] for index, history in enumerate(histories)}
    parts = [_verdict(histories, time_scale)]
    for history in histories:
        parts.append(
            f"<h2>{escape(history.title)}: GPUs by job</h2><p class=soft>{escape(history.note)}. Each row is one GPU.</p>"
        )
        parts.append(wide(gantt(history, span_s, time_scale)))
    parts.append("<h2>In figures</h2>" + _metrics(histories, time_scale))
    parts.append("<h2>Waiting jobs</h2>" + legend(colours))
    parts.append(wide(_chart(histories, History.queue, span_s, "jobs without GPUs")))
    parts.append(
        "<h2>Goodput</h2><p class=soft>Work done per minute by all jobs. The unit of work is one whole job.</p>"
        + legend(colours)
    )
    parts.append(wide(_chart(histories, History.goodput, span_s, "jobs per minute")))
    parts.append("<h2>The jobs</h2>" + _jobs(histories))
    rows = "".join(f"<tr><th>{escape(label)}<td>{escape(text)}" for label, text in facts.items())
    parts.append(f"<h2>How to read this</h2><table>{rows}</table>")
    steps = "".join(f"<li><b>{escape(label)}</b>: {escape(text)}" for label, text in next_steps)
    parts.append(f"<h2>Next steps</h2><ul>{steps}</ul>")
    return page(heading, parts)


def _verdict(histories: Sequence[History], time_scale: float) -> str:
    averages = [history.average_jct_s for history in histories]
    if len(histories) < 2 or averages[0] is None or averages[1] is None:
        return "<p class=card>Nothing can be compared: on one side no job has ended.</p>"
    mine, other = averages[0], averages[1]
    change = (other - mine) / other
    compared = f"{abs(change):.0%} {'shorter' if change > 0 else 'longer'} than"
    unfinished = [
        f"{h.title}: {sum(j.end_s is None for j in h.jobs)} did not end" for h in histories if h.makespan_s is None
    ]
    text = (
        f"{histories[0].title}, a job took {clock(mine)} from submission to end on average, {compared} "
        f"{histories[1].title[:1].lower()}{histories[1].title[1:]} ({clock(other)})."
    )
    if time_scale != 1:
        text += f" In emulated time: {mine * time_scale / 60:.0f} and {other * time_scale / 60:.0f} minutes."
    text += " ".join(["", *unfinished])
    return f"<p class=card>{escape(text)}</p>"


def _metrics(histories: Sequence[History], time_scale: float) -> str:
    rows: list[tuple[str, Callable[[History], str]]] = [
        ("Average time from submission to end", lambda h: clock(h.average_jct_s)),
        ("Longest time from submission to end", lambda h: clock(h.longest_jct_s)),
        ("From the first submission to the last end", lambda h: clock(h.makespan_s)),
        ("Average wait for the first GPU", lambda h: clock(h.average_wait_s)),
        ("Restarts of all jobs", lambda h: str(sum(job.restarts for job in h.jobs))),
    ]
    types = sorted({node.gpu_type for history in histories for node in history.nodes})

    def held(gpu_type: str) -> Callable[[History], str]:
        def text(history: History) -> str:
            used = history.gpu_seconds.get(gpu_type, 0.0)
            total = sum(node.gpus for node in history.nodes if node.gpu_type == gpu_type)
            possible = total * max(history.end_s - history.start_s, 1e-9)
            return f"{used * time_scale / 3600:.1f} ({used / possible:.0%})" if possible else "–"

        return text

    rows += [(f"GPU-hours held on {name}, and share of those available", held(name)) for name in types]
    head = "".join(f"<th class=n>{escape(history.title)}" for history in histories)
    body = "".join(f"<tr><td>{label}" + "".join(f"<td class=n>{f(h)}" for h in histories) for label, f in rows)
    return wide(f"<table><tr><th>{head}{body}</table>")


def _chart(
    histories: Sequence[History], series: Callable[[History], list[tuple[float, float]]], span_s: float, what: str
) -> str:
    """A stepped line for each history. `series`: its (time, value) pairs. `what`: the values."""
    found = [series(history) for history in histories]
    highest = max((value for points in found for _, value in points), default=0.0) or 1.0
    lines = []
    for index, (history, points) in enumerate(zip(histories, found, strict=True)):
        steps, value = [(0.0, 0.0)], 0.0
        for at_s, after in [*points, (history.end_s, None)]:
            x = min(max(at_s - history.start_s, 0.0), span_s)
            steps += [(x, value)] if after is None else [(x, value), (x, after)]
            value = value if after is None else after
        lines.append(svg.Line(LINES[index % len(LINES)], steps))
    unit, ticks = svg.time_ticks(span_s)
    axes = svg.Axis(0, span_s, ticks), svg.Axis(0, highest, svg.ticks(highest, 5))
    return svg.chart(f"{what} over time", f"{unit} since the start; up: {what}", lines, *axes)


def _jobs(histories: Sequence[History]) -> str:
    if not histories:
        return "<p>There were no jobs.</p>"
    head = "".join(
        f"<th>asked for<th>ran on<th class=n>wait<th class=n>total<th>{escape(history.title)}" for history in histories
    )
    rows = []
    for index, job in enumerate(histories[0].jobs):
        mine = [history.jobs[index] for history in histories if index < len(history.jobs)]
        rows.append(f"<tr><td>{key(job_colour(job.id))}{escape(job.name)}" + "".join(_job(each) for each in mine))
    return wide(f"<table><tr><th>job{head}{''.join(rows)}</table>")


def _job(job: JobHistory) -> str:
    ran: list[str] = []
    for span in job.spans:
        gpus = f"{span.gpus} {span.gpu_type}"
        if not ran or ran[-1] != gpus:
            ran.append(gpus)
    wait = None if job.start_s is None else job.start_s - job.submit_s
    cells = f"<td>{escape(job.asks)}<td>{escape(' → '.join(ran)) or '–'}<td class=n>{clock(wait)}<td class=n>{clock(job.jct_s)}"
    return cells + f"<td>{escape(job.state.lower())}"
