"""Prepare data on a worker, train once for each learning rate on GPUs of two types, and evaluate in a job."""

from __future__ import annotations

from pathlib import Path

from airflow.providers.common.compat.sdk import DAG, Asset, task

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG(
    "example_penstock_pipeline",
    schedule=None,
    catchup=False,
    params={
        "folder": "/shared/airflow",
        "train": "python3 train.py",
        "spec": {"model_family": "resnet50-imagenet"},
        "learning_rates": [0.01, 0.1, 1.0],
        "python": "python3",
    },
) as dag:

    @task
    def prepare(params: dict | None = None) -> list[dict[str, str]]:
        """The environment of each trial."""
        folder = Path(params["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        return [{"LEARNING_RATE": str(rate)} for rate in params["learning_rates"]]

    train = PenstockSubmitOperator.partial(
        task_id="train",
        name="train-pipeline",
        script="#!/bin/bash\nexec {{ params.train }}\n",
        gpu_types=["a100", "t4"],
        min_gpus=1,
        max_gpus=8,
        spec="{{ params.spec | tojson }}",
        output_file="{{ params.folder }}/%j.out",
        retries=2,
        outlets=[Asset("penstock_pipeline_trial")],
    ).expand(environment=prepare())

    @task.penstock(
        shared_folder="{{ params.folder }}",
        python="{{ params.python }}",
        output_file="{{ params.folder }}/%j.out",
        max_gpus=1,
        retries=2,
    )
    def evaluate(jobs: list[dict]) -> dict:
        """Stands for an evaluation of the jobs' models."""
        gpu_hours = [sum(job["gpu_hours"].values()) for job in jobs]
        return {"jobs": [job["job_id"] for job in jobs], "gpu_hours": sum(gpu_hours)}

    evaluate(train.output)
