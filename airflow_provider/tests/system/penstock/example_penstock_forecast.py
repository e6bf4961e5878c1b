"""How to: Forecast before you submit: PenstockForecastOperator."""

# [START howto_operator_penstock_forecast]
from airflow.providers.common.compat.sdk import DAG, task

from airflow_provider_penstock.operators.simulate import PenstockForecastOperator

with DAG("how_to_forecast", schedule=None):
    forecast = PenstockForecastOperator(task_id="forecast", command=["python3", "train.py"], max_gpus=8)

    @task.branch
    def large_or_small(forecast: dict) -> str:
        return "large" if forecast["would"] == "start" else "small"

    @task
    def large() -> None: ...

    @task
    def small() -> None: ...

    large_or_small(forecast.output) >> [large(), small()]
# [END howto_operator_penstock_forecast]
