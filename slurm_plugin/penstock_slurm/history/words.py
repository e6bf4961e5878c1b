"""The figures of a history in words and tables, for the terminal and the page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_scheduler.cli.ask import local_time
from penstock_scheduler.people.units import duration

if TYPE_CHECKING:  # they take seconds to load
    from penstock_slurm.history.figures import Group, HistoryFigures, UseFigures
    from penstock_slurm.history.what_if import Case

MOST_LINES = 10
"""Users, accounts, partitions and idle jobs that are shown; JSON has all."""

SEEN_WELL = 0.98
"""Share of the GPU-hours held that Prometheus has usually seen: it misses the first seconds of a job."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below the names of the columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    empty: str = ""
    """A sentence in place of a table without rows."""


def summary(found: HistoryFigures) -> Iterator[str]:
    """The figures in a few sentences."""
    all_h = sum(each.gpus for each in found.types) * (found.end_s - found.begin_s) / 3600
    idle, wasted, use = found.idle_gpu_h, found.idle_while_waiting_gpu_h, found.use
    yield f"GPUs were idle for {idle:.1f} GPU-hours ({share(idle, all_h)}): no job held them."
    yield f"In {wasted:.1f} of them ({share(wasted, all_h)}), jobs waited that asked for as many GPUs."
    if use is not None:
        yield (
            f"The GPUs were busy for {use.busy_gpu_h:.1f} of the {use.seen_gpu_h:.1f} GPU-hours that Prometheus has seen "
            f"({share(use.busy_gpu_h, use.seen_gpu_h)}), and at 0 % for {use.idle_gpu_h:.1f}."
        )


def period(found: HistoryFigures) -> str:
    """The period and its jobs."""
    span = f"{local_time(found.begin_s)} to {local_time(found.end_s)}"
    return f"{span}: {count(found.jobs, 'GPU job')} of {count(found.users, 'user')}"


def overview(found: HistoryFigures) -> Iterator[str | Table]:
    """The GPUs and the hours for which jobs held them."""
    hours = (found.end_s - found.begin_s) / 3600
    if found.left_out:
        left_out = ", ".join(f"{number} {reason}" for reason, number in sorted(found.left_out.items()))
        yield f"Not counted: {left_out}."
    rows = [
        (
            each.gpu_type or "unknown",
            str(each.gpus),
            f"{each.held_gpu_h:.1f}",
            share(each.held_gpu_h, each.gpus * hours),
        )
        for each in found.types
    ]
    yield Table(("GPU TYPE", "GPUS NOW", "GPU-HOURS HELD", "OF ALL"), rows, "Slurm shows no node with GPUs.")


def details(found: HistoryFigures) -> Iterator[str | Table]:
    """The causes of waits, the jobs that left their GPUs idle, and all jobs in groups."""
    if (all_h := sum(found.waited_h.values())) > 0:
        causes = [(cause, f"{hours:.1f}", share(hours, all_h)) for cause, hours in found.waited_h.items()]
        yield Table(("WAITED FOR", "HOURS OF JOBS", "SHARE"), causes)
    if found.use is not None:
        yield from _of_use(found.use, sum(each.held_gpu_h for each in found.types))
    for title, groups in (
        ("GPUS", found.by_size),
        ("ENDED AS", found.by_end),
        ("USER", found.by_user),
        ("ACCOUNT", found.by_account),
        ("PARTITION", found.by_partition),
    ):
        yield from _of_groups(title, groups)


def _of_use(use: UseFigures, held_gpu_h: float) -> Iterator[str | Table]:
    if use.seen_gpu_h < SEEN_WELL * held_gpu_h:
        yield f"It has no samples of {held_gpu_h - use.seen_gpu_h:.1f} GPU-hours that jobs held."
    if use.implausible_jobs:
        yield (
            f"It has samples of more GPU-hours than {count(use.implausible_jobs, 'job')} held, and these do not count: name "
            "your cluster in --gpu-metric if it has metrics of several; jobs that share a GPU have the samples of both."
        )
    if not use.idle_jobs:
        return
    yield "Jobs whose GPUs were at 0 % for at least half of their time:"
    rows = [
        (job.job_id, job.user, job.state, str(job.gpus), f"{job.gpu_h:.1f}", f"{job.idle_gpu_h:.1f}", f"{job.busy:.0%}")
        for job in use.idle_jobs[:MOST_LINES]
    ]
    yield Table(("JOB", "USER", "STATE", "GPUS", "GPU-HOURS", "AT 0 %", "BUSY"), rows)
    yield from _and_more(len(use.idle_jobs))


def _of_groups(title: str, groups: Sequence[Group]) -> Iterator[str | Table]:
    total = sum(group.gpu_h for group in groups)
    columns = {
        title: [group.name or "-" for group in groups],
        "JOBS": [str(group.jobs) for group in groups],
        "GPU-HOURS": [f"{group.gpu_h:.1f}" for group in groups],
        "SHARE": [share(group.gpu_h, total) for group in groups],
        "MEDIAN WAIT": [_or_dash(group.wait_s, duration) for group in groups],
        "9 OF 10 WAIT": [_or_dash(group.long_wait_s, duration) for group in groups],
        "LIMIT USED": [_or_dash(group.limit_used, percent) for group in groups],
        "BUSY": [_or_dash(group.busy, percent) for group in groups],
        "CPUS USED": [_or_dash(group.cpu_used, percent) for group in groups],
        "MEMORY USED": [_or_dash(group.memory_used, percent) for group in groups],
    }
    asked_for = ("BUSY", "CPUS USED", "MEMORY USED")
    shown = {name: cells for name, cells in columns.items() if name not in asked_for or set(cells) != {"-"}}
    rows = [*zip(*shown.values(), strict=True)]
    if rows:
        yield Table((*shown,), rows[:MOST_LINES])
    yield from _and_more(len(groups))


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def _and_more(number: int) -> Iterator[str]:
    if number > MOST_LINES:
        yield f"... and {number - MOST_LINES} more; --json has all."


def of_cases(cases: Sequence[Case], jobs: int, began_s: float, assumptions: Sequence[str]) -> Iterator[str | Table]:
    """The simulations of the same jobs.

    Args:
        cases: of them; none if no job could be simulated.
        jobs: how many were.
        began_s: when the first one came.
        assumptions: sentences.
    """
    if not cases:
        yield "No job came and ended in this time: there is nothing to simulate."
        return
    yield f"The newest {count(jobs, 'job')}, from {local_time(began_s)} on, simulated again:"
    rows = [
        (case.name, _range(case.completion_h), _range(case.median_completion_h), _range(case.wait_h)) for case in cases
    ]
    yield Table(("CASE", "MEAN TIME TO THE END", "MEDIAN", "MEAN WAIT"), rows)
    yield "Elastic: of so many users, Penstock chooses the number of GPUs of each job. A range is that of several draws."
    yield "The simulation assumes:\n" + "\n".join(f"- {text}" for text in assumptions)


def count(number: int, thing: str) -> str:
    """A number of things, with the plural where it is one."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def percent(value: float) -> str:
    """A share in percent."""
    return f"{value:.0%}"


def share(part: float, whole: float) -> str:
    """A share in percent, or a dash."""
    return percent(part / whole) if whole > 0 else "-"


def _range(hours: tuple[float, float]) -> str:
    least, most = (duration(each * 3600) for each in hours)
    return least if least == most else f"{least} to {most}"
