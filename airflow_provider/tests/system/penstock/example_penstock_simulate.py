"""How to: Simulate another cluster: PenstockSimulateOperator."""

# [START howto_operator_penstock_simulate]
from datetime import UTC, datetime

from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.simulate import PenstockSimulateOperator

with DAG("how_to_simulate", schedule="@weekly", start_date=datetime(2026, 1, 5, tzinfo=UTC), catchup=False):
    PenstockSimulateOperator(
        task_id="more_a100s",
        store="/var/lib/penstock",
        policies=["sia", "fifo"],
        out="/shared/reports/{{ dag_run.start_date | ds }}",
        options={"add-nodes": "a100:2x8"},
    )
# [END howto_operator_penstock_simulate]
