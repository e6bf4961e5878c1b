"""How to: End without a worker."""

# [START howto_operator_penstock_submit_end_from_trigger]
from airflow.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_end_from_trigger", schedule=None):
    PenstockSubmitOperator(
        task_id="train", command=["python3", "train.py"], max_gpus=1, retries=2, end_from_trigger=True
    )
# [END howto_operator_penstock_submit_end_from_trigger]
