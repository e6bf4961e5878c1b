"""How to: Cancel a job: PenstockCancelOperator."""

# [START howto_operator_penstock_cancel]
from airflow.providers.common.compat.sdk import DAG, task

from airflow_provider_penstock.operators.penstock import PenstockCancelOperator, PenstockSubmitOperator

with DAG("how_to_cancel", schedule=None):
    train = PenstockSubmitOperator(
        task_id="train", command=["python3", "train.py"], max_gpus=4, wait_for_completion=False, retries=2
    )

    @task
    def evaluate(job_id: str) -> None: ...

    cancel = PenstockCancelOperator(task_id="cancel", job_id=train.output["job_id"], trigger_rule="one_failed")
    evaluate(train.output["job_id"]) >> cancel
# [END howto_operator_penstock_cancel]
