"""`penstock observe`: how a site's GPUs were used, and what Penstock would have made of it. It changes nothing."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, local_time, print_table
from penstock_scheduler.cli.options import TO, span_s, split
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.people.units import duration

if TYPE_CHECKING:
    from penstock_slurm.history.figures import Group, HistoryFigures, UseFigures
    from penstock_slurm.history.what_if import Case

DAYS = 14
MOST_LINES = 10
"""Users, accounts, partitions and idle jobs that are shown; JSON has all."""

SEEN_WELL = 0.98
"""Share of the GPU-hours held that Prometheus has usually seen: it misses the first seconds of a job."""


def observe(
    from_: str | None = typer.Option(
        None,
        "--from",
        metavar="TIME",
        help=f"The first time that counts, such as 2026-11-01; by default {DAYS} days before --to.",
    ),
    to: str | None = TO,
    partition: str = typer.Option("", help="Only these partitions, separated by commas."),
    what_if: bool = typer.Option(
        False, "--what-if", help="Simulate the jobs again, under Slurm's backfill and under Penstock."
    ),
    jobs: int = typer.Option(300, min=1, help="With --what-if: the most jobs; the newest ones count."),
    prometheus: str | None = typer.Option(
        None, metavar="URL", help="Ask this Prometheus how busy the jobs' GPUs were, such as http://prometheus:9090."
    ),
    gpu_metric: str | None = typer.Option(
        None,
        metavar="METRIC:LABEL",
        help="With --prometheus: the metric of GPU utilisation in percent, and the label that has the job's number. "
        "By default, those of dcgm-exporter, of jobstats' exporter and of slurm-job-exporter are looked for.",
    ),
    step: int = typer.Option(300, min=1, help="With --prometheus: seconds between two looks at a GPU."),
    conf: Path | None = typer.Option(None, help="slurm.conf, if it is not Slurm's default."),
    as_json: bool = JSON,
) -> None:
    """Show from Slurm's accounting how the GPUs were used: held, idle, waits, ends, users. It changes nothing.

    It needs no penstockd and no root: any user to whom sacct shows all jobs. It runs sacct and scontrol show, and nothing else.

    Examples: penstock observe; penstock observe --from 2026-11-01 --partition gpu --what-if;
    penstock observe --prometheus http://prometheus:9090
    """
    from penstock_slurm.history.figures import report  # NumPy takes long to load
    from penstock_slurm.history.gpu_use import Prometheus
    from penstock_slurm.history.reading import read_history

    source = None if prometheus is None else Prometheus(prometheus, gpu_metric, step)
    begin_s, end_s = span_s(from_, to)
    end_s = time.time() if end_s is None else min(end_s, time.time())
    begin_s = end_s - DAYS * 86_400 if begin_s is None else begin_s
    if begin_s >= end_s:
        raise ConfigError(f"--from={from_} is in the future")
    typer.echo(f"penstock: reading sacct from {local_time(begin_s)} to {local_time(end_s)} ...", err=True)
    history = read_history(conf, begin_s, end_s, split(partition))
    if os.getuid() != 0 and {run.user for run in history.runs} == {getpass.getuser()}:
        typer.echo(
            "penstock: all of these jobs are yours: Slurm may hide those of others from you (PrivateData)", err=True
        )
    use = None
    if source is not None:
        typer.echo("penstock: asking Prometheus ...", err=True)
        use = source.use({run.job_id for run in history.runs}, begin_s, end_s)
    found = report(history, use, step)
    cases: list[Case] = []
    if not as_json:
        _show(found)
    if what_if:
        from penstock_slurm.history import what_if as replayed  # the simulator takes seconds to load

        chosen, began_s, too_large = replayed.jobs_of(history, jobs)
        came = sum(job.counts for job in chosen)
        if came:
            cases = [replayed.recorded(chosen)]
            told = replayed.what_if(
                history, chosen, began_s, lambda text: typer.echo(f"penstock: simulating: {text} ...", err=True)
            )
            cases.extend(told)
        if too_large:
            typer.echo(
                f"penstock: not simulated: {_count(too_large, 'job')} with more GPUs than the partition has now",
                err=True,
            )
        if not as_json:
            _show_cases(cases, came, began_s, replayed.ASSUMPTIONS)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"what_if": [asdict(case) for case in cases]}))


def _show(found: HistoryFigures) -> None:
    hours = (found.end_s - found.begin_s) / 3600
    span = f"{local_time(found.begin_s)} to {local_time(found.end_s)}"
    typer.echo(f"{span}: {_count(found.jobs, 'GPU job')} of {_count(found.users, 'user')}")
    if found.left_out:
        typer.echo(
            "Not counted: " + ", ".join(f"{count} {reason}" for reason, count in sorted(found.left_out.items())) + "."
        )
    typer.echo("")
    rows = [
        (
            each.gpu_type or "unknown",
            str(each.gpus),
            f"{each.held_gpu_h:.1f}",
            _share(each.held_gpu_h, each.gpus * hours),
        )
        for each in found.types
    ]
    print_table(("GPU TYPE", "GPUS NOW", "GPU-HOURS HELD", "OF ALL"), rows, "Slurm shows no node with GPUs.")
    all_h = sum(each.gpus for each in found.types) * hours
    idle, wasted = found.idle_gpu_h, found.idle_while_waiting_gpu_h
    typer.echo(f"\nNo job held {idle:.1f} GPU-hours ({_share(idle, all_h)}).")
    typer.echo(f"In {wasted:.1f} of them ({_share(wasted, all_h)}), jobs waited that asked for as many GPUs.")
    if found.use is not None:
        _show_use(found.use, sum(each.held_gpu_h for each in found.types))
    for title, groups in (
        ("GPUS", found.by_size),
        ("ENDED AS", found.by_end),
        ("USER", found.by_user),
        ("ACCOUNT", found.by_account),
        ("PARTITION", found.by_partition),
    ):
        _show_groups(title, groups, with_use=found.use is not None)


def _show_use(use: UseFigures, held_gpu_h: float) -> None:
    typer.echo(
        f"\nThe GPUs were busy for {use.busy_gpu_h:.1f} of the {use.seen_gpu_h:.1f} GPU-hours that Prometheus has seen "
        f"({_share(use.busy_gpu_h, use.seen_gpu_h)}), and at 0 % for {use.idle_gpu_h:.1f}."
    )
    if use.seen_gpu_h < SEEN_WELL * held_gpu_h:
        typer.echo(f"It has no samples of {held_gpu_h - use.seen_gpu_h:.1f} GPU-hours that jobs held.")
    if use.implausible_jobs:
        typer.echo(
            f"It has samples of more GPU-hours than {_count(use.implausible_jobs, 'job')} held, and these do not count: name "
            "your cluster in --gpu-metric if it has metrics of several; jobs that share a GPU have the samples of both."
        )
    if not use.idle_jobs:
        return
    typer.echo("\nJobs whose GPUs were at 0 % for at least half of their time:\n")
    rows = [
        (job.job_id, job.user, job.state, str(job.gpus), f"{job.gpu_h:.1f}", f"{job.idle_gpu_h:.1f}", f"{job.busy:.0%}")
        for job in use.idle_jobs[:MOST_LINES]
    ]
    print_table(("JOB", "USER", "STATE", "GPUS", "GPU-HOURS", "AT 0 %", "BUSY"), rows, "")
    if len(use.idle_jobs) > MOST_LINES:
        typer.echo(f"... and {len(use.idle_jobs) - MOST_LINES} more; --json has all.")


def _show_groups(title: str, groups: Sequence[Group], *, with_use: bool) -> None:
    total = sum(group.gpu_h for group in groups)
    rows = [
        (
            group.name or "-",
            str(group.jobs),
            f"{group.gpu_h:.1f}",
            _share(group.gpu_h, total),
            "-" if group.wait_s is None else duration(group.wait_s),
            "-" if group.long_wait_s is None else duration(group.long_wait_s),
            "-" if group.limit_used is None else f"{group.limit_used:.0%}",
            *(["-" if group.busy is None else f"{group.busy:.0%}"] if with_use else []),
        )
        for group in groups[:MOST_LINES]
    ]
    if rows:
        typer.echo("")
        columns = ("JOBS", "GPU-HOURS", "SHARE", "MEDIAN WAIT", "9 OF 10 WAIT", "LIMIT USED")
        print_table((title, *columns, *(["BUSY"] if with_use else [])), rows, "")
    if len(groups) > MOST_LINES:
        typer.echo(f"... and {len(groups) - MOST_LINES} more; --json has all.")


def _show_cases(cases: Sequence[Case], jobs: int, began_s: float, assumptions: Sequence[str]) -> None:
    if not cases:
        typer.echo("\nNo job came and ended in this time: there is nothing to simulate.")
        return
    typer.echo(f"\nThe newest {_count(jobs, 'job')}, from {local_time(began_s)} on, simulated again:\n")
    rows = [
        (case.name, _range(case.completion_h), _range(case.median_completion_h), _range(case.wait_h)) for case in cases
    ]
    print_table(("CASE", "MEAN TIME TO THE END", "MEDIAN", "MEAN WAIT"), rows, "")
    typer.echo(
        "\nElastic: of so many users, Penstock chooses the number of GPUs of each job. A range is that of several draws."
    )
    typer.echo("The simulation assumes:")
    for text in assumptions:
        typer.echo(f"- {text}")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _range(hours: tuple[float, float]) -> str:
    least, most = (duration(each * 3600) for each in hours)
    return least if least == most else f"{least} to {most}"
