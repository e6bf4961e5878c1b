"""Cloud cost against completion time for each waiting budget P = 0 to 100 %, on a site's own trace.

`penstock simulate run --cloud --frontier` simulates the trace once for each way and each budget: the round loop, the
policy and the burst manager as the daemon runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import cycle
from typing import Any

import numpy as np

from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.drawing.svg import LINES, Axis, Dot, Line, chart, legend, page, ticks, wide
from penstock_scheduler.people.errors import ConfigError
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


def frontier_page(points: Sequence[Point], title: str) -> str:
    """The frontier as one page that opens offline: a chart and its table."""
    ways = dict.fromkeys(point.way for point in points)
    colours = dict(zip(ways, cycle(LINES), strict=False))
    most_usd = max(point.usd for point in points) or 1.0
    low_h, high_h = min(p.avg_jct_h for p in points), max(p.avg_jct_h for p in points)
    lines = []
    for way, colour in colours.items():
        dots = [
            Dot(
                (point.avg_jct_h, point.usd),
                f"{way}, P = {point.percent:g} %: ${point.usd:,.0f}, average JCT {point.avg_jct_h:.3f} h",
                f"{point.percent:g} %" if point.percent in (25, 100) else "",
            )
            for point in points
            if point.way == way
        ]
        lines.append(Line(colour, [dot.at for dot in dots], dots=dots))
    across = [low_h + (high_h - low_h) * tick / 5 for tick in range(6)]
    axes = (
        Axis(low_h, low_h + 1.08 * (high_h - low_h), [(hours, f"{hours:.2f} h") for hours in across]),
        Axis(0, 1.05 * most_usd, [(usd, f"${usd:,.0f}") for usd, _ in ticks(most_usd, 5)]),
    )
    label = "Cloud cost against average completion time"
    picture = chart(label, "average completion time of a job; up: cost of the cloud", lines, *axes, tall=340)
    base = points[0]
    rows = "".join(
        f"<tr><td>{escape(p.way)}"
        + "".join(
            f"<td class=n>{cell}"
            for cell in (
                f"{p.percent:g} %", f"${p.usd:,.0f}", f"{p.gpu_h:,.1f}", _share(p.usd, base.usd), f"{p.avg_jct_h:.3f} h",
                _share(p.avg_jct_h, base.avg_jct_h), f"{p.p99_wait_h:.2f} h", p.cloud_jobs, f"{p.utilization:.1%}",
            )
        )
        for p in points
    )  # fmt: skip
    heads = (
        "P", "cloud", "GPU-hours", "against the first", "average JCT", "against the first", "99th % wait", "jobs away",
        "site in use",
    )  # fmt: skip
    head = "<th>way to wait" + "".join(f"<th class=n>{each}" for each in heads)
    about = """<p>Each point is one waiting budget P: jobs may wait for GPUs on site P % of the mean running time, on average,
before they go to the cloud. Lower is cheaper, further left is faster. With P = 0, a job that does not fit goes there at once.
Simulated with the scheduler's own round loop and burst manager."""
    return page(title, [about, legend(colours), wide(picture), wide(f"<table><tr>{head}{rows}</table>")])


def _share(value: float, base: float) -> str:
    return f"{value / base - 1:+.1%}" if base else "–"
