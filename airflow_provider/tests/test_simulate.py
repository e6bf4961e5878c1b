import json
import os
from importlib import import_module

import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowFailException
from helpers import context

from airflow_provider_penstock.operators.simulate import PenstockForecastOperator, PenstockSimulateOperator, mask_secret


def test_a_forecast_submits_nothing_and_fails_for_what_could_never_run(folder, instance, hook):
    arguments = {"command": ["true"], "name": "forecast"}
    forecast = PenstockForecastOperator(task_id="forecast", max_gpus=2, **arguments).execute(
        context(instance("forecast"))
    )
    assert forecast["would"] in ("start", "wait")
    assert forecast["lines"]
    never = PenstockForecastOperator(task_id="never", min_gpus=4000, max_gpus=4000, **arguments)
    with pytest.raises(AirflowFailException, match="never run here"):
        never.execute(context(instance("never")))
    assert not hook.ask("GET", "/v1/jobs", params={"name": "forecast"})["jobs"]


def test_a_simulation_is_a_task_and_what_is_wrong_with_it_is_told_by_the_program(tmp_path):
    workload = tmp_path / "two.csv"
    workload.write_text("id,submit_s,gpus,duration_s\none,0,1,600\ntwo,0,1,1200\n")
    program = os.environ["PENSTOCK_TEST_PROGRAM"]

    def simulate(**arguments):
        given = {"program": program, "cluster": "t4:1x2", "workload": str(workload), "policies": ["fifo"]}
        return PenstockSimulateOperator(task_id="simulate", **given | arguments).execute({})

    summary = simulate(out=str(tmp_path / "out"))
    assert (tmp_path / "out/report.html").exists()
    assert "fifo" in json.dumps(summary)
    with pytest.raises(AirflowFailException, match=r"status 1(.|\n)*neither a spec"):
        simulate(cluster="t4")
    with pytest.raises(AirflowFailException, match="cannot be started"):
        simulate(program="/nowhere/penstock")
    with pytest.raises(AirflowFailException, match="either cluster and workload"):
        simulate(store="/nowhere")


def test_a_password_in_a_stores_url_is_neither_logged_nor_shown_nor_on_the_command_line(monkeypatch, tmp_path):
    masker = import_module(mask_secret.__module__)
    shown = []
    url = "postgresql+psycopg://ada:not%40for-you@db:5432/penstock"
    program = tmp_path / "penstock"
    program.write_text('#!/bin/sh\necho "{\\"words\\": \\"$*\\", \\"store\\": \\"$PENSTOCK_STORE\\"}"\n')
    program.chmod(0o755)
    with DAG("secrets", schedule=None):
        task = PenstockSimulateOperator(task_id="simulate", store="{{ params.url }}", program=str(program))
    monkeypatch.setattr(task.log, "info", lambda form, *words: shown.append(form % words))
    task.render_template_fields({"params": {"url": url}})
    assert task.store == url
    rendered = masker.redact({"store": task.store, "error": "no user with not@for-you"})
    assert rendered == {"store": "postgresql+psycopg://ada:***@db:5432/penstock", "error": "no user with ***"}
    words = "simulate whatif --policy=sia --seeds=1 --json"
    assert task.execute({}) == {"words": words, "store": url}
    assert shown == [f"{program} {words}", "store postgresql+psycopg://ada:***@db:5432/penstock"]
