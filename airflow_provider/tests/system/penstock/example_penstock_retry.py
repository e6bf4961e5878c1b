"""How to: Retry by the kind of failure: retry_policy."""

# [START howto_operator_penstock_submit_retry_policy]
from airflow.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
from airflow_provider_penstock.retries import retry_policy

with DAG("how_to_retry", schedule=None):
    PenstockSubmitOperator(
        task_id="train", command=["python3", "train.py"], max_gpus=4, retries=5, retry_policy=retry_policy()
    )
# [END howto_operator_penstock_submit_retry_policy]
