"""`penstock schema`: the JSON Schemas of what others write for us."""

from __future__ import annotations

import json
from enum import StrEnum

import typer
from pydantic import BaseModel

from penstock_profiles.wire import ControlMessage, Report
from penstock_scheduler.model import JobSpec


class Contract(StrEnum):
    """What can be described."""

    SPEC = "spec"
    REPORT = "report"
    CONTROL = "control"


_MODELS: dict[Contract, type[BaseModel]] = {
    Contract.SPEC: JobSpec,
    Contract.REPORT: Report,
    Contract.CONTROL: ControlMessage,
}


def schema(contract: Contract = typer.Argument(help="The job spec, or the messages between job and daemon.")) -> None:
    """Print a JSON Schema: `spec` (what a job may ask for), `report` (job to daemon) or `control` (daemon to job)."""
    typer.echo(json.dumps(_MODELS[contract].model_json_schema(), indent=2))
