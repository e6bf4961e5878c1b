"""How to: A Python function in a job: @task.penstock."""

# [START howto_decorator_penstock]
from airflow.providers.common.compat.sdk import DAG, task

with DAG("how_to_function", schedule=None):

    @task.penstock(shared_folder="/tmp/airflow", python="python3", max_gpus=2, gpu_types=["a100"], retries=2)
    def train(rate: float) -> dict[str, float]:
        import math  # what the function needs is imported in the job

        return {"rate": rate, "loss": math.log(1 + rate)}

    train.expand(rate=[0.01, 0.1, 1.0])
# [END howto_decorator_penstock]
