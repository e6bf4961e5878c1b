"""How to: A DAG when a job has ended: PenstockJobEventTrigger."""

# [START howto_trigger_penstock_job_event]
from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_provider_penstock.triggers.penstock import PenstockJobEventTrigger

ended = Asset(
    "nightly_ended",
    watchers=[
        AssetWatcher(name="nightly", trigger=PenstockJobEventTrigger("nightly-*", ended=("COMPLETED", "FAILED")))
    ],
)

with DAG("how_to_react", schedule=[ended], catchup=False):

    @task
    def tell(triggering_asset_events=None) -> list[str]:
        jobs = [event.extra["payload"] for events in triggering_asset_events.values() for event in events]
        return [f"{job['name']} has ended as {job['ended']}" for job in jobs]

    tell()
# [END howto_trigger_penstock_job_event]
