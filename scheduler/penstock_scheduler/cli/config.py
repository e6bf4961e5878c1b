"""`penstock config`: checks and describes the settings file."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from penstock_scheduler.jobs.pairs import read_prior
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import DaemonSettings, load_settings, reference

config = typer.Typer(no_args_is_help=True, help="Check and describe the daemon's settings file.")


@config.command()
def check(
    path: Path = typer.Argument(Path("/etc/penstock/penstock.toml"), help="The settings file."),
    as_json: bool = typer.Option(False, "--json", help="Print the settings with all defaults as one JSON document."),
) -> None:
    """Check a settings file as penstockd does, without asking Slurm. The exit status is 1 if it is wrong."""
    settings = load_settings(path)
    daemon = settings.section(DaemonSettings)
    make_policy(settings.policy)
    read_prior(daemon.pairs)
    typer.echo(json.dumps(settings.as_dict()) if as_json else f"{path}: ok")


@config.command("reference")
def reference_() -> None:
    """Print every section and key with type, default and meaning, as Markdown. Policies and stages are included."""
    typer.echo(reference(), nl=False)
