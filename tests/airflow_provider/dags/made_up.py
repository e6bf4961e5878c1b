"""Tasks for a penstockd behind which no Slurm is."""

from __future__ import annotations

from airflow.sdk import DAG, task

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("ends_in_the_triggerer", schedule=None, catchup=False):
    train = PenstockSubmitOperator(task_id="train", command=["train"], check_first=False, end_from_trigger=True)

    @task
    def after(job: dict[str, str]) -> list[str]:
        """What another task reads."""
        return [type(job).__name__, job["state"]]

    after(train.output)

with DAG("on_a_worker", schedule=None, catchup=False):
    PenstockSubmitOperator(task_id="train", command=["train"], check_first=False, deferrable=False)
