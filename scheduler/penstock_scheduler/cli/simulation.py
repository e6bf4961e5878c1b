"""What `penstock simulate run` does; `penstock simulate whatif` uses parts of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock_profiles.profiles import ProfileError
from penstock_profiles.sensitivity import SensitivityProfile, SensitivityStore
from penstock_scheduler.cli.options import numbers, split
from penstock_scheduler.cli.policies import choices_of
from penstock_scheduler.cli.sharing import SharingOptions, shared_by
from penstock_scheduler.cli.simulated_cloud import cloud_of
from penstock_scheduler.model.nodespec import SpecError
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.cloud import CloudSpec
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.figures import figures
from penstock_scheduler.simulator.frontier import (
    BUDGETS,
    WAYS,
    Point,
    Way,
    frontier_document,
    frontier_page,
)
from penstock_scheduler.simulator.frontier import frontier as points_of
from penstock_scheduler.simulator.page import render
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.results import SeedResult, over_seeds, parquet_is_there, simulate_each, to_result
from penstock_scheduler.simulator.run import Driving, Scenario, Simulation, driving_of, prepare
from penstock_scheduler.simulator.workloads import read_workload

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in a shell."""


def run(
    *,
    cluster: str,
    workload: Path,
    policy: str | None,
    stages: Sequence[str],
    profiles: Path | None,
    seeds: int,
    out: Path | None,
    config: Path | None,
    trace: str | None,
    sensitivities: Path | None,
    gpu_types: str,
    gpu_speeds: str,
    prices: str,
    disturb: str,
    unprofiled: bool,
    pairs: Path | None,
    pair_types: str,
    draw_kinds: bool,
    agents: str,
    assume_utilisation: float | None,
    parquet: bool,
    cloud: str,
    frontier: bool,
    as_json: bool,
) -> None:
    """Run the command; `simulate.simulate_command` describes the options."""
    nodes = nodes_from_spec(_cluster_spec(cluster))
    types = tuple(dict.fromkeys(node.gpu_type for node in nodes))
    found = read_workload(workload, trace, [*split(gpu_types), *types])
    if frontier and not cloud:
        raise ConfigError("--frontier compares waiting budgets before the cloud; add --cloud usd_per_gpu_h=2.5")
    away = cloud_of(cloud, config, found, nodes) if cloud else None
    policies = choices_of(policy, stages, config)
    tables = Profiles(profiles) if profiles is not None else None
    speeds, costs = numbers("--gpu-speeds", gpu_speeds) or None, numbers("--prices", prices) or None
    shares = _sensitivities(sensitivities) if sensitivities is not None else None
    disturbed = _disturbances(disturb)
    shared = shared_by(policies, SharingOptions(pairs, pair_types, draw_kinds, agents, assume_utilisation), types)
    tables_as = _parquet() if parquet else "csv"

    def scenario(seed: int) -> Scenario:
        return prepare(nodes, found, tables, gpu_speeds=speeds, disturbances=disturbed, sensitivities=shares, seed=seed)

    scenario(0).check()
    if away is not None and frontier:
        named = policy is not None or config is not None
        ways = [Way(f"{choice}, {away.settings.wait}", choice) for choice in policies] if named else WAYS
        _frontier(scenario(0), ways, away, out, as_json=as_json)
        return
    notes = ["Simulated, not run."]
    if away is not None:
        notes.append(
            f"Behind the site: {away.gpu_type} at ${away.usd_per_gpu_h:g} a GPU-hour, {away.settings.wait} with "
            f"P = {away.settings.waiting_budget_percent:g} %."
        )
    if shared is not None:
        shared.check(found, "name them in the workload's column `kind`, or ")
        notes += shared.notes(found)
    if out is not None:
        make_folder(out)

    def driving(policy: PolicyChoice) -> Driving:
        found = driving_of(policy)
        if unprofiled and found.learner == "fitted":  # the artifact has learners of its own
            return dataclasses.replace(found, learner="unprofiled")
        return found

    done = itertools.count()
    with progress(len(found.jobs) * len(policies) * seeds, quiet=as_json) as show:
        results = simulate_each(
            ((scenario(seed), choice, seed) for seed, choice in itertools.product(range(seeds), policies)),
            prices=costs,
            driving=driving,
            agents=lambda policy, seed: None if shared is None else shared.agents(policy, found, seed),
            on_tick=lambda policy, seed: show(f"{policy}, seed {seed}", next(done)),
            cloud=away,
        )
    document = over_seeds(results, cluster=_cluster_spec(cluster), workload=found.name) | {"notes": notes}
    tell(results, document, out, as_json=as_json, tables_as=tables_as, aloud=notes[1:])


NO_TERMINAL = 120
"""Width of the table without a terminal."""


def tell(
    results: list[SeedResult],
    document: Mapping[str, Any],
    out: Path | None,
    *,
    as_json: bool,
    tables_as: str = "csv",
    aloud: Iterable[str] = (),
) -> None:
    """Write and print the results. The sentences of `aloud` go to standard error.

    Raises:
        ConfigError: a file cannot be written.
        Exit: after Ctrl-C.
    """
    written = write(out, results, document, tables_as) if out is not None else ""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show_table(document)
        if written:
            typer.echo(written)
    for words in aloud:
        typer.echo(words, err=True)
    if any(result.simulation.interrupted for result in results):
        typer.echo("stopped: the figures show what was simulated until then", err=True)
        raise typer.Exit(INTERRUPTED)


def show_table(document: Mapping[str, Any]) -> None:
    """Print the figures of a summary."""
    console = Console()
    if not console.is_terminal:  # its width is unknown, and the default of 80 columns cuts headings off
        console.width = max(console.width, NO_TERMINAL)
    console.print(_table(document))


def _frontier(scenario: Scenario, ways: Sequence[Way], cloud: CloudSpec, out: Path | None, *, as_json: bool) -> None:
    """Compare cloud cost with completion time for every waiting budget. Raises ConfigError."""
    if out is not None:
        make_folder(out)
    with progress(len(scenario.workload.jobs) * len(ways) * len(BUDGETS), quiet=as_json) as show:
        done = itertools.count(1)
        ticks = [show("P = 0 %", 0)]

        def on_point(point: Point) -> None:
            ticks[0] = show(point.way, next(done))

        points = points_of(scenario, ways, cloud, on_point=on_point, on_tick=lambda simulation: ticks[0](simulation))
    if not points:
        raise typer.Exit(INTERRUPTED)
    nodes, workload, price = scenario.nodes, scenario.workload, cloud.usd_per_gpu_h
    cluster = f"{len(nodes)} nodes with {scenario.total_gpus} GPUs"
    document = frontier_document(points, workload.name, cluster, price)
    if out is not None:
        page = frontier_page(points, f"{workload.name} on {cluster}, ${price:g} a GPU-hour in the cloud")
        try:
            (out / "frontier.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            (out / "frontier.html").write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{out}: {error.strerror}; name another folder with --out") from None
    if as_json:
        typer.echo(json.dumps(document))
        return
    table = Table(title=f"{workload.name} on {cluster}", title_justify="left", box=None, pad_edge=False)
    table.add_column("way to wait", style="bold", no_wrap=True)
    for head in ("P", "cloud $", "cloud GPU-h", "average h", "p99 wait h", "jobs away", "utilisation"):
        table.add_column(head, justify="right")
    for p in points:
        figures = (f"{p.percent:g} %", f"{p.usd:,.2f}", f"{p.gpu_h:,.1f}", f"{p.avg_jct_h:.3f}", f"{p.p99_wait_h:.2f}")
        table.add_row(p.way, *figures, str(p.cloud_jobs), f"{p.utilization:.1%}")
    Console().print(table)
    if out is not None:
        typer.echo(f"{out}: frontier.html and frontier.json")


def _cluster_spec(cluster: str) -> str:
    """The spec itself, or the parts in a file of that name: one part a line, comments begin with #. Raises
    ConfigError."""
    file = Path(cluster)
    if ":" in cluster and not file.is_file():
        return cluster
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"--cluster={cluster!r} is neither a spec such as t4:6x4,a100:2x8 nor a file: {why}"
        ) from None
    parts = []
    for number, line in enumerate(lines, start=1):
        if part := line.partition("#")[0].strip().strip(","):
            try:
                nodes_from_spec(part)
            except SpecError as error:
                raise ConfigError(f"{cluster}, line {number}: {error}") from None
            parts.append(part)
    if not parts:
        raise ConfigError(f"{cluster} names no node; write one part a line, such as t4:6x4")
    return ",".join(parts)


def _sensitivities(folder: Path) -> dict[str, SensitivityProfile]:
    """The profiles in a folder. Raises ConfigError."""
    try:
        found = SensitivityStore(folder).load()
    except ProfileError as error:
        raise ConfigError(f"--sensitivities: {error}") from None
    if not found:
        raise ConfigError(
            f"--sensitivities={folder} has no profile; give a folder of MODEL.json, see docs/admin/synergy.md"
        )
    return found


def _disturbances(text: str) -> Disturbances:
    given = numbers("--disturb", text)
    known = {field.name for field in dataclasses.fields(Disturbances)} - {"seed"}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"--disturb: unknown {unknown[0]!r}; the faults are {', '.join(sorted(known))}")
    return Disturbances(**given)  # type: ignore[arg-type]


def _parquet() -> str:
    """The format of tables with --parquet. Raises ConfigError: pyarrow is not installed."""
    if not parquet_is_there():
        raise ConfigError("--parquet needs pyarrow: pip install pyarrow, or leave it out for CSV")
    return "parquet"


def make_folder(out: Path) -> None:
    """Make the folder of `--out`. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another folder with --out") from None


def write(out: Path, results: list[SeedResult], document: Mapping[str, Any], tables_as: str) -> str:
    """Write report, tables and summary into a folder, and describe them. Raises ConfigError."""
    try:
        (out / "summary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (out / "report.html").write_text(render(figures(results, document), document), encoding="utf-8")
        to_result(results).write(out, tables_as)
        return f"{out}: report.html, summary.json, jobs.{tables_as} and rounds.{tables_as}"
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another folder with --out") from None


@contextlib.contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[str, int], Callable[[Simulation], None]]]:
    """A progress bar of ended jobs on standard error. Yields a function that makes the `on_tick` of each simulation."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as shown:
        bar = shown.add_task("", total=total)

        def show(label: str, before: int) -> Callable[[Simulation], None]:
            shown.update(bar, description=label)

            def on_tick(simulation: Simulation) -> None:
                if len(simulation.ticks) % 16 == 0:
                    ended = sum(job.finish_s is not None for job in simulation.jobs)
                    shown.update(bar, completed=before * len(simulation.jobs) + ended)

            return on_tick

        yield show


FIGURES = {
    "avg_jct_h": "average h",
    "p50_jct_h": "median h",
    "p99_jct_h": "p99 h",
    "makespan_h": "makespan h",
    "queue_h": "queue h",
    "feedback_min": "feedback min",
    "gpu_h_per_job": "GPU-h a job",
    "restarts_per_job": "restarts",
    "suspends_per_job": "suspends",
    "packs": "packs",
    "utilisation": "utilisation",
    "worst_ftf": "worst rho",
    "unfair_share": "unfair",
    "cost": "cost",
    "cloud_usd": "cloud $",
    "cloud_gpu_h": "cloud GPU-h",
    "cloud_jobs": "jobs away",
}
"""Figure -> heading in the table on the terminal."""


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{document['workload']} on {document['cluster']}", title_justify="left", box=None, pad_edge=False
    )
    policies = document["policies"]
    shown = {
        name: head for name, head in FIGURES.items() if any(p["mean"][name] is not None for p in policies.values())
    }
    table.add_column("")  # a row for each figure: as columns they do not fit into 80 characters
    for name in policies:
        table.add_column(name, justify="right", no_wrap=True)
    for key, head in shown.items():
        table.add_row(head, *(_figure(key, of["mean"][key], of["ci95"][key]) for of in policies.values()))
    return table


def _figure(name: str, mean: float | None, half: float | None) -> str:
    if mean is None:
        return "–"
    shares = ("utilisation", "unfair_share")
    text = f"{mean:.1%}" if name in shares else f"{mean:.2f}"
    return text if half is None else f"{text} ±{half:.1%}" if name in shares else f"{text} ±{half:.2f}"
