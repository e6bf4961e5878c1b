"""How to: Use the result of the job."""

# [START howto_operator_penstock_submit_results]
from airflow.providers.common.compat.sdk import DAG, task

from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_results", schedule=None):
    train = PenstockSubmitOperator(task_id="train", command=["python3", "train.py"], max_gpus=4, retries=2)

    @task
    def report(job: dict) -> str:
        used = ", ".join(f"{hours:.2f} h of {gpu_type}" for gpu_type, hours in job["gpu_hours"].items())
        return f"job {job['job_id']}: {job['state']}, {used}, ${job['cost_usd']:.2f}, {job['restarts']} moves"

    report(train.output)
# [END howto_operator_penstock_submit_results]
