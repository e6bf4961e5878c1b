"""Train on as many GPUs as the cluster gives, then wait for the job once more by its id, as another DAG would."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator, PenstockWaitOperator

with DAG("example_penstock", schedule=None, catchup=False, params={"epochs": 1, "folder": "/shared/logs"}) as dag:
    train = PenstockSubmitOperator(
        task_id="train",
        script="#!/bin/bash\necho trained for {{ params.epochs }} epochs in $AIRFLOW_CTX_DAG_ID\n",
        min_gpus=1,
        max_gpus=4,
        output_file="{{ params.folder }}/%j.out",
        retries=2,
    )
    wait = PenstockWaitOperator(task_id="wait", job_id=train.output["job_id"])
    train >> wait
