"""How to: Use a file that the job wrote."""

# [START howto_operator_penstock_submit_result_file]
from airflow.providers.common.compat.sdk import DAG, task

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_result_file", schedule=None):
    train = PenstockSubmitOperator(
        task_id="train",
        script="#!/bin/bash\necho '{\"loss\": 0.5}' >/tmp/result-$SLURM_JOB_ID.json\n",
        result_file="/tmp/result-%j.json",
        max_gpus=1,
        retries=2,
    )

    @task
    def loss(job: dict) -> float:
        return job["result_file"]["loss"]

    loss(train.output)
# [END howto_operator_penstock_submit_result_file]
