"""Renders a job's page: one HTML page without scripts. Links in Airflow and in mails point to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jinja2 import Environment, StrictUndefined

from penstock_scheduler.messages import AllocationView, ExplanationView, JobView, LogPart, OutcomeView
from penstock_scheduler.report.html import COLOURS, STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content-Security-Policy of the page: the browser loads nothing and runs no script, whatever a job's output contains."""

TAIL_BYTES = 16 * 1024
"""Bytes from the end of the job's output that the page shows."""

_WIDTH, _HEIGHT, _LEFT, _TOP = 1000, 170, 50, 10
"""Pixels: width of the picture, height of the plot with its axis, left and top margin."""

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Job {{ job.id }} {{ state }}</title><style>{{ style|safe }}
pre{background:var(--card);padding:.8rem;border-radius:4px;overflow-x:auto;max-height:30rem}th{white-space:nowrap}</style></head><body>
<h1>Job {{ job.id }}{% if job.name %}: {{ job.name }}{% endif %}</h1>
<p class="verdict" id="explain">{% for line in lines %}{{ line }}{% if not loop.last %}<br>{% endif %}{% endfor %}</p>
<table>{% for label, text in facts %}<tr><th>{{ label }}</th><td>{{ text }}</td></tr>{% endfor %}</table>
<h2>GPUs over time</h2>
{% if blocks %}<svg viewBox="0 0 {{ width }} {{ height + 30 }}" role="img" aria-label="GPUs over time">
{% for gpus, y in marks %}<line class="grid" x1="{{ left }}" x2="{{ width }}" y1="{{ y }}" y2="{{ y }}"/>
<text x="{{ left - 6 }}" y="{{ y + 4 }}" text-anchor="end">{{ gpus }}</text>{% endfor %}
{% for b in blocks %}<rect x="{{ b.x }}" y="{{ b.y }}" width="{{ b.width }}" height="{{ b.height }}" fill="{{ b.colour }}">
<title>{{ b.text }}</title></rect>{% endfor %}
<text x="{{ left }}" y="{{ height + 18 }}">{{ begin }}</text>
<text x="{{ width }}" y="{{ height + 18 }}" text-anchor="end">{{ end }}</text></svg>
<p>{% for gpu_type, colour in key %}
<span class="key" style="background:{{ colour }}"></span>{{ gpu_type }} &nbsp; {% endfor %}</p>
{% else %}<p class="soft">The job has held no GPUs so far.</p>{% endif %}
{% if options %}<h2>Possible configurations</h2><div class="wide"><table>
<tr><th>configuration</th><th class="n">goodput, samples/s</th><th class="n">price</th></tr>
{% for o in options %}<tr><td>{{ o.gpus }} {{ o.gpu_type }}{% if o.nodes > 1 %} on {{ o.nodes }} nodes{% endif %}</td>
<td class="n">{{ '%.4g' % o.goodput }}</td><td class="n">{% if o.price is not none %}{{ '%.3g' % o.price }}{% endif %}</td></tr>
{% endfor %}</table></div>{% endif %}
<h2>Events</h2>
{% if outcomes %}<div class="wide"><table><tr><th>time (UTC)</th><th>round</th><th>action</th><th></th><th>GPUs</th><th></th></tr>
{% for o in outcomes %}<tr><td>{{ o.time }}</td><td>{{ o.round }}</td><td>{{ o.action }}</td><td>{{ o.progress }}</td>
<td>{{ o.gpus }}</td><td>{{ o.text }}</td></tr>{% endfor %}</table></div>
{% else %}<p class="soft">No events so far.</p>{% endif %}
<h2>End of the output</h2>
{% if tail %}<pre>{{ tail }}</pre>{% else %}<p class="soft">The job has no output that can be shown.</p>{% endif %}
<p class="soft">Written by penstockd at {{ now }} UTC. Reload the page to update it.</p></body></html>
"""


@dataclass(frozen=True, slots=True)
class Held:
    """GPUs that a job held during a period. Times in s since 1970."""

    begin_s: float
    end_s: float
    allocation: AllocationView


def held(job: JobView, outcomes: Sequence[OutcomeView], now_s: float) -> list[Held]:
    """The periods in which the job held GPUs, from the actions that were done."""
    found: list[Held] = []
    open_: tuple[float, AllocationView] | None = None
    end_s = job.end_s if job.state == "ended" and job.end_s is not None else now_s
    for outcome in outcomes:
        if outcome.progress == "done":
            if open_ is not None:
                found.append(Held(open_[0], outcome.time_s, open_[1]))
            open_ = None if outcome.allocation is None else (outcome.time_s, outcome.allocation)
    if open_ is None and job.allocation is not None:
        open_ = (found[-1].end_s if found else job.start_s or job.submit_s), job.allocation
    if open_ is not None:
        found.append(Held(open_[0], max(end_s, open_[0]), open_[1]))
    return found


def render(
    job: JobView, explanation: ExplanationView, outcomes: Sequence[OutcomeView], log: LogPart | None, *, now_s: float
) -> str:
    """The page as HTML. Names, texts and output are escaped.

    Args:
        log: the end of the job's output; None: it cannot be read.
        now_s: s since 1970.
    """
    periods = held(job, outcomes, now_s)
    end_s = job.end_s if job.state == "ended" and job.end_s is not None else now_s
    span_s = max(end_s - job.submit_s, 1.0)
    most = max((period.allocation.gpus for period in periods), default=1)
    colours = {
        gpu_type: COLOURS[index % len(COLOURS)]
        for index, gpu_type in enumerate(sorted({period.allocation.gpu_type for period in periods}))
    }

    def x(time_s: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * min(max((time_s - job.submit_s) / span_s, 0.0), 1.0), 1)

    def y(gpus: float) -> float:
        return round(_HEIGHT - (_HEIGHT - _TOP) * gpus / most, 1)

    blocks = [
        {
            "x": x(period.begin_s),
            "y": y(period.allocation.gpus),
            "width": max(x(period.end_s) - x(period.begin_s), 1.0),
            "height": _HEIGHT - y(period.allocation.gpus),
            "colour": colours[period.allocation.gpu_type],
            "text": f"{_gpus(period.allocation)}, {_time(period.begin_s)} to {_time(period.end_s)}",
        }
        for period in periods
    ]
    state = f"ended {job.ended}".rstrip() if job.state == "ended" else job.state
    facts = {
        "state": state + (f", exit code {job.exit_code}" if job.exit_code is not None else ""),
        "user": job.user + (f", account {job.account}" if job.account else ""),
        "has": _gpus(job.allocation) if job.allocation else "",
        "submitted": _time(job.submit_s),
        "started": _time(job.start_s) if job.start_s is not None else "",
        "ended": _time(job.end_s) if job.end_s is not None else "",
        "restarts": str(job.restarts),
        "samples": ""
        if job.progress is None
        else f"{job.progress:,.0f}" + (f" of {job.total:,.0f}" if job.total else ""),
        "GPU-hours": ", ".join(f"{amount / 3600:.2f} of {name}" for name, amount in sorted(job.gpu_seconds.items())),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        job=job,
        state=state,
        style=STYLE,
        lines=explanation.lines,
        facts=[(label, text) for label, text in facts.items() if text],
        blocks=blocks,
        marks=[(gpus, y(gpus)) for gpus in sorted({0, most // 2, most})],
        key=sorted(colours.items()),
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        begin=_time(job.submit_s),
        end=_time(end_s),
        options=sorted(explanation.configurations, key=lambda option: -option.goodput)[:12],
        outcomes=[
            {
                "time": _time(each.time_s),
                "round": each.round,
                "action": each.action,
                "progress": each.progress,
                "gpus": _gpus(each.allocation) if each.allocation else "",
                "text": each.text,
            }
            for each in outcomes[-50:]
        ],
        tail=log.text if log else "",
        now=_time(now_s),
    )


def _gpus(allocation: AllocationView) -> str:
    return f"{allocation.gpus} {allocation.gpu_type} on {', '.join(allocation.nodes)}"


def _time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
