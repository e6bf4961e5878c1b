"""A sensor for jobs that were submitted elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.providers.common.compat.sdk import BaseSensorOperator

from airflow_provider_penstock.exceptions import failure
from airflow_provider_penstock.hooks.penstock import PenstockHook


class PenstockJobSensor(BaseSensorOperator):
    """Succeeds once a job has completed, and fails if it ended otherwise.

    `PenstockWaitOperator` does the same without occupying a worker.
    """

    template_fields: Sequence[str] = ("penstock_conn_id", "job_id")

    def __init__(self, *, job_id: str, penstock_conn_id: str = PenstockHook.default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.penstock_conn_id = penstock_conn_id

    def poke(self, context: Any) -> bool:
        """Whether the job has completed. Raises the failure of a job that ended otherwise."""
        job = PenstockHook(self.penstock_conn_id).job(self.job_id)
        if job["state"] == "ended" and job["ended"] != "COMPLETED":
            raise failure(job["ended"])(f"job {self.job_id} has ended as {job['ended']}, exit code {job['exit_code']}")
        return bool(job["state"] == "ended")
