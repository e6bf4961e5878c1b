"""`penstock schema`: JSON Schemas of what other programs write for Penstock."""

from __future__ import annotations

import json

import typer
from pydantic import BaseModel

from penstock_profiles.wire import ControlMessage, Report
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError

_MODELS: dict[str, type[BaseModel]] = {
    "spec": JobSpec,
    "report": Report,
    "control": ControlMessage,
    "policy": PolicyChoice,
}


def schema(
    name: str = typer.Argument(help="spec, report, control, policy, or the name of a policy or stage, such as sia."),
) -> None:
    """Print a JSON Schema.

    spec is the job spec, report a message from a job to the daemon, control a message from the daemon to a job, and policy the
    body of PUT /v1/policy. The name of a policy or stage prints the schema of its settings.
    """
    typer.echo(json.dumps(_model(name).model_json_schema(), indent=2))


def _model(name: str) -> type[BaseModel]:
    from penstock_scheduler.rounds.policies import settings_model  # not above: it takes a solver's time to import

    try:
        return _MODELS.get(name) or settings_model(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; other schemas are {', '.join(_MODELS)}") from None
