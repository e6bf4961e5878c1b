"""How to: Wait for a job that something else submitted: PenstockWaitOperator."""

# [START howto_operator_penstock_wait]
from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockWaitOperator

with DAG("how_to_wait", schedule=None, params={"job_id": "12"}):
    PenstockWaitOperator(task_id="wait", job_id="{{ params.job_id }}")
# [END howto_operator_penstock_wait]
