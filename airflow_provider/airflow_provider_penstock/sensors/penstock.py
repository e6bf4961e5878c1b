"""A sensor for jobs that were submitted elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

from airflow.providers.common.compat.sdk import AirflowException, BaseSensorOperator, conf

from airflow_provider_penstock.exceptions import PenstockAway, failure
from airflow_provider_penstock.hooks.penstock import TEST_PAUSES_S, Job, PenstockHook
from airflow_provider_penstock.links.penstock import JOB_LINKS, push_links
from airflow_provider_penstock.news import ending
from airflow_provider_penstock.silence import Silence
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger


class PenstockJobSensor(BaseSensorOperator):
    """Succeeds once a job has completed, and fails if it ended otherwise. Stopping the task never cancels the job.

    `PenstockWaitOperator` also shows the job's output and returns its summary.

    .. seealso::
        For more information on how to use this sensor, take a look at the guide: :ref:`howto/sensor:PenstockJobSensor`
    """

    template_fields: Sequence[str] = ("penstock_conn_id", "job_id")
    operator_extra_links: tuple[Any, ...] = JOB_LINKS

    def __init__(
        self,
        *,
        job_id: str,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        penstock_conn_id: str = PenstockHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        """Further arguments are those of a sensor.

        Args:
            job_id: The job.
            deferrable: Whether the task waits in the triggerer, where it takes no worker slot; by default as Airflow's
                setting `[operators] default_deferrable` says. `timeout` and `soft_fail` apply there too; `poke_interval` and
                `mode` do not.
            penstock_conn_id: The connection to penstockd.
        """
        super().__init__(**kwargs)
        self.job_id = job_id
        self.deferrable = deferrable
        self.penstock_conn_id = penstock_conn_id

    def execute(self, context: Any) -> Any:
        """Wait for the job's end, here or in the triggerer."""
        push_links(context["ti"], PenstockHook(self.penstock_conn_id), self.job_id)
        if not self.deferrable:
            return super().execute(context)
        if not self.poke(context):
            self._defer()
        return None

    def _defer(self) -> None:
        self.defer(
            trigger=PenstockJobTrigger(self.penstock_conn_id, self.job_id, cancel=False, log_interval_s=0),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def poke(self, context: Any) -> bool:
        """Whether the job has completed. Raises the failure of a job that ended otherwise.

        While Penstock does not answer, the sensor goes on, and its `timeout` ends it.
        """
        try:
            job = PenstockHook(self.penstock_conn_id).ask("GET", f"/v1/jobs/{self.job_id}", pauses_s=TEST_PAUSES_S)
        except PenstockAway as away:
            self._silence.goes_on(away)
            return False
        self._silence.ends()
        return self._has_completed(job)

    @cached_property
    def _silence(self) -> Silence:
        return Silence(self.log, f"the sensor keeps waiting for job {self.job_id}")

    def _has_completed(self, job: Job) -> bool:
        if job["state"] != "ended":
            return False
        if job["ended"] != "COMPLETED":
            raise failure(job["ended"])(ending(job))
        self.log.info("%s", ending(job))
        return True

    def execute_complete(self, context: Any, event: dict[str, Any]) -> None:
        """Succeed or fail after the trigger."""
        if "error" in event:
            raise AirflowException(
                f"waiting for job {self.job_id} failed: {event['error']}. The job runs on: a sensor never cancels it"
            )
        if not self._has_completed(PenstockHook(self.penstock_conn_id, silence=self._silence).job(self.job_id)):
            self._defer()  # a slurmctld that was killed had forgotten the job's end, and runs it again
