"""How to: Cancel it whatever fails: PenstockCancelNotifier."""

# [START howto_notifier_penstock_cancel]
from airflow.sdk import DAG, task

from airflow_provider_penstock.notifications.penstock import PenstockCancelNotifier
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator

with DAG("how_to_notify", schedule=None):
    train = PenstockSubmitOperator(
        task_id="train", command=["python3", "train.py"], max_gpus=4, wait_for_completion=False, retries=2
    )

    @task(on_failure_callback=PenstockCancelNotifier("{{ ti.xcom_pull(task_ids='train', key='job_id') }}"))
    def watch_the_loss() -> None:
        raise ValueError("the loss grows")

    train >> watch_the_loss()
# [END howto_notifier_penstock_cancel]
