"""The command `penstock playground`."""

from __future__ import annotations

import getpass
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from penstock_loopback import LoopbackCluster, NotRunning, default_folder, machine
from penstock_loopback.cli import BUILDS, errors_shown, progress_line
from penstock_loopback.folder import write_secret
from penstock_profiles.wire import URL_VARIABLE
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.client import Client, DaemonAway

app = typer.Typer(
    help="A Slurm under Penstock on this machine that stays up, with its web page and a queue of jobs.",
    no_args_is_help=True,
)

NODES = "t4:4x4,rtx:2x8,a100:2x8"
ROUND_S = 10.0
PATIENCE_S = 120.0
"""How long penstockd may take to answer."""

Dir = Annotated[
    Path | None,
    typer.Option("--dir", help="The playground's folder.  (default: a folder for each user)", show_default=False),
]


@app.command()
def up(
    folder: Dir = None,
    nodes: Annotated[str, typer.Option(metavar="SPEC", help="Comma-separated TYPE:NODESxGPUS.")] = NODES,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="TCP port of the web page.  (default: a free one)", show_default=False),
    ] = None,
) -> None:
    """Start the playground, and print the address of its page, a token to log in with, and variables for your shell."""
    with errors_shown():
        where = folder or default_folder("playground")
        note = _note(where)
        try:
            LoopbackCluster.open(where)
        except NotRunning:
            pass
        else:
            typer.echo(note.read_text() if note.exists() else f"a playground that has not started whole is in {where}")
            raise typer.Exit(0 if note.exists() else 1)
        began_s = time.monotonic()
        cluster = LoopbackCluster(where, nodes, flags=BUILDS)
        cluster.up(progress=progress_line(began_s))
        try:
            text = _start(cluster, port, "" if folder is None else f" --dir {shlex.quote(str(folder))}")
        except BaseException:
            cluster.down()
            raise
        write_secret(note, text, 0o600)
        typer.echo(text)


@app.command()
def down(folder: Dir = None) -> None:
    """End all of the playground: jobs, penstockd and Slurm. The logs stay."""
    with errors_shown():
        try:
            cluster = LoopbackCluster.open(folder or default_folder("playground"))
        except NotRunning as nothing:
            typer.echo(f"nothing to stop: {nothing}")
            return
        cluster.down()
        typer.echo(f"the playground has ended; its logs are in {cluster.log_folder}")


def _note(folder: Path) -> Path:
    """What `up` has printed, so that it can be printed again. The next start in the same folder removes it."""
    return folder.expanduser().resolve() / "etc" / "playground.txt"


def _start(cluster: LoopbackCluster, port: int | None, option: str) -> str:
    """Start penstockd and the arrivals. Returns what the user needs to know. Raises LoopbackError."""
    port = machine.free_ports(1) if port is None else port
    machine.check_ports([port])
    cluster.settings_file.write_text(settings(cluster, port))
    variables = cluster.user_environment()

    def answers() -> bool:
        try:
            with Client(variables[URL_VARIABLE], timeout_s=5) as penstock:
                return bool(penstock.cluster().gpus)
        except DaemonAway:
            return False

    daemon = (sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", str(cluster.settings_file))
    cluster.start_program("penstockd", *daemon, ready=answers, timeout_s=PATIENCE_S)
    with Client(variables[URL_VARIABLE]) as penstock:
        order = TokenOrder(user=getpass.getuser(), role="admin", expires_s=time.time() + 30 * 86400, note="playground")
        token = penstock.create_token(order).token
    arrivals = (sys.executable, "-m", "penstock_loopback.playground.arrivals", str(cluster.folder))
    cluster.start_program("arrivals", *arrivals, ready=lambda: True)
    gpus = sum(node.gpus for node in cluster.nodes)
    lines = [f"  export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if shutil.which("penstock") is None:
        lines.append(f'  export PATH="$PATH:{Path(sys.executable).parent}"')
    exports = "\n".join(lines)
    return f"""\
A Slurm with {gpus} GPUs that do not exist runs under Penstock, and jobs arrive all the time.

  the page   http://127.0.0.1:{port}
  the token  {token}

With these variables, penstock, sbatch and squeue use it, such as `penstock top`:

{exports}

End all of it with `penstock playground down{option}`. It is in {cluster.folder}."""


def settings(cluster: LoopbackCluster, port: int) -> str:
    """The settings file of the playground's penstockd: short rounds, and a page on this port of this machine."""
    tables: dict[str, dict[str, object]] = {
        "daemon": {
            "round_s": ROUND_S,
            "sample_s": 10.0,
            "restart_cost_s": 5.0,
            "state_dir": str(cluster.folder / "penstock-state"),
        },
        "api": {
            "socket": cluster.user_environment()[URL_VARIABLE].removeprefix("unix:"),
            "listen": f"127.0.0.1:{port}",
        },
        "slurm": {"partitions": ["all"], "conf": str(cluster.slurm_conf), "spool_dir": str(cluster.spool)},
        "safety": {"stop_share": 1.0},  # a round takes seconds here, so ten minutes of moves pass in one or two
    }
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
