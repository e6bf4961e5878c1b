"""`penstock config`: checks and describes the settings file, and prints JSON Schemas."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from penstock_scheduler.people.errors import ConfigError


def check(
    path: Path = typer.Argument(Path("/etc/penstock/penstock.toml"), help="The settings file."),
    as_json: bool = typer.Option(False, "--json", help="Print the settings with all defaults as one JSON document."),
) -> None:
    """Check a settings file as penstockd does, without asking Slurm. The exit status is 1 if it is wrong."""
    from penstock_scheduler.jobs.pairs import read_prior
    from penstock_scheduler.rounds.policies import make_policy
    from penstock_scheduler.rounds.settings import DaemonSettings, load_settings

    settings = load_settings(path)
    daemon = settings.section(DaemonSettings)
    make_policy(settings.policy)
    read_prior(daemon.pairs)
    typer.echo(json.dumps(settings.as_dict()) if as_json else f"{path}: ok")


def reference() -> None:
    """Print every section and key with type, default and meaning, as Markdown. Policies and stages are included."""
    from penstock_scheduler.rounds import settings

    typer.echo(settings.reference(), nl=False)


def schema(
    name: str = typer.Argument(help="spec, report, control, policy, or the name of a policy or stage, such as sia."),
) -> None:
    """Print a JSON Schema.

    spec is the job spec, report a message from a job to the daemon, control a message from the daemon to a job, and policy the
    body of PUT /v1/policy. The name of a policy or stage prints the schema of its settings.
    """
    from pydantic import BaseModel

    from penstock_profiles.wire import ControlMessage, Report
    from penstock_scheduler.model import JobSpec
    from penstock_scheduler.model.policy_choice import PolicyChoice
    from penstock_scheduler.rounds.policies import settings_model

    models: dict[str, type[BaseModel]] = {
        "spec": JobSpec,
        "report": Report,
        "control": ControlMessage,
        "policy": PolicyChoice,
    }
    try:
        model = models.get(name) or settings_model(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; other schemas are {', '.join(models)}") from None
    typer.echo(json.dumps(model.model_json_schema(), indent=2))
