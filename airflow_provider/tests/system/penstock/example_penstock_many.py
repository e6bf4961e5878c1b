"""How to: Many alike: map the task, instead of an array."""

# [START howto_operator_penstock_submit_mapped]
from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_many", schedule=None):
    PenstockSubmitOperator.partial(
        task_id="train",
        script="#!/bin/bash\npython3 train.py --rate $RATE --fold $FOLD\n",
        max_gpus=2,
        retries=2,
        max_active_tis_per_dagrun=50,
        map_index_template="{{ task.environment['RATE'] }}, fold {{ task.environment['FOLD'] }}",
    ).expand(environment=[{"RATE": str(rate), "FOLD": str(fold)} for rate in (0.01, 0.1) for fold in range(5)])
# [END howto_operator_penstock_submit_mapped]
