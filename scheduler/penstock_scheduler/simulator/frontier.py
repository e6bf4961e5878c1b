"""Cloud cost against completion time for each waiting budget P = 0 to 100 %, on a site's own trace.

`penstock simulate --cloud --frontier` simulates the trace once for each way and each budget: the round loop, the policy and the
burst manager as the daemon runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import cycle
from typing import Any

import numpy as np

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.policy_choice import PolicyChoice
from penstock_scheduler.simulator.cloud import CloudSpec
from penstock_scheduler.simulator.run import Scenario, Simulation, simulate_policy

BUDGETS = (0, 10, 25, 50, 100)
"""Waiting budgets, as a percentage of the mean running time that jobs may wait on average."""

MOST_WARMUP = 5000
"""Most jobs at either end of a trace that do not count, as in the paper; for a short trace a twentieth of its jobs."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to wait: a policy, and a rule for the waiting budget.

    Attributes:
        name: for people.
        choice: the policy.
        wait: the rule by `[cloud] wait`; None: as the cloud's settings have it.
    """

    name: str
    choice: PolicyChoice
    wait: str | None = None


def _fifo(backfill: str) -> PolicyChoice:
    return PolicyChoice(name="fifo", settings={"fifo": {"backfill": backfill}})


WAYS = (
    Way("compute-wait, out of order", _fifo("out-of-order"), "compute-wait"),
    Way("compute-wait, EASY", _fifo("easy"), "compute-wait"),
    Way("constant-wait", _fifo("none"), "constant-wait"),
)
"""Ways that are compared where no policy is named: Starburst's choice, with backfill, and the usual one."""


@dataclass(frozen=True, slots=True)
class Point:
    """One budget under one way to wait. Times in hours. Without the jobs of warm-up and cool-down, but for `utilization`."""

    way: str
    percent: float
    usd: float
    gpu_h: float
    """GPU-hours of instances, with their boot."""
    avg_jct_h: float
    p99_wait_h: float
    """Time from submission to the begin of the last run."""
    cloud_jobs: int
    utilization: float


def frontier(
    scenario: Scenario,
    ways: Sequence[Way],
    cloud: CloudSpec,
    budgets: Sequence[float] = BUDGETS,
    on_point: Callable[[Point], None] = lambda point: None,
    on_tick: Callable[[Simulation], None] = lambda simulation: None,
) -> list[Point]:
    """A point for each way to wait and each budget. Ctrl-C ends it with the points so far.

    Raises:
        ConfigError: there are no jobs, or a policy is unknown.
    """
    if not scenario.workload.jobs:
        raise ConfigError("the workload has no jobs to compare; give a trace with some")
    points: list[Point] = []
    for way in ways:
        for percent in budgets:
            settings = cloud.settings.model_copy(
                update={"waiting_budget_percent": float(percent), "wait": way.wait or cloud.settings.wait}
            )
            simulation = simulate_policy(scenario, way.choice, on_tick=on_tick, cloud=replace(cloud, settings=settings))
            if simulation.interrupted:
                return points
            points.append(_point(way, percent, simulation))
            on_point(points[-1])
    return points


def _point(way: Way, percent: float, simulation: Simulation) -> Point:
    use, jobs = simulation.cloud, simulation.jobs
    assert use is not None, "it was simulated with a cloud"
    warmup = min(MOST_WARMUP, len(jobs) // 20)
    counted = jobs[warmup : len(jobs) - warmup]
    ended = [job for job in counted if job.finish_s is not None]
    if not ended:
        raise ConfigError("no job has ended in the simulation; give a trace whose jobs fit on the site or in the cloud")
    there_s = simulation.scenario.total_gpus * simulation.end_s
    return Point(
        way.name,
        percent,
        sum(use.usd.get(job.id, 0.0) for job in counted),
        sum(use.gpu_hours.get(job.id, 0.0) for job in counted),
        float(np.mean([(job.finish_s or 0.0) - job.submit_s for job in ended])) / 3600,
        float(np.percentile([job.runs[-1].start_s - job.submit_s for job in ended], 99)) / 3600,
        sum(job.id in use.away for job in counted),
        (simulation.gpu_seconds or 0.0) / there_s if there_s else 0.0,
    )


def frontier_document(points: Sequence[Point], workload: str, cluster: str, usd_per_gpu_h: float) -> dict[str, Any]:
    """The points as JSON."""
    return {
        "workload": workload,
        "cluster": cluster,
        "usd_per_gpu_h": usd_per_gpu_h,
        "points": [asdict(point) for point in points],
    }


COLOURS = ("#1f6feb", "#2da44e", "#bf8700", "#cf222e", "#8250df", "#57606a")
WIDTH, HEIGHT, LEFT, TOP = 860, 440, 80, 24


def frontier_page(points: Sequence[Point], title: str) -> str:
    """The frontier as one page that opens offline: a chart and its table."""
    ways = list(dict.fromkeys(point.way for point in points))
    most_usd = max(point.usd for point in points) * 1.05 or 1.0
    low_h, high_h = min(p.avg_jct_h for p in points), max(p.avg_jct_h for p in points)
    span_h = (high_h - low_h) * 1.1 or 1.0

    def at(point: Point) -> tuple[float, float]:
        x = LEFT + (point.avg_jct_h - low_h) / span_h * (WIDTH - LEFT - 30)
        return x, TOP + (1 - point.usd / most_usd) * (HEIGHT - TOP - 50)

    parts = []
    for tick in range(6):
        y = TOP + (1 - tick / 5) * (HEIGHT - TOP - 50)
        x = LEFT + tick / 5 * (WIDTH - LEFT - 30)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 30}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">${most_usd * tick / 5:,.0f}</text>')
        hours = low_h + span_h * tick / 5
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 30}" text-anchor="middle">{hours:.2f} h</text>')
    for colour, way in zip(cycle(COLOURS), ways, strict=False):
        mine = [point for point in points if point.way == way]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, mine))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in mine:
            x, y = at(point)
            what = escape(f"{way}, P = {point.percent:g} %: ${point.usd:,.0f}, average JCT {point.avg_jct_h:.3f} h")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{what}</title></circle>')
            if point.percent in (25, 100):
                parts.append(f'<text x="{x + 7:.1f}" y="{y - 6:.1f}" fill="{colour}">{point.percent:g} %</text>')
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(way)}</span>'
        for colour, way in zip(cycle(COLOURS), ways, strict=False)
    )
    base = points[0]
    rows = "".join(
        f"<tr><td>{escape(p.way)}</td><td>{p.percent:g} %</td><td>${p.usd:,.0f}</td><td>{p.gpu_h:,.1f}</td>"
        f"<td>{_share(p.usd, base.usd)}</td>"
        f"<td>{p.avg_jct_h:.3f} h</td><td>{_share(p.avg_jct_h, base.avg_jct_h)}</td><td>{p.p99_wait_h:.2f} h</td>"
        f"<td>{p.cloud_jobs}</td><td>{p.utilization:.1%}</td></tr>"
        for p in points
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#1f2328;background:#fff}}
text{{font-size:12px;fill:#57606a}} .grid{{stroke:#d0d7de;stroke-width:1}} svg{{width:100%;height:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}} td,th{{padding:.2em .6em;text-align:right}}
td{{white-space:nowrap}}
td:first-child,th:first-child{{text-align:left}} tr:nth-child(even){{background:#f6f8fa}}
span{{margin-right:1.5em}} i{{display:inline-block;width:12px;height:12px;margin-right:6px;border-radius:6px}}
</style></head><body><h1>{escape(title)}</h1>
<p>Each point is one waiting budget P: jobs may wait for GPUs on site P % of the mean running time, on average, before they go to
the cloud. Lower is cheaper, further left is faster. With P = 0, a job that does not fit goes there at once.
Simulated with the scheduler's own round loop and burst manager.</p>
<p>{legend}</p><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Cloud cost against average completion time">
{"".join(parts)}<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">average completion time of a job</text></svg>
<table><tr><th>way to wait</th><th>P</th><th>cloud</th><th>GPU-hours</th><th>against the first</th>
<th>average JCT</th><th>against the first</th>
<th>99th % wait</th><th>jobs away</th><th>site in use</th></tr>{rows}</table></body></html>
"""


def _share(value: float, base: float) -> str:
    return f"{value / base - 1:+.1%}" if base else "–"
