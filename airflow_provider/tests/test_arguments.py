"""Arguments are checked when the DAG is read, and connections take what people paste."""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowFailException

from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
from airflow_provider_penstock.operators.simulate import PenstockForecastOperator

SENSOR = """
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor
print(PenstockJobSensor(task_id="sensor", job_id="1").deferrable)
"""


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"command": "sleep 1"}, r"write a list of its words: command=\['sleep', '1'\]"),
        ({"command": ["sleep", 3]}, r"command\[1\]=3 is no text; write '3'"),
        ({"command": ["sleep", None]}, r"command\[1\]=None is no text; leave it out"),
        ({"command": []}, "command has no words"),
        ({}, r"no program: give command, as in command=\['python3', 'train.py'\], or script"),
        ({"command": ["true"], "script": "#!/bin/sh\n"}, "two programs; leave one of them out"),
        ({"script": "echo 1"}, "let it begin with #!"),
        ({"command": ["true"], "lease": 3600}, r"write lease=timedelta\(seconds=3600\)"),
        ({"command": ["true"], "lease": "1 day"}, "no timedelta"),
        ({"command": ["true"], "lease": timedelta(minutes=1)}, "shorter than 0:10:00"),
        ({"command": ["true"], "skip_on_exit_code": "3"}, "write numbers"),
        ({"command": ["true"], "skip_on_exit_code": [3, "4"]}, "'4'; write numbers"),
        ({"command": ["true"], "poll_interval_s": timedelta(seconds=3)}, "no number of seconds"),
        ({"command": ["true"], "log_interval_s": -1}, "no number of seconds"),
    ],
)
def test_a_wrong_argument_is_told_when_the_dag_is_read_with_the_remedy(arguments, remedy):
    with pytest.raises(ValueError, match=remedy):
        PenstockSubmitOperator(task_id="train", **arguments)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(
        ValueError, match=r"write '3'.*write '4'.*write lease.*poll_interval_s.*log_interval_s.*JSON.*time"
    ):
        PenstockSubmitOperator(
            task_id="train",
            command=[3, 4],
            lease=3600,
            poll_interval_s="1",
            log_interval_s=-1,
            spec="max_gpus=3",
            deadline="tomorrow",
        )


@pytest.mark.parametrize(
    "arguments", [{"spec": "max_gpus=3"}, {"deadline": "tomorrow"}, {"options": "[1]"}, {"deadline": "2100-01-01"}]
)
def test_text_that_is_no_template_is_read_when_the_dag_is(arguments):
    with pytest.raises(AirflowFailException):
        PenstockSubmitOperator(task_id="train", command=["true"], **arguments)


def test_templates_results_of_tasks_and_mapped_arguments_wait_for_their_values():
    with DAG("waits", schedule=None):
        first = PenstockSubmitOperator(
            task_id="first", command="{{ params.words }}", deadline="{{ params.until }}", spec="{{ params.spec }}"
        )
        PenstockSubmitOperator(task_id="second", script="{{ params.script }}")
        PenstockSubmitOperator(task_id="third", command=first.output)
        PenstockSubmitOperator(task_id="fourth", command=["echo", first.output["job_id"]])
        PenstockSubmitOperator.partial(task_id="fifth").expand(command=[["true"], ["false"]])
    PenstockForecastOperator(task_id="forecast", max_gpus=2)


def test_the_sensor_is_deferrable_by_airflows_setting():
    words = [sys.executable, "-P", "-c", SENSOR]
    for given in ("True", "False"):
        environment = os.environ | {"AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": given}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=True)
        assert done.stdout.splitlines()[-1] == given


def test_the_name_of_a_mapped_task_comes_from_its_job():
    template = "{{ task.environment['RATE'] }}"
    with DAG("mapped", schedule=None) as dag:
        mapped = PenstockSubmitOperator.partial(task_id="train", command=["true"], map_index_template=template)
        mapped.expand(environment=[{"RATE": "0.1"}])
    assert dag.get_task("train").partial_kwargs["map_index_template"] == template
    one = PenstockSubmitOperator(
        task_id="train", command=["true"], environment={"RATE": "0.1"}, map_index_template=template
    )
    assert dag.get_template_env().from_string(one.map_index_template).render(task=one) == "0.1"


CONVENTIONS = Path(__file__).parents[2] / "docs/user/airflow/conventions.md"


def test_each_option_on_the_page_of_conventions_has_a_test():
    own = Path(__file__).parent
    folders = (own, own.parents[1] / "tests/airflow_provider", own.parents[1] / "tests/packages")
    files = [file for folder in folders for file in folder.glob("test_*.py")]
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    rows = [line for line in CONVENTIONS.read_text().splitlines() if line.startswith("| ")][2:]
    named = [set(re.findall(r"`(test_\w+)`", row.split(" | ")[-1])) for row in rows]
    assert len(rows) > 20
    assert [row for row, names in zip(rows, named, strict=True) if not names or names - there] == []


def hook(monkeypatch, **fields):
    monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_PASTED", json.dumps({"conn_type": "penstock", **fields}))
    return PenstockHook("penstock_pasted")


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "http://penstock.example.org", "port": 7373}, "http://penstock.example.org:7373"),
        ({"host": "https://penstock.example.org:7373/"}, "https://penstock.example.org:7373"),
        ({"host": "https://penstock.example.org/jobs", "port": 7373}, "https://penstock.example.org:7373"),
        ({"host": " penstock.example.org:7373 "}, "https://penstock.example.org:7373"),
        ({"host": "penstock.example.org", "port": 7373, "extra": {"tls": "false"}}, "http://penstock.example.org:7373"),
        ({"host": "penstock.example.org", "port": 7373, "extra": {"tls": "True"}}, "https://penstock.example.org:7373"),
        ({"host": "penstock.example.org", "port": 7373, "extra": {"tls": ""}}, "https://penstock.example.org:7373"),
        ({"host": "::1", "port": 7373, "extra": {"tls": "no"}}, "http://[::1]:7373"),
        ({"host": "http://penstock.example.org", "port": 1, "extra": {"tls": False}}, "http://penstock.example.org:1"),
    ],
)
def test_a_connection_takes_what_people_paste(monkeypatch, fields, url):
    found = hook(monkeypatch, **fields)
    assert found.base_url == url
    assert str(found.get_conn().base_url).rstrip("/") == url


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": "http://a.example.org", "extra": {"tls": True}}, "leave the scheme out, or set tls to false"),
        ({"host": "unix:///run/penstock.sock"}, "write its host name"),
        ({"host": "a.example.org", "extra": {"tls": "maybe"}}, "write true or false"),
        ({"host": "a.example.org", "extra": {"timeout_s": "soon"}}, "timeout_s"),
        ({"host": "a.example.org:http"}, "connection penstock_pasted"),
        ({"host": ","}, "has no host"),
        ({}, "has no host"),
    ],
)
def test_what_a_connection_cannot_mean_is_told_with_the_remedy(monkeypatch, fields, words):
    good, sentence = hook(monkeypatch, **fields).test_connection()
    assert not good
    assert words in sentence
