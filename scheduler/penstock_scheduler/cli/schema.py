"""`penstock schema`: the JSON Schemas of what others write for us."""

from __future__ import annotations

import json
from enum import StrEnum

import typer
from pydantic import BaseModel

from penstock_profiles.wire import Control, Report
from penstock_scheduler.model import JobWish


class Contract(StrEnum):
    """What can be described."""

    WISH = "wish"
    REPORT = "report"
    CONTROL = "control"


_MODELS: dict[Contract, type[BaseModel]] = {Contract.WISH: JobWish, Contract.REPORT: Report, Contract.CONTROL: Control}


def schema(contract: Contract = typer.Argument(help="The job wish, or the messages between job and daemon.")) -> None:
    """Print a JSON Schema: `wish` (what a job may ask for), `report` (job to daemon) or `control` (daemon to job)."""
    typer.echo(json.dumps(_MODELS[contract].model_json_schema(), indent=2))
