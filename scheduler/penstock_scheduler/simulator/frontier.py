"""Cloud cost against completion time for each waiting budget P = 0 to 100 %, on a site's own trace.

`penstock simulate --cloud` replays the trace (`penstock_scheduler.simulator.bursting`) once for each budget and each
way to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import Node
from penstock_scheduler.model.waiting import Averages, Wait, by_budget
from penstock_scheduler.simulator.bursting import RigidJob, SiteSpec, figures, replay
from penstock_scheduler.simulator.workloads import Workload

BUDGETS = (0, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100)
"""Waiting budgets, as a percentage of the mean running time that jobs may wait on average."""

MOST_WARMUP = 5000
"""Most jobs at either end of a trace that do not count, as in the paper; for a short trace a twentieth of its jobs."""


@dataclass(frozen=True, slots=True)
class Point:
    """One budget under one way to wait. Times in hours."""

    way: str
    percent: float
    usd: float
    avg_jct_h: float
    p99_wait_h: float
    cloud_jobs: int
    utilization: float


WAYS: dict[str, tuple[Wait, dict[str, Any]]] = {
    "compute-wait": (Wait.COMPUTE, {"out_of_order": True}),
    "compute-wait, EASY, SJF": (Wait.COMPUTE, {"easy": True, "order": "sjf"}),
    "constant-wait": (Wait.CONSTANT, {}),
}
"""Ways to wait that are compared: Starburst's choice, Penstock's, and the usual one."""


def rigid_jobs(workload: Workload) -> list[RigidJob]:
    """The jobs as they were recorded. Raises ConfigError if a job has no recorded duration."""
    without = [job.id for job in workload.jobs if job.duration_s is None]
    if without:
        raise ConfigError(
            f"--cloud needs recorded durations, and {len(without)} jobs have none, such as {without[0]!r}; "
            "give a trace such as sacct's"
        )
    first_s = workload.jobs[0].submit_s if workload.jobs else 0.0
    return [
        RigidJob((job.submit_s - first_s) / 3600, job.duration_s / 3600, job.gpus)
        for job in workload.jobs
        if job.duration_s is not None
    ]


def site_of(nodes: Sequence[Node], max_queue: int | None) -> SiteSpec:
    """The site for a replay. Raises ConfigError if its nodes differ in size."""
    sizes = sorted({node.gpus for node in nodes})
    if len(sizes) > 1:
        raise ConfigError(
            f"--cloud replays a site of equal nodes, and these have {', '.join(map(str, sizes))} GPUs; "
            "name one partition's nodes"
        )
    return SiteSpec(len(nodes), sizes[0], "best", max_queue=max_queue, corrected=True)


def frontier(
    jobs: Sequence[RigidJob],
    site: SiteSpec,
    usd_per_gpu_h: float,
    budgets: Sequence[float] = BUDGETS,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """A point for each way to wait and each budget. The trace's averages convert a budget into waits.

    Raises:
        ConfigError: there are no jobs.
    """
    if not jobs:
        raise ConfigError("the workload has no jobs to compare; give a trace with some")
    averages = Averages(
        len(jobs), sum(job.runtime_h for job in jobs) / len(jobs), sum(job.gpus for job in jobs) / len(jobs)
    )
    warmup = min(MOST_WARMUP, len(jobs) // 20)
    points = []
    for way, (kind, how) in WAYS.items():
        for percent in budgets:
            found = figures(replay(jobs, by_budget(kind, percent, averages), replace(site, **how)), warmup)
            usd = found.total_cloud_cost * usd_per_gpu_h
            point = Point(way, percent, usd, found.avg_jct, found.p99_wait, found.cloud_jobs, found.cluster_utilization)
            points.append(point)
            on_point(point)
    return points


def frontier_document(points: Sequence[Point], workload: str, cluster: str, usd_per_gpu_h: float) -> dict[str, Any]:
    """The points as JSON."""
    return {
        "workload": workload,
        "cluster": cluster,
        "usd_per_gpu_h": usd_per_gpu_h,
        "points": [asdict(point) for point in points],
    }


COLOURS = ("#1f6feb", "#2da44e", "#bf8700")
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
    for colour, way in zip(COLOURS, ways, strict=False):
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
        for colour, way in zip(COLOURS, ways, strict=False)
    )
    base = points[0]
    rows = "".join(
        f"<tr><td>{escape(p.way)}</td><td>{p.percent:g} %</td><td>${p.usd:,.0f}</td><td>{_share(p.usd, base.usd)}</td>"
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
the cloud. Lower is cheaper, further left is faster. With P = 0, a job that does not fit goes there at once.</p>
<p>{legend}</p><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Cloud cost against average completion time">
{"".join(parts)}<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">average completion time of a job</text></svg>
<table><tr><th>way to wait</th><th>P</th><th>cloud</th><th>against no-wait</th><th>average JCT</th><th>against no-wait</th>
<th>99th % wait</th><th>jobs away</th><th>site in use</th></tr>{rows}</table></body></html>
"""


def _share(value: float, base: float) -> str:
    return f"{value / base - 1:+.1%}" if base else "–"
