"""`penstock loopback`: a real Slurm on this machine, for experiments."""

import contextlib
import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock_loopback.cluster import LoopbackCluster
from penstock_loopback.errors import LoopbackError, NotRunning
from penstock_loopback.folder import default_folder
from penstock_scheduler.model.nodespec import DEFAULT_SPEC, SpecError

app = typer.Typer(help="A real Slurm on this machine, with GPUs that do not exist.", no_args_is_help=True)

Dir = Annotated[
    Path | None,
    typer.Option("--dir", help="The cluster's folder, which holds one cluster.  (default: a folder for each user)"),
]

BUILDS = all(map(shutil.which, ("make", "cc"))) and Path("/usr/include/slurm/spank.h").exists()
"""Whether the SPANK plugin can be built here, which sbatch's adaptive flags and the agents need."""

_PATIENCE_S = 2.0
"""A start that takes longer prints what it waits for, at this interval."""


@app.command()
def up(
    folder: Dir = None,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="Comma-separated TYPE:NODESxGPUS: t4:6x4 are 6 nodes with 4 t4 each. With CPUs and GB of each node: "
            "t4:2x4:12c:240g; Slurm then allocates memory too.",
        ),
    ] = DEFAULT_SPEC,
    accounting: Annotated[bool, typer.Option("--accounting", help="Also run slurmdbd, with its own MariaDB.")] = False,
    agents: Annotated[
        bool,
        typer.Option(
            "--agents/--no-agents",
            help="Also run a penstock-agent for each node, about 50 MB each, so that jobs can share GPUs.  (default: if "
            "the SPANK plugin can be built)",
            show_default=False,
        ),
    ] = BUILDS,
    port: Annotated[
        int | None,
        typer.Option(help="The first of the TCP ports, one for each node and two more.  (default: free ports)"),
    ] = None,
) -> None:
    """Start the cluster and wait until every node is idle."""
    with errors_shown():
        started_s = time.monotonic()
        cluster = LoopbackCluster(
            folder or default_folder(), nodes, accounting=accounting, port=port, flags=BUILDS, agents=agents
        )
        cluster.up(progress=progress_line(started_s))
        gpus = sum(node.gpus for node in cluster.nodes)
        option = "" if folder is None else f" --dir {shlex.quote(str(folder))}"
        typer.echo(
            f"{len(cluster.nodes)} nodes with {gpus} GPUs are up after {time.monotonic() - started_s:.1f} s "
            f"in {cluster.folder}\n"
            f'  eval "$(penstock loopback env{option})"   and then: sinfo, sbatch --gres=gpu:2 ...\n'
            f"  penstockd --config {cluster.settings_file}\n"
            f"  penstock loopback down{option}"
        )
        if not BUILDS:
            typer.echo("sbatch has no adaptive flags here: that needs make, gcc and libslurm-dev (Debian's names)")


@app.command()
def down(folder: Dir = None) -> None:
    """End every process of the cluster, jobs included. The logs stay."""
    with errors_shown():
        try:
            cluster = LoopbackCluster.open(folder or default_folder())
        except NotRunning as nothing:
            typer.echo(f"nothing to stop: {nothing}")
            return
        count = len(cluster.processes())
        cluster.down()
        typer.echo(f"{count} processes of {cluster.folder} have ended; their logs are in {cluster.log_folder}")


@app.command()
def status(
    folder: Dir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show the nodes, their states and how many of their GPUs are in use."""
    with errors_shown():
        now = LoopbackCluster.open(folder or default_folder()).status()
        if as_json:
            typer.echo(json.dumps(asdict(now), default=str))
            return
        table = Table("node", "GPU type", "state", "GPUs used")
        for node in now.nodes:
            table.add_row(node.name, node.gpu_type, node.state, f"{node.gpus_used} of {node.gpus}")
        Console().print(table)
        if now.dead_daemons:
            typer.echo(f"not running: {', '.join(now.dead_daemons)}; logs in {now.folder / 'log'}", err=True)


@app.command()
def env(folder: Dir = None) -> None:
    """Print shell variables for the commands of Slurm and Penstock: eval "$(penstock loopback env)"."""
    with errors_shown():
        for name, value in LoopbackCluster.open(folder or default_folder()).user_environment().items():
            typer.echo(f"export {name}={shlex.quote(value)}")


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Prints errors of a cluster for the user, and ends with status 1 or 2."""
    try:
        yield
    except (LoopbackError, SpecError) as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None


def progress_line(started_s: float) -> Callable[[str], None]:
    """What `LoopbackCluster.up` calls to print what it waits for, if it takes longer than `_PATIENCE_S` seconds."""
    shown_s = started_s

    def show(line: str) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _PATIENCE_S:
            shown_s = time.monotonic()
            typer.echo(f"penstock: {line}, after {shown_s - started_s:.0f} s", err=True)

    return show
