"""Tasks and answers that several tests use."""

import asyncio
import json
from datetime import UTC, datetime
from importlib import import_module
from types import SimpleNamespace

import httpx

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

LONG = "#!/bin/bash\nsleep 300\n"


STARTED = datetime(2026, 11, 21, tzinfo=UTC)


def context(ti, started=STARTED, **more):
    """What a worker gives an operator. `started` is the start of the DAG run."""
    return {"ti": ti, "dag_run": SimpleNamespace(start_date=started), **more}


def submit(task_id, folder, script=LONG, **arguments):
    arguments = {"poll_interval_s": 0.2, "log_interval_s": 0.2, "output_file": f"{folder}/%j.out"} | arguments
    return PenstockSubmitOperator(task_id=task_id, script=script, **arguments)


def revived(deferred):
    """The trigger of a deferred task, as the triggerer makes it from the database."""
    path, arguments = deferred.value.trigger.serialize()
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)(**json.loads(json.dumps(arguments)))


def first_event(trigger):
    async def first():
        return await anext(trigger.run())

    return asyncio.run(asyncio.wait_for(first(), 180)).payload


class Store(dict):
    """As `context["task_state_store"]` is from Airflow 3.3 on: a clear leaves it as it was."""

    def set(self, key, value, **_):
        self[key] = value


def away(*_, **__):
    raise httpx.ConnectError("nobody there")
