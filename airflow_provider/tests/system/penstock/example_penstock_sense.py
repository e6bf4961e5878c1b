"""How to: Check from time to time: PenstockJobSensor."""

# [START howto_sensor_penstock_job]
from airflow.providers.common.compat.sdk import DAG

from airflow_provider_penstock.sensors.penstock import PenstockJobSensor

with DAG("how_to_sense", schedule=None, params={"job_id": "12"}):
    PenstockJobSensor(task_id="sense", job_id="{{ params.job_id }}", timeout=3600, soft_fail=True, deferrable=True)
# [END howto_sensor_penstock_job]
