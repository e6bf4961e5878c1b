"""The command `penstock`. Subcommands of other packages join through the entry point group `penstock.commands`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from penstock_scheduler import __version__
from penstock_scheduler.cli import jobs, site
from penstock_scheduler.cli.config import config
from penstock_scheduler.cli.db import db
from penstock_scheduler.cli.man import man
from penstock_scheduler.cli.profile import profile
from penstock_scheduler.cli.replay import replay
from penstock_scheduler.cli.schema import schema
from penstock_scheduler.cli.sensitivity import sensitivity
from penstock_scheduler.cli.simulate import simulate_command
from penstock_scheduler.cli.solve import solve
from penstock_scheduler.cli.top import top
from penstock_scheduler.cli.whatif import whatif
from penstock_scheduler.cli.workload import workload
from penstock_scheduler.errors import PenstockError

COMMANDS = "penstock.commands"


def _version(show: bool) -> None:
    if show:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def make_app() -> typer.Typer:
    """The whole command line, with the subcommands that are installed."""
    app = typer.Typer(no_args_is_help=True, help="Penstock meters deep-learning jobs to GPUs, beside Slurm.")

    @app.callback()
    def penstock(
        version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
    ) -> None:
        pass

    # What follows the program's name is the program's, also without --.
    app.command(context_settings={"allow_interspersed_args": False})(profile)
    app.command()(replay)
    app.command()(schema)
    app.command("simulate")(simulate_command)
    app.command()(solve)
    app.command()(top)
    app.command()(whatif)
    app.command("list")(jobs.list_)
    of_jobs: tuple[Callable[..., None], ...] = (
        jobs.show,
        jobs.explain,
        jobs.logs,
        jobs.wait,
        jobs.cancel,
        jobs.efficiency,
        jobs.cost,
    )
    of_site: tuple[Callable[..., None], ...] = (
        site.queue,
        site.nodes,
        site.rounds,
        site.plan,
        site.pause,
        site.resume,
        site.drain,
        site.budget,
        site.doctor,
    )
    for command in (*of_jobs, *of_site):
        app.command()(command)
    app.command(hidden=True)(man)
    app.add_typer(site.policy, name="policy")
    app.add_typer(site.token, name="token")
    app.add_typer(workload, name="workload")
    app.add_typer(sensitivity, name="sensitivity")
    app.add_typer(config, name="config")
    app.add_typer(db, name="db")
    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        app.add_typer(entry.load(), name=entry.name)
    return app


def main() -> int:
    """Entry point. Exit status: see docs/cli.md."""
    try:
        make_app()(prog_name="penstock")
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        return error.exit_status
    return 0
