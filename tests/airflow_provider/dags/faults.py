"""Jobs that wait for a file, the gate, which contains their exit status; and workers that die."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators import arguments
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

SCRIPT = """#!/bin/bash
echo waiting for {{ params.gate }}
until [ -e {{ params.gate }} ]; do sleep 0.3; done
exit $(cat {{ params.gate }})
"""
COMMON: dict[str, Any] = {
    "script": SCRIPT,
    "max_gpus": 1,
    "output_file": "{{ params.folder }}/%j.out",
    "retry_delay": timedelta(seconds=1),
    "log_interval_s": 2.0,
}
PARAMS = {"gate": "/nowhere", "folder": "/tmp"}


class DyingHook(PenstockHook):
    def submit(self, submission: dict[str, Any]) -> dict[str, Any]:
        job = super().submit(submission)
        marker = Path(submission["environment"]["MARKER"])
        if not marker.exists():
            marker.write_text(job["id"])
            os.kill(os.getpid(), signal.SIGKILL)
        return job


class Dying(PenstockSubmitOperator):
    """Its worker is killed in the first try, after penstockd has accepted the job and before the worker gets the answer."""

    @property
    def hook(self) -> PenstockHook:
        return DyingHook(self.penstock_conn_id)


with DAG("faults", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator(task_id="job", penstock_conn_id="penstock_line", retries=1, **COMMON)

with DAG("faults_patient", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator(task_id="job", penstock_conn_id="penstock_line", retries=30, **COMMON)

with DAG("faults_on_worker", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator(task_id="job", deferrable=False, **COMMON)

with DAG("faults_on_worker_patient", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator(task_id="job", deferrable=False, retries=30, **COMMON)

with DAG("faults_rotated", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator(task_id="job", penstock_conn_id="penstock_rotated", retries=1, **COMMON)

with DAG("faults_dying", schedule=None, catchup=False, params=PARAMS | {"marker": "/nowhere"}):
    Dying(task_id="job", retries=2, environment={"MARKER": "{{ params.marker }}"}, **COMMON)

with DAG("refused", schedule=None, catchup=False, params=PARAMS):
    REFUSED = COMMON | {"retries": 5}
    PenstockSubmitOperator(task_id="wrong_token", penstock_conn_id="penstock_wrong", **REFUSED)
    PenstockSubmitOperator(task_id="unknown_type", gpu_types=["h900"], **REFUSED)
    PenstockSubmitOperator(task_id="max_below_min", min_gpus=4, **(REFUSED | {"max_gpus": 2}))
    PenstockSubmitOperator(task_id="more_than_there_are", min_gpus=4000, **(REFUSED | {"max_gpus": 4000}))
    PenstockSubmitOperator(task_id="no_cloud", burst="only", **REFUSED)

arguments.SHORTEST_LEASE = timedelta(0)
STORM = """#!/bin/bash
sleep {{ params.life }}
[ ! -d {{ params.folder }}/completed ] || date +%s >>{{ params.folder }}/completed/$SLURM_JOB_ID-$NUMBER
exit {{ params.status }}
"""
"""A run notes its end itself: a slurmctld that was killed may have forgotten it."""
with DAG("storm", schedule=None, catchup=False, max_active_runs=30, params=PARAMS | {"life": 1, "status": 0}):
    brief = COMMON | {"script": STORM, "output_file": "/dev/null"}
    PenstockSubmitOperator(task_id="job", lease=timedelta(seconds=100), retries=2, **brief)

with DAG("crowd", schedule=None, catchup=False, params=PARAMS | {"life": 10, "status": 0, "tasks": 500}):

    @task(retries=10, retry_delay=timedelta(seconds=1))
    def numbers(params: dict[str, Any] | None = None) -> list[dict[str, str]]:
        """The environment of each job."""
        assert params is not None
        return [{"NUMBER": str(number)} for number in range(params["tasks"])]

    PenstockSubmitOperator.partial(
        task_id="job",
        retries=20,
        max_active_tis_per_dagrun=1000,
        end_from_trigger=True,
        **(brief | {"log_interval_s": 0}),
    ).expand(environment=numbers())

with DAG("faults_overdue", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator(task_id="job", execution_timeout=timedelta(seconds=40), **COMMON)

with DAG("plain_scripts", schedule=None, catchup=False, params=PARAMS):
    PenstockSubmitOperator.partial(task_id="job", **COMMON).expand(environment=[{"N": str(n)} for n in range(6)])

with DAG("on_gpu", schedule=None, catchup=False, params=PARAMS):

    @task(executor="PenstockExecutor", executor_config={"penstock": {"spec": {"max_gpus": 1, "gpu_types": ["t4"]}}})
    def where(params: dict[str, Any] | None = None) -> dict[str, str]:
        """Runs in a Slurm job."""
        assert params is not None
        print("the task waits for the gate", flush=True)
        while not Path(params["gate"]).exists():
            time.sleep(0.3)
        return {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_GPUS") if name in os.environ}

    where()
