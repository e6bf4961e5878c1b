"""`penstock simulate workload`: make, check and show workloads for the simulator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from penstock_scheduler.model.nodespec import parse_nodes
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.people.units import duration
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.truth import Truth, TruthSettings, advance, packed
from penstock_scheduler.simulator.workloads import (
    FORMATS,
    GeneratorSettings,
    Workload,
    WorkloadJob,
    generate,
    read_workload,
    write,
)
from penstock_scheduler.simulator.workloads.workload import WorkloadSummary, summarise

workload = typer.Typer(no_args_is_help=True, help="Workloads for the simulator: import, generate, check, show.")

TraceName = StrEnum("TraceName", {name: name for name in FORMATS})  # type: ignore[misc]


class Like(StrEnum):
    """Published clusters that a generated workload can resemble."""

    PHILLY = "philly"
    HELIOS = "helios"


_FORMAT = typer.Option(None, "--format", help="Format of FILE. Default: detected from its first line.")
_TYPES = typer.Option("", "--gpu-types", help="GPU types that the catalogue lacks, such as mi50,k40.")
_CLUSTER = typer.Option(
    "", help="The cluster, such as t4:6x4,a100:2x8. Its GPU types are known, and load is relative to it."
)
_PROFILES = typer.Option(None, help="Folder of measured tables, for the models of the workload.")
_OUT = typer.Option(..., "--out", "-o", help="File to write: JSON if its name ends in .json, else CSV.")


@workload.command("import")
def import_(
    file: Path | None = typer.Argument(None, help="A published trace, plain or gzip; see docs/admin/workloads.md."),
    out: Path = _OUT,
    sacct: Path | None = typer.Option(None, help="Output of `sacct --parsable2`, instead of FILE."),
    trace: TraceName | None = _FORMAT,
    gpu_types: str = _TYPES,
    begin_h: float = typer.Option(0.0, min=0, help="Leave out jobs submitted before this hour."),
    hours: float | None = typer.Option(None, min=0, help="Keep jobs submitted within this many hours from there."),
) -> None:
    """Convert a trace or a site's history into a workload."""
    if (file is None) == (sacct is None):
        raise typer.BadParameter("give one of FILE and --sacct FILE")
    source = sacct if sacct is not None else file
    assert source is not None, "one of them is given"
    found = read_workload(source, "sacct" if sacct is not None else trace, _split(gpu_types))
    if begin_h or hours is not None:
        found = found.window(begin_h * 3600, float("inf") if hours is None else hours * 3600)
    _write(found, out)


@workload.command("generate")
def generate_(
    out: Path = _OUT,
    jobs: int = typer.Option(160, help="Number of jobs."),
    rate: float = typer.Option(20.0, help="Mean number of jobs per hour."),
    like: Like = typer.Option(Like.PHILLY, help="Published cluster that gives the sizes and durations of jobs."),
    cv: float = typer.Option(1.0, help="Burstiness of arrivals: 1 is Poisson; with more, jobs come in bursts (gamma)."),
    models: bool = typer.Option(False, help="Adaptive trainings of known models instead of rigid jobs."),
    max_gpus: int = typer.Option(64, help="Maximum number of GPUs that a job asks for."),
    max_hours: float = typer.Option(float("inf"), help="Maximum duration."),
    users: int = typer.Option(10, help="Number of users."),
    seed: int = typer.Option(0, help="Random seed. The same seed gives the same workload."),
) -> None:
    """Generate a workload from the statistics of a published cluster."""
    settings = GeneratorSettings(jobs, rate, like.value, cv, max_gpus, max_hours * 3600, models, users, seed)
    _write(generate(settings), out)


@workload.command()
def check(
    file: Path = typer.Argument(help="A workload, or a trace."),
    trace: TraceName | None = _FORMAT,
    gpu_types: str = _TYPES,
    cluster: str = _CLUSTER,
    profiles: Path | None = _PROFILES,
) -> None:
    """Check a workload before anything runs. Exit status 0: it is valid; 1: the output lists the problems."""
    found = read_workload(file, trace, [*_split(gpu_types), *_node_gpus(cluster)])
    if cluster or profiles is not None:
        _truth(found, cluster, profiles).check(found)
    typer.echo(f"{file}: {len(found.jobs)} jobs, nothing wrong" + _left_out(dict(found.left_out)))


@workload.command()
def show(
    file: Path = typer.Argument(help="A workload, or a trace."),
    trace: TraceName | None = _FORMAT,
    gpu_types: str = _TYPES,
    cluster: str = _CLUSTER,
    profiles: Path | None = _PROFILES,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show what is in a workload: jobs, span, GPUs, durations, load."""
    found = read_workload(file, trace, [*_split(gpu_types), *_node_gpus(cluster)])
    truth = _truth(found, cluster, profiles)
    node_gpus = _node_gpus(cluster)

    def duration_s(job: WorkloadJob) -> float | None:
        return job.duration_s if job.duration_s is not None else _as_requested_s(job, truth, node_gpus)

    summary = summarise(found, duration_s if cluster else None)
    gpus = sum(node.gpus for node in parse_nodes(cluster)) if cluster else None
    if as_json:
        load = None if gpus is None else summary.load_gpus / gpus
        typer.echo(json.dumps(asdict(summary) | {"load_gpus": summary.load_gpus, "load": load}))
    else:
        Console().print(_table(found, summary, gpus))


def _as_requested_s(job: WorkloadJob, truth: Truth, node_gpus: dict[str, int]) -> float | None:
    """Seconds that a training takes on the GPUs that its user asked for, of the first type on which it can run."""
    known = truth.of(job)
    for gpu_type, size in node_gpus.items():
        shape = packed(job.gpus, size)
        batch = known.batch(gpu_type, shape, job.batch_size)
        if known.rates(gpu_type, shape, batch)[0] > 0:
            return advance(known, gpu_type, shape, batch, 0.0, float("inf"))[1]
    return None


def _table(found: Workload, summary: WorkloadSummary, gpus: int | None) -> Table:
    table = Table(title=found.name, box=None, show_header=False, title_justify="left", pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    hours = summary.span_s / 3600
    table.add_row("jobs", f"{summary.jobs} of {summary.users} users" + _left_out(summary.left_out))
    table.add_row("arrive", f"within {hours:.1f} h" + (f", {summary.jobs / hours:.1f} per hour" if hours else ""))
    table.add_row("GPUs asked for", ", ".join(f"{size}: {count}" for size, count in summary.sizes.items()))
    if summary.models:
        table.add_row("models", ", ".join(f"{model}: {count}" for model, count in summary.models.items()))
    if summary.durations_s:
        what = "" if summary.timed == summary.jobs else f" ({summary.timed} jobs)"
        words = [f"p{part} {duration(seconds)}" for part, seconds in summary.durations_s.items()]
        table.add_row("durations" + what, ", ".join(words).replace("p100", "longest"))
        load = f"{summary.gpu_hours:.0f} GPU-h, which keep {summary.load_gpus:.1f} GPUs busy while jobs arrive"
        table.add_row("load", load + (f": {summary.load_gpus / gpus:.0%} of {gpus}" if gpus else ""))
    else:
        table.add_row("durations", "depend on the cluster; give it with --cluster")
    if found.source:
        table.add_row("source", found.source)
    return table


def _left_out(reasons: Mapping[str, int]) -> str:
    return "".join(f"; {count} {why} left out" for why, count in reasons.items())


def _truth(found: Workload, cluster: str, profiles: Path | None) -> Truth:
    node_gpus = _node_gpus(cluster)
    types = tuple(node_gpus) or tuple(sorted({job.gpu_type for job in found.jobs if job.gpu_type})) or ("t4",)
    tables = Profiles(profiles) if profiles is not None else None
    return Truth(types, tables, settings=TruthSettings(node_gpus=node_gpus))


def _node_gpus(cluster: str) -> dict[str, int]:
    """GPU type -> GPUs of its largest node."""
    sizes: dict[str, int] = {}
    for node in parse_nodes(cluster) if cluster else ():
        sizes[node.gpu_type] = max(node.gpus, sizes.get(node.gpu_type, 0))
    return sizes


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _write(found: Workload, out: Path) -> None:
    try:
        write(found, out)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another file with --out") from None
    typer.echo(f"{out}: {len(found.jobs)} jobs" + _left_out(dict(found.left_out)))
