"""`penstock observe`: how a site's GPUs were used, and what Penstock would have made of it. It changes nothing."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, local_time, print_table
from penstock_scheduler.cli.options import TO, span_s, split
from penstock_scheduler.people.errors import ConfigError

if TYPE_CHECKING:
    from penstock_slurm.history.reading import History, StepUse
    from penstock_slurm.history.what_if import Case
    from penstock_slurm.history.words import Table

DAYS = 14


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
    used: bool = typer.Option(
        False, "--used", help="Show how much of their CPUs and memory the jobs used. sacct takes longer."
    ),
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
    html: Path | None = typer.Option(
        None, metavar="FILE", help="Write a page for a browser, with a picture of the GPUs over the period."
    ),
    conf: Path | None = typer.Option(None, help="slurm.conf, if it is not Slurm's default."),
    as_json: bool = JSON,
) -> None:
    """Show from Slurm's accounting how the GPUs were used: held, idle, waits, ends, users. It changes nothing.

    It needs no penstockd and no root: any user to whom sacct shows all jobs. It runs sacct and scontrol show, and nothing else.

    Examples: penstock observe; penstock observe --from 2026-11-01 --partition gpu --what-if;
    penstock observe --prometheus http://prometheus:9090
    """
    from penstock_slurm.history import page, words
    from penstock_slurm.history.figures import report  # NumPy takes long to load
    from penstock_slurm.history.gpu_use import Prometheus
    from penstock_slurm.history.reading import read_history

    if html is not None and not (html.parent.is_dir() and os.access(html.parent, os.W_OK)):
        raise ConfigError(f"--html={html}: {html.parent} is no folder that you may write to")
    source = None if prometheus is None else Prometheus(prometheus, gpu_metric, step)
    begin_s, end_s = _period(from_, to)
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
    found = report(history, use, step, _used(history, conf, partition) if used else {})
    if not as_json:
        typer.echo(words.period(found))
        _print([*words.overview(found), *words.summary(found), *words.details(found)])
    cases, simulated = _simulated(history, jobs) if what_if else ([], [])
    if simulated and not as_json:
        typer.echo("")
        _print(simulated)
    if html is not None:
        page.write(html, found, simulated)
        typer.echo(f"penstock: wrote {html}", err=True)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"what_if": [asdict(case) for case in cases]}))


def _period(from_: str | None, to: str | None) -> tuple[float, float]:
    """Its begin and its end, s since 1970. Raises ConfigError."""
    begin_s, end_s = span_s(from_, to)
    end_s = time.time() if end_s is None else min(end_s, time.time())
    begin_s = end_s - DAYS * 86_400 if begin_s is None else begin_s
    if begin_s >= end_s:
        raise ConfigError(f"--from={from_} is in the future")
    return begin_s, end_s


def _used(history: History, conf: Path | None, partition: str) -> Mapping[str, StepUse]:
    """The CPU time and memory that the jobs of a history used."""
    from penstock_slurm.history.reading import read_used

    typer.echo("penstock: reading the steps of the jobs ...", err=True)
    found = read_used(conf, history.begin_s, history.end_s, split(partition))
    if not found:
        typer.echo("penstock: Slurm samples no use of CPUs and memory: see JobAcctGatherType in slurm.conf", err=True)
    return found


def _simulated(history: History, most: int) -> tuple[list[Case], list[str | Table]]:
    """At most so many of the jobs, simulated again, and that in words."""
    from penstock_slurm.history import what_if, words  # the simulator takes seconds to load

    chosen, began_s, too_large = what_if.jobs_of(history, most)
    came = sum(job.counts for job in chosen)
    cases = []
    if came:
        told = what_if.what_if(
            history, chosen, began_s, lambda text: typer.echo(f"penstock: simulating: {text} ...", err=True)
        )
        cases = [what_if.recorded(chosen), *told]
    if too_large:
        jobs = words.count(too_large, "job")
        typer.echo(f"penstock: not simulated: {jobs} with more GPUs than the partition has now", err=True)
    return cases, [*words.of_cases(cases, came, began_s, what_if.ASSUMPTIONS)]


def _print(blocks: Iterable[str | Table]) -> None:
    last: str | Table = ""
    for block in blocks:
        if not isinstance(block, str):
            typer.echo("")
            print_table(block.columns, block.rows, block.empty)
        else:
            typer.echo(block if isinstance(last, str) else f"\n{block}")
        last = block
