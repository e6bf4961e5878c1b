"""How to: One job after another, without Airflow between them."""

# [START howto_operator_penstock_submit_dependency]
from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_depend", schedule=None):
    first = PenstockSubmitOperator(
        task_id="first", command=["python3", "prepare.py"], max_gpus=1, wait_for_completion=False, retries=2
    )
    second = PenstockSubmitOperator(
        task_id="second",
        command=["python3", "train.py"],
        max_gpus=4,
        dependency="afterok:{{ ti.xcom_pull(task_ids='first', key='job_id') }}",
        retries=2,
    )
    first >> second
# [END howto_operator_penstock_submit_dependency]
