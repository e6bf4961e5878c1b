"""Evaluate each time a job named `train-*` has completed, including other users' jobs. Needs Airflow 3."""

from __future__ import annotations

from airflow.sdk import DAG, Asset, AssetWatcher

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
from airflow_provider_penstock.triggers.penstock import PenstockJobEventTrigger

trained = Asset(
    "penstock_trained", watchers=[AssetWatcher(name="penstock_trained", trigger=PenstockJobEventTrigger("train-*"))]
)

with DAG("example_penstock_asset", schedule=[trained], catchup=False) as dag:
    PenstockSubmitOperator(
        task_id="evaluate",
        script="""#!/bin/bash
{% for event in triggering_asset_events.values() | sum(start=[]) -%}
echo evaluate what job {{ event.extra.payload.id }} called {{ event.extra.payload.name }} has left
{% endfor -%}
""",
        max_gpus=1,
        retries=2,
        output_file="{{ var.value.get('penstock_folder', '/shared/logs') }}/%j.out",
    )
