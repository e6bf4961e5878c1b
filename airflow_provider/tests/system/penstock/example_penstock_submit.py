"""How to: Run a training script: PenstockSubmitOperator."""

# [START howto_operator_penstock_submit]
from datetime import timedelta
from pathlib import Path

from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_submit", schedule=None, params={"rate": 0.1}):
    PenstockSubmitOperator(
        task_id="train",
        command=["python3", str(Path(__file__).parent / "train.py"), "--rate", "{{ params.rate }}"],
        working_directory="/tmp",
        output_file="/tmp/train-%j.out",
        gpu_types=["a100", "t4"],
        min_gpus=1,
        max_gpus=8,
        time_limit_s=86400,
        retries=2,
        retry_delay=timedelta(minutes=1),
    )
# [END howto_operator_penstock_submit]
