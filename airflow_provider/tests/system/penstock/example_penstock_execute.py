"""How to: An ordinary task on a GPU: PenstockExecutor."""

# [START howto_executor_penstock]
from airflow.sdk import DAG, task

with DAG("how_to_execute", schedule=None):

    @task(executor="PenstockExecutor", executor_config={"penstock": {"spec": {"max_gpus": 1, "gpu_types": ["t4"]}}})
    def embed() -> None: ...

    embed()
# [END howto_executor_penstock]
