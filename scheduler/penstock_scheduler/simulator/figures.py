"""The pictures of a report as numbers, which `page` draws.

Over seeds each line is a mean, and its band is the 95 % confidence interval of that mean by Student's t, point by
point. With one seed there is no band. Time axes are cut into equal bins; a point is the mean over its bin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

from penstock_profiles.throughput import FloatArray
from penstock_scheduler.model import Node
from penstock_scheduler.people.drawing.history import History, JobHistory, NodeShape, Span
from penstock_scheduler.people.drawing.svg import HOURS_FROM_S, LINES
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.results import SeedResult

BINS = 300
"""Points of a line."""

SHARED = "Where jobs share GPUs, one covers the other. The numbers of a node's GPUs are assumed."


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """The line of one policy. `low` and `high` bound its band; None: there is none."""

    policy: str
    mean: FloatArray
    low: FloatArray | None
    high: FloatArray | None


@dataclass(frozen=True, slots=True)
class Lines:
    """A picture of lines."""

    title: str
    about: str
    x_label: str
    y_label: str
    x: FloatArray
    """The points of all lines."""
    lines: tuple[PolicyLine, ...]
    most: float | None = None
    """Largest possible value; None: unbounded. The least is 0."""
    ticks: tuple[tuple[float, str], ...] | None = None
    """(place, label) on a logarithmic axis; None: the axis is linear."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A mean and half of its confidence interval; None: there is none."""

    policy: str
    mean: float
    half: float | None


@dataclass(frozen=True, slots=True)
class Bars:
    """A figure of all policies that have it."""

    label: str
    """With its unit."""
    bars: tuple[Bar, ...]


COMPARED = {
    "avg_jct_h": ("Average time to completion, h", 1.0),
    "p99_jct_h": ("99 of 100 jobs done within, h", 1.0),
    "makespan_h": ("First submission to last end, h", 1.0),
    "queue_h": ("Waiting without GPUs, h a job", 1.0),
    "feedback_min": ("Until a job has trained for a minute, min", 1.0),
    "gpu_h_per_job": ("GPU-hours a job", 1.0),
    "utilisation": ("GPUs in use, % of the time", 100.0),
}
"""Figure of a summary -> (label, factor), for the bars."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All pictures of a report, as numbers."""

    heading: str
    colours: Mapping[str, str]
    """Policy -> colour."""
    seeds: int
    """Largest number of seeds of a policy."""
    comparison: tuple[Bars, ...]
    lines: tuple[Lines, ...]
    gantts: tuple[History, ...]
    """The first seed of each policy."""
    unit: tuple[str, float]
    """(name, seconds) of the time axes' unit."""
    end_s: float
    """Where time axes end."""


def figures(results: Sequence[SeedResult], document: Mapping[str, Any]) -> Figures:
    """The numbers of all pictures, from all simulations and their summary (`results.over_seeds`)."""
    histories: dict[str, list[History]] = {}
    for result in results:
        simulation = result.simulation
        drawn = history(simulation.scenario.nodes, simulation.jobs, simulation.end_s, result.policy)
        if simulation.agents is not None:
            drawn = replace(drawn, note=SHARED, held=tuple((tick.time_s, tick.gpus_held) for tick in simulation.ticks))
        histories.setdefault(result.policy, []).append(drawn)
    end_s = max((each.end_s for of in histories.values() for each in of), default=0.0) or 1.0
    unit = ("hours", 3600.0) if end_s > HOURS_FROM_S else ("minutes", 60.0)
    return Figures(
        heading=f"{document['workload']} on {document['cluster']}",
        colours={name: LINES[index % len(LINES)] for index, name in enumerate(histories)},
        seeds=max(map(len, histories.values())),
        comparison=_comparison(document["policies"]),
        lines=(_done_within(results), *_over_time(histories, end_s, unit)),
        gantts=tuple(of[0] for of in histories.values()),
        unit=unit,
        end_s=end_s,
    )


def _comparison(policies: Mapping[str, Any]) -> tuple[Bars, ...]:
    """The bars that compare policies."""
    found = []
    for key, (label, factor) in COMPARED.items():
        bars = tuple(
            Bar(name, of["mean"][key] * factor, None if (half := of["ci95"][key]) is None else half * factor)
            for name, of in policies.items()
            if of["mean"][key] is not None
        )
        if bars and any(bar.mean for bar in bars):
            found.append(Bars(label, bars))
    return tuple(found)


def _over_time(histories: Mapping[str, Sequence[History]], end_s: float, unit: tuple[str, float]) -> tuple[Lines, ...]:
    edges = np.linspace(0.0, end_s, BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2 / unit[1]

    def over_time(
        title: str,
        about: str,
        y_label: str,
        series: Callable[[History], list[tuple[float, float]]],
        most: float | None = None,
    ) -> Lines:
        lines = tuple(
            _line(policy, [binned(series(each), edges) for each in of], most) for policy, of in histories.items()
        )
        return Lines(title, about, f"{unit[0]} since the start", y_label, middles, lines)

    return (
        over_time(
            "Jobs that wait for GPUs",
            "Jobs that were submitted, have not ended and hold no GPUs.",
            "jobs",
            History.queue,
        ),
        over_time("GPUs in use", "Share of all GPUs that jobs hold.", "% of all GPUs", History.utilisation, most=100.0),
        over_time(
            "Goodput: work that gets done",
            "Summed over all jobs, in whole jobs.",
            "jobs' worth of work a minute",
            History.goodput,
        ),
    )


def _done_within(results: Sequence[SeedResult]) -> Lines:
    times: dict[str, list[tuple[FloatArray, int]]] = {}
    for result in results:
        jct_s = np.sort([row.jct_s for row in result.rows if row.jct_s is not None])
        times.setdefault(result.policy, []).append((jct_s, len(result.rows)))
    ended = [each for of in times.values() for each, _ in of if len(each)]
    low = math.floor(math.log10(max(min((each[0] for each in ended), default=1.0), 1.0)))
    high = max(math.log10(max((each[-1] for each in ended), default=10.0)), low + 0.5)
    x = np.logspace(low, high, BINS)
    lines = tuple(
        _line(
            policy,
            [100 * np.searchsorted(jct_s, x * (1 + 1e-9), side="right") / max(count, 1) for jct_s, count in of],
            100.0,
        )
        for policy, of in times.items()
    )
    ticks = tuple((seconds, label) for seconds, label in TIMES if low <= math.log10(seconds) <= high)
    return Lines(
        "How soon jobs are done",
        "Share of the jobs that took at most this long from submission to end.",
        "from submission to end",
        "% of the jobs",
        x,
        lines,
        100.0,
        ticks,
    )


TIMES = (
    (1, "1 s"), (10, "10 s"), (60, "1 min"), (300, "5 min"), (900, "15 min"), (3600, "1 h"), (4 * 3600, "4 h"),
    (12 * 3600, "12 h"), (48 * 3600, "2 days"), (7 * 86400, "1 week"), (28 * 86400, "4 weeks"),
)  # fmt: skip
"""(seconds, label) on the logarithmic axis of times."""


def _line(policy: str, seeds: Sequence[FloatArray], most: float | None) -> PolicyLine:
    values_SX = np.stack(seeds)
    mean = values_SX.mean(axis=0)
    if len(seeds) < 2:
        return PolicyLine(policy, mean, None, None)
    half = stdtrit(len(seeds) - 1, 0.975) * values_SX.std(axis=0, ddof=1) / math.sqrt(len(seeds))
    return PolicyLine(
        policy, mean, np.maximum(mean - half, 0.0), np.minimum(mean + half, math.inf if most is None else most)
    )


def binned(series: Sequence[tuple[float, float]], edges: FloatArray) -> FloatArray:
    """Mean in each bin of a step function, which is given as (from when on, value) and is 0 before."""
    if not series:
        return np.zeros(len(edges) - 1)
    times = np.array([at_s for at_s, _ in series])
    values = np.array([value for _, value in series])
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    last = np.clip(np.searchsorted(times, edges, side="right") - 1, 0, None)
    until = area[last] + values[last] * np.maximum(edges - times[last], 0.0)
    means: FloatArray = np.diff(until) / np.diff(edges)
    return means


def history(nodes: Sequence[Node], jobs: Sequence[SimulatedJob], end_s: float, title: str, note: str = "") -> History:
    """What happened. Jobs get the GPU numbers of a node that the fewest other jobs have, the lowest first."""
    users = {node.name: [0] * node.gpus for node in nodes}
    spans: dict[str, list[Span]] = {job.id: [] for job in jobs}
    held: list[tuple[float, int, dict[str, tuple[int, ...]]]] = []
    runs = sorted(((run, job.id) for job in jobs for run in job.runs), key=lambda pair: pair[0].start_s)
    for number, (run, job_id) in enumerate(runs):
        while held and held[0][0] <= run.start_s:
            for node, left in heapq.heappop(held)[2].items():
                for gpu in left:
                    users[node][gpu] -= 1
        ids: dict[str, tuple[int, ...]] = {}
        for share in run.placement.shares:
            on = users[share.node]
            ids[share.node] = tuple(sorted(sorted(range(len(on)), key=on.__getitem__)[: share.gpus]))
            for gpu in ids[share.node]:
                on[gpu] += 1
        heapq.heappush(held, (run.end_s, number, ids))
        spans[job_id].append(Span(run.start_s, run.end_s, run.placement.gpu_type, ids))
    return History(
        title=title,
        nodes=tuple(NodeShape(node.name, node.gpu_type, node.gpus) for node in nodes),
        jobs=tuple(_seen(job, tuple(spans[job.id])) for job in jobs if job.submit_s <= end_s),
        start_s=0.0,
        end_s=end_s,
        note=note,
    )


def _seen(job: SimulatedJob, spans: tuple[Span, ...]) -> JobHistory:
    goodput: list[tuple[float, float]] = []
    reached = [*(run.progress for run in job.runs), job.progress]
    for run, after in zip(job.runs, reached[1:], strict=True):
        goodput += [(at_s, rate / job.work) for at_s, rate in run.rates]
        if not run.rates and run.end_s > run.ready_s:  # not observed while it trained: its mean rate
            goodput.append((run.ready_s, max(after - run.progress, 0.0) / (run.end_s - run.ready_s) / job.work))
        goodput.append((run.end_s, 0.0))
    low, high = job.spec.min_gpus, job.spec.max_gpus
    return JobHistory(
        id=job.id,
        name=job.name,
        asks=f"{job.spec.adaptivity.value} {low if low == high else f'{low}-{high}'}",
        submit_s=job.submit_s,
        start_s=spans[0].start_s if spans else None,
        end_s=job.finish_s,
        state="COMPLETED" if job.finish_s is not None else "PENDING",
        spans=spans,
        goodput=tuple(goodput),
        restarts=job.restarts,
    )
