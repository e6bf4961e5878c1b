"""Renders the report as one HTML page with inline style and SVG, without scripts and without network access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from penstock_scheduler.report.data import History, JobHistory

WIDTH, LEFT, ROW = 1080, 92, 9
"""Pixels: width of a chart, its left margin, height of the row of one GPU."""

HOURS_FROM_S = 3 * 3600.0
"""Time axes that are longer than this are in hours."""

COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1",
    "#9c755f", "#edc948", "#ff9da7", "#86bcb6", "#8cd17d", "#bab0ac",
)  # fmt: skip
LINES = ("#2f7ed8", "#d9534f", "#59a14f", "#b07aa1")

STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--soft:#667;--line:#ccd;--card:#f4f6f9}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ee;--bg:#14171c;--soft:#9aa4b2;--line:#3a414c;--card:#1d222a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25}h2{margin:2.2rem 0 .3rem;font-size:1.2rem}p{max-width:75ch}.soft{color:var(--soft)}
.verdict{font-size:1.1rem;background:var(--card);border-left:4px solid #2f7ed8;padding:.7rem 1rem;border-radius:4px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem}
td,th{padding:.25rem .7rem;text-align:left;vertical-align:top;
border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
svg{max-width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--fg)}svg .soft{fill:var(--soft)}
svg .grid{stroke:var(--line);stroke-width:1}svg .back{fill:var(--card)}.key{display:inline-block;width:.8em;height:.8em;
border-radius:2px;margin-right:.4em;vertical-align:-1px}code{background:var(--card);padding:.1em .3em;border-radius:3px}
"""


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
    names = [job.name for job in histories[0].jobs] if histories else []
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    parts = [f"<h1>{escape(heading)}</h1>", _verdict(histories, time_scale), _metrics(histories, time_scale)]
    for history in histories:
        parts.append(
            f"<h2>{escape(history.title)}: GPUs by job</h2><p class=soft>{escape(history.note)}. Each row is one GPU.</p>"
        )
        parts.append(f"<div class=wide>{gantt(history, span_s, time_scale, colours)}</div>")
    parts.append("<h2>Waiting jobs</h2>" + legend(histories))
    parts.append(f"<div class=wide>{chart(histories, History.queue, span_s, time_scale, 'jobs without GPUs')}</div>")
    parts.append(
        "<h2>Goodput</h2><p class=soft>Work done per minute by all jobs. The unit of work is one whole job.</p>"
        + legend(histories)
    )
    parts.append(f"<div class=wide>{chart(histories, History.goodput, span_s, time_scale, 'jobs per minute')}</div>")
    parts.append("<h2>The jobs</h2>" + _jobs(histories, colours))
    rows = "".join(f"<tr><th>{escape(label)}<td>{escape(text)}" for label, text in facts.items())
    parts.append(f"<h2>How to read this</h2><table>{rows}</table>")
    steps = "".join(f"<li><b>{escape(label)}</b>: {escape(text)}" for label, text in next_steps)
    parts.append(f"<h2>Next steps</h2><ul>{steps}</ul>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(heading)}</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def clock(seconds: float | None) -> str:
    """`m:ss`, or a dash."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _verdict(histories: Sequence[History], time_scale: float) -> str:
    averages = [history.average_jct_s for history in histories]
    if len(histories) < 2 or averages[0] is None or averages[1] is None:
        return "<p class=verdict>Nothing can be compared: on one side no job has ended.</p>"
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
    return f"<p class=verdict>{escape(text)}</p>"


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
    return f"<div class=wide><table><tr><th>{head}{body}</table></div>"


def gantt(history: History, span_s: float, time_scale: float, colours: Mapping[str, str]) -> str:
    """A Gantt chart as SVG: a row for each GPU, a bar for each run. See `render_page`.

    Args:
        colours: job name -> colour.
    """
    rows: dict[tuple[str, int], float] = {}
    y, back, labels = 8.0, [], []
    plot = WIDTH - LEFT - 8
    for node in history.nodes:
        height = node.gpus * ROW
        back.append(f'<rect class=back x="{LEFT}" y="{y}" width="{plot}" height="{height}"/>')
        labels.append(f'<text x="{LEFT - 8}" y="{y + height / 2 + 4}" text-anchor="end">{escape(node.name)}</text>')
        for gpu in range(node.gpus):
            rows[node.name, gpu] = y + gpu * ROW
        y += height + 5
    bars = []
    for job in history.jobs:
        colour = colours.get(job.name, COLOURS[0])
        for span in job.spans:
            x = LEFT + (span.start_s - history.start_s) / span_s * plot
            width = max((span.end_s - span.start_s) / span_s * plot, 1.5)
            begin, end = clock(span.start_s - history.start_s), clock(span.end_s - history.start_s)
            tip = f"{job.name} (job {job.id}): {span.gpus} {span.gpu_type}, {begin} to {end}"
            first = True
            for node_name, gpus in span.gpu_ids.items():
                for top, count in _blocks([rows[node_name, gpu] for gpu in gpus if (node_name, gpu) in rows]):
                    height = count * ROW
                    bars.append(
                        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height - 1}" rx="1.5" fill="{colour}">'
                        f"<title>{escape(tip)}</title></rect>"
                    )
                    if first and width > 6.2 * len(job.name) + 6 and height >= ROW:
                        size = min(11, height + 1)
                        bars.append(
                            f'<text x="{x + 4:.1f}" y="{top + height / 2 + size * 0.36:.1f}" pointer-events="none" '
                            f'style="fill:#111;font-size:{size}px">{escape(job.name)}</text>'
                        )
                        first = False
    axis = _time_axis(span_s, time_scale, 8, y)
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 34:.0f}" width="{WIDTH}" role="img" aria-label="Gantt chart: {escape(history.title)}">'
        f"{''.join(back)}{axis}{''.join(bars)}{''.join(labels)}</svg>"
    )


def _blocks(tops: list[float]) -> list[tuple[float, int]]:
    """Adjacent rows joined: (top of the first row, number of rows)."""
    blocks: list[tuple[float, int]] = []
    for top in sorted(tops):
        if blocks and abs(blocks[-1][0] + blocks[-1][1] * ROW - top) < 0.01:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + 1)
        else:
            blocks.append((top, 1))
    return blocks


def _time_axis(span_s: float, time_scale: float, top: float, bottom: float) -> str:
    plot = WIDTH - LEFT - 8
    in_hours = span_s > HOURS_FROM_S
    steps = (
        (1800, 3600, 7200, 14400, 28800, 86400) if in_hours else (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
    )
    step = next((s for s in steps if span_s / s <= 12), max(steps) * max(round(span_s / max(steps) / 12), 1))
    parts = []
    for index in range(int(span_s // step) + 1):
        x, label = LEFT + index * step / span_s * plot, f"{index * step / 3600:g}" if in_hours else clock(index * step)
        parts.append(f'<line class=grid x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{label}</text>')
    scale = f"; one second stands for {time_scale:g} s" if time_scale != 1 else ""
    unit = "hours" if in_hours else "minutes"
    parts.append(f'<text class=soft x="{LEFT}" y="{bottom + 29}">{unit} since the start{scale}</text>')
    return "".join(parts)


def chart(
    histories: Sequence[History],
    series: Callable[[History], list[tuple[float, float]]],
    span_s: float,
    time_scale: float,
    unit: str,
) -> str:
    """A line chart as SVG, with a stepped line for each history. See `render_page`.

    Args:
        series: the (time, value) pairs of a history.
        unit: of the values.
    """
    plot, top, bottom = WIDTH - LEFT - 8, 8.0, 168.0
    found = [(history, series(history)) for history in histories]
    highest = max((value for _, points in found for _, value in points), default=0.0) or 1.0
    parts = [_time_axis(span_s, time_scale, top, bottom)]
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<line class=grid x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{highest * share:.3g}</text>')
    for index, (history, points) in enumerate(found):
        steps, value = [f"M{LEFT} {bottom}"], 0.0
        for at_s, after in [*points, (history.end_s, None)]:
            x = LEFT + min(max(at_s - history.start_s, 0.0) / span_s, 1.0) * plot
            steps.append(f"L{x:.1f} {bottom - value / highest * (bottom - top):.1f}")
            if after is not None:
                value = after
                steps.append(f"L{x:.1f} {bottom - value / highest * (bottom - top):.1f}")
        parts.append(f'<path d="{" ".join(steps)}" fill="none" stroke="{LINES[index % len(LINES)]}" stroke-width="2"/>')
    label = f"{escape(unit)} over time"
    return f'<svg viewBox="0 0 {WIDTH} 205" width="{WIDTH}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def legend(histories: Sequence[History]) -> str:
    """The key of a line chart: which line stands for which history."""
    keys = (
        f'<span class=key style="background:{LINES[index % len(LINES)]}"></span>{escape(history.title)}'
        for index, history in enumerate(histories)
    )
    return f"<p>{' &emsp; '.join(keys)}</p>"


def _jobs(histories: Sequence[History], colours: Mapping[str, str]) -> str:
    if not histories:
        return "<p>There were no jobs.</p>"
    head = "".join(
        f"<th>asked for<th>ran on<th class=n>wait<th class=n>total<th>{escape(history.title)}" for history in histories
    )
    rows = []
    for index, job in enumerate(histories[0].jobs):
        mine = [history.jobs[index] for history in histories if index < len(history.jobs)]
        key = f'<span class=key style="background:{colours[job.name]}"></span>'
        rows.append(f"<tr><td>{key}{escape(job.name)}" + "".join(_job(each) for each in mine))
    return f"<div class=wide><table><tr><th>job{head}{''.join(rows)}</table></div>"


def _job(job: JobHistory) -> str:
    ran: list[str] = []
    for span in job.spans:
        gpus = f"{span.gpus} {span.gpu_type}"
        if not ran or ran[-1] != gpus:
            ran.append(gpus)
    wait = None if job.start_s is None else job.start_s - job.submit_s
    cells = f"<td>{escape(job.asks)}<td>{escape(' → '.join(ran)) or '–'}<td class=n>{clock(wait)}<td class=n>{clock(job.jct_s)}"
    return cells + f"<td>{escape(job.state.lower())}"
