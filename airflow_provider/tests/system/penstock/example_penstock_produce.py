"""How to: Trigger other DAGs by an asset."""

# [START howto_operator_penstock_submit_assets]
from airflow.sdk import DAG, Asset, task

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

model = Asset("how_to_model")

with DAG("how_to_produce", schedule=None):
    PenstockSubmitOperator(task_id="train", command=["python3", "train.py"], max_gpus=4, retries=2, outlets=[model])

with DAG("how_to_consume", schedule=[model], catchup=False):

    @task
    def jobs(triggering_asset_events=None) -> list[str]:
        return [event.extra["job"]["job_id"] for events in triggering_asset_events.values() for event in events]

    jobs()
# [END howto_operator_penstock_submit_assets]
