"""Figures of a history: GPU-hours held and idle, waits, and how jobs ended. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from penstock_slurm.history.gpu_use import STEP_S, GpuUse
from penstock_slurm.history.reading import History, PastRun, StepUse
from penstock_slurm.history.waits import waited_for

SIZES = ((1, "1"), (2, "2 to 3"), (4, "4 to 7"), (8, "8 to 15"), (16, "16 and more"))
"""Least number of GPUs of a class of jobs, and its name."""

PARTS = 240
"""Parts of the period in `Levels`."""

Floats = npt.NDArray[np.float64]

MOST_SEEN = 1.25
"""Samples of so many times the GPU-hours that a job held are still taken for its own."""


@dataclass(frozen=True, slots=True)
class TypeHours:
    """The GPUs of a type in the period."""

    gpu_type: str
    """Empty for jobs whose GPUs' type is not known."""
    gpus: int
    held_gpu_h: float
    """GPU-hours that jobs held, whether they used them or not."""


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that have something in common, and their part in the period."""

    name: str
    jobs: int
    gpu_h: float
    """GPU-hours that they held in the period."""
    wait_s: float | None
    """Median wait of those that started in the period, if any did."""
    long_wait_s: float | None
    """Nine of ten of them waited no longer."""
    limit_used: float | None
    """Median share of its time limit for which a job ran, of those that ended in the period and had a limit."""
    busy: float | None
    """Share of the GPU-hours in which the GPUs were busy, of the jobs whose use is known."""
    cpu_used: float | None
    """Share of the time of their CPUs that they computed, of the jobs that have ended and whose use is known."""
    memory_used: float | None
    """Median of the largest share of their memory that these jobs used."""


@dataclass(frozen=True, slots=True)
class IdleJob:
    """A job that held GPUs at 0 % for at least half of its time in the period."""

    job_id: str
    user: str
    state: str
    gpus: int
    gpu_h: float
    """GPU-hours that it held in the period."""
    idle_gpu_h: float
    """The part of them at 0 %."""
    busy: float
    """Share of them in which the GPUs were busy."""


@dataclass(frozen=True, slots=True)
class UseFigures:
    """How busy the GPUs of jobs were that Prometheus has seen."""

    seen_gpu_h: float
    """GPU-hours that these jobs held in the period."""
    busy_gpu_h: float
    idle_gpu_h: float
    """At 0 %."""
    implausible_jobs: int
    """Jobs that count as not seen: there are samples of more GPU-hours than they held. Jobs share GPUs, or another cluster has a
    job of the same number."""
    idle_jobs: tuple[IdleJob, ...]
    """The most GPU-hours at 0 % first."""


@dataclass(frozen=True, slots=True)
class Levels:
    """GPUs over the period: means of equally long parts of it."""

    times_s: tuple[float, ...]
    """The middle of each part, s since 1970."""
    held: tuple[float, ...]
    """By jobs."""
    waited: tuple[float, ...]
    """For which jobs waited."""


@dataclass(frozen=True, slots=True)
class HistoryFigures:
    """A history in figures. GPU-hours are those inside the period."""

    begin_s: float
    end_s: float
    jobs: int
    users: int
    types: tuple[TypeHours, ...]
    idle_gpu_h: float
    """GPU-hours that no job held, of the nodes that there are now."""
    idle_while_waiting_gpu_h: float
    """The part of them in which jobs waited that asked for as many GPUs."""
    waited_h: dict[str, float]
    """Cause -> hours for which jobs waited; see `waits`."""
    levels: Levels
    by_end: tuple[Group, ...]
    by_size: tuple[Group, ...]
    by_user: tuple[Group, ...]
    by_account: tuple[Group, ...]
    by_partition: tuple[Group, ...]
    left_out: dict[str, int]
    use: UseFigures | None
    """How busy the GPUs were, if Prometheus was asked."""


def report(
    history: History,
    use: Mapping[str, GpuUse] | None = None,
    step_s: float = STEP_S,
    used: Mapping[str, StepUse] = MappingProxyType({}),
) -> HistoryFigures:
    """The figures of a history.

    Args:
        use: job -> what Prometheus has seen of it, if it was asked.
        step_s: seconds between two looks there.
        used: job -> the CPU time and memory that it used, as far as that was asked for.
    """
    runs, begin_s, end_s = history.runs, history.begin_s, history.end_s
    shares, of_use = _use(history, use, step_s) if use is not None else ({}, None)

    def grouped(key: Callable[[PastRun], str]) -> tuple[Group, ...]:
        names: dict[str, list[PastRun]] = {}
        for run in runs:
            names.setdefault(key(run), []).append(run)
        groups = (_group(name, its, begin_s, end_s, shares, used) for name, its in names.items())
        return tuple(sorted(groups, key=lambda group: (-group.gpu_h, group.name)))

    held: dict[str, float] = dict.fromkeys(history.gpus, 0.0)
    for run in runs:
        held[run.gpu_type] = held.get(run.gpu_type, 0.0) + _gpu_h(run, begin_s, end_s)
    gpus, (times, holding, waited) = sum(history.gpus.values()), _levels(runs, begin_s, end_s)
    hours, free = np.diff(times) / 3600, np.maximum(gpus - holding, 0)
    sizes = {name: place for place, (_, name) in enumerate(SIZES)}
    return HistoryFigures(
        begin_s=begin_s,
        end_s=end_s,
        jobs=len({run.job_id for run in runs}),
        users=len({run.user for run in runs}),
        types=tuple(TypeHours(name, history.gpus.get(name, 0), gpu_h) for name, gpu_h in held.items() if name or gpu_h),
        idle_gpu_h=float(free @ hours),
        idle_while_waiting_gpu_h=float(np.minimum(free, waited) @ hours),
        waited_h=waited_for(history),
        levels=_means(times, holding, waited),
        by_end=grouped(lambda run: run.state),
        by_size=tuple(sorted(grouped(lambda run: _size(run.gpus)), key=lambda group: sizes[group.name])),
        by_user=grouped(lambda run: run.user),
        by_account=grouped(lambda run: run.account),
        by_partition=grouped(lambda run: run.partition),
        left_out=history.left_out,
        use=of_use,
    )


def _use(history: History, use: Mapping[str, GpuUse], step_s: float) -> tuple[dict[str, float], UseFigures]:
    """Job -> the share of its time in which its GPUs were busy, and the figures of all jobs."""
    held, newest = defaultdict[str, float](float), dict[str, PastRun]()
    for run in history.runs:
        held[run.job_id] += _gpu_h(run, history.begin_s, history.end_s)
        newest[run.job_id] = run
    shares, jobs, implausible = dict[str, float](), list[IdleJob](), 0
    for job_id, run in newest.items():
        seen, gpu_h = use.get(job_id), held[job_id]
        if seen is None or not seen.seen_gpu_h or not gpu_h:
            continue
        if seen.seen_gpu_h > MOST_SEEN * gpu_h + 2 * run.gpus * step_s / 3600:
            implausible += 1
            continue
        shares[job_id] = busy = seen.busy_gpu_h / seen.seen_gpu_h
        idle_gpu_h = gpu_h * seen.idle_gpu_h / seen.seen_gpu_h
        jobs.append(IdleJob(job_id, run.user, run.state, run.gpus, gpu_h, idle_gpu_h, busy))
    idle = sorted((job for job in jobs if job.idle_gpu_h >= job.gpu_h / 2), key=lambda job: -job.idle_gpu_h)
    return shares, UseFigures(
        seen_gpu_h=sum(job.gpu_h for job in jobs),
        busy_gpu_h=sum(job.gpu_h * job.busy for job in jobs),
        idle_gpu_h=sum(job.idle_gpu_h for job in jobs),
        implausible_jobs=implausible,
        idle_jobs=tuple(idle),
    )


def _size(gpus: int) -> str:
    return next(name for least, name in reversed(SIZES) if gpus >= least)


def _gpu_h(run: PastRun, begin_s: float, end_s: float) -> float:
    if run.start_s is None:
        return 0.0
    ended_s = end_s if run.end_s is None else min(run.end_s, end_s)
    return run.gpus * max(ended_s - max(run.start_s, begin_s), 0.0) / 3600


def _group(
    name: str,
    runs: Sequence[PastRun],
    begin_s: float,
    end_s: float,
    shares: Mapping[str, float],
    used: Mapping[str, StepUse],
) -> Group:
    known = [(_gpu_h(run, begin_s, end_s), shares[run.job_id]) for run in runs if run.job_id in shares]
    known_gpu_h = sum(gpu_h for gpu_h, _ in known)
    waits = [
        max(run.start_s - run.ready_s, 0.0)
        for run in runs
        if run.start_s is not None and begin_s <= run.start_s < end_s
    ]
    limits = [
        run.ran_s / run.limit_s
        for run in runs
        if run.end_s is not None and run.limit_s and begin_s <= run.end_s < end_s
    ]
    cpu_used, memory_used = _of_steps(runs, used)
    return Group(
        name=name,
        jobs=len({run.job_id for run in runs}),
        gpu_h=sum(_gpu_h(run, begin_s, end_s) for run in runs),
        wait_s=_median(waits),
        long_wait_s=float(np.quantile(waits, 0.9)) if waits else None,
        limit_used=_median(limits),
        busy=sum(gpu_h * share for gpu_h, share in known) / known_gpu_h if known_gpu_h else None,
        cpu_used=cpu_used,
        memory_used=memory_used,
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _of_steps(runs: Iterable[PastRun], used: Mapping[str, StepUse]) -> tuple[float | None, float | None]:
    """`cpu_used` and `memory_used` of a group."""
    jobs: dict[str, list[PastRun]] = {}
    for run in runs:
        if run.job_id in used:
            jobs.setdefault(run.job_id, []).append(run)
    # Slurm has the use of a run once it has ended.
    ended = {job: its for job, its in jobs.items() if its[-1].ran_s > 0}
    held_cpu_s = sum(run.cpus * run.ran_s for its in ended.values() for run in its)
    memory = [used[job].memory_mb / its[-1].memory_mb for job, its in ended.items() if its[-1].memory_mb]
    return sum(used[job].cpu_s for job in ended) / held_cpu_s if held_cpu_s else None, _median(memory)


def _levels(runs: Iterable[PastRun], begin_s: float, end_s: float) -> tuple[Floats, Floats, Floats]:
    """Times of the period from its begin to its end, s, and from each to the next one the GPUs held and those waited for."""
    changes: list[tuple[float, int, int]] = [(begin_s, 0, 0), (end_s, 0, 0)]
    for run in runs:
        start_s = end_s if run.start_s is None else run.start_s
        changes += [(run.ready_s, 0, run.gpus), (start_s, run.gpus, -run.gpus)]
        if run.end_s is not None and run.start_s is not None:
            changes.append((max(run.end_s, start_s), -run.gpus, 0))
    changes.sort()
    times = np.clip(np.array([time_s for time_s, _, _ in changes], dtype=float), begin_s, end_s)
    held, waited = (np.cumsum([change[at] for change in changes])[:-1] for at in (1, 2))
    return times, held.astype(float), np.maximum(waited, 0).astype(float)


def _means(times: Floats, held: Floats, waited: Floats) -> Levels:
    edges = np.linspace(times[0], times[-1], PARTS + 1)

    def means(level: Floats) -> tuple[float, ...]:
        sums = np.concatenate([[0.0], np.cumsum(level * np.diff(times))])
        found = np.diff(np.interp(edges, times, sums)) / (edges[1] - edges[0])
        return tuple(np.round(found, 2).tolist())

    return Levels(tuple(((edges[1:] + edges[:-1]) / 2).tolist()), means(held), means(waited))
