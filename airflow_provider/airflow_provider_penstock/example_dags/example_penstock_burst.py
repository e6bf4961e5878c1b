"""Train in the cloud for at most five dollars. The next task fails if the training cost more."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import DAG, task

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

BUDGET_USD = 5.0

with DAG(
    "example_penstock_burst",
    schedule=None,
    catchup=False,
    params={
        "connection": "penstock_default",
        "folder": "/shared/airflow",
        "train": "python3 train.py",
        "spec": {"runtime_s": 3600},
        "options": {"partition": "gpu"},
    },
) as dag:
    train = PenstockSubmitOperator(
        task_id="train",
        penstock_conn_id="{{ params.connection }}",
        script="#!/bin/bash\nexec {{ params.train }}\n",
        max_gpus=1,
        burst="only",
        burst_budget_usd=BUDGET_USD,
        spec="{{ params.spec | tojson }}",
        options="{{ params.options | tojson }}",
        output_file="{{ params.folder }}/%j.out",
        retries=2,
    )

    @task
    def bill(job: dict) -> float:
        """The job's cost in US dollars, from the budget ledger."""
        if job["cost_usd"] > BUDGET_USD:
            raise ValueError(f"job {job['job_id']} has cost ${job['cost_usd']:.2f}")
        return job["cost_usd"]

    bill(train.output)
