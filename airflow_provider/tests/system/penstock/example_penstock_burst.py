"""How to: Let it leave for the cloud."""

# [START howto_operator_penstock_submit_burst]
from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_burst", schedule=None):
    PenstockSubmitOperator(
        task_id="train",
        command=["python3", "train.py"],
        max_gpus=1,
        burst="allowed",
        burst_budget_usd=5.0,
        spec={"runtime_s": 7200},
        deadline="{{ dag_run.start_date + macros.timedelta(hours=12) }}",
        retries=2,
    )
# [END howto_operator_penstock_submit_burst]
