"""Jobs as tasks: submit, wait, cancel, forecast."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from typing import Any

from airflow.providers.common.compat.sdk import AirflowException, BaseOperator

from airflow_provider_penstock.exceptions import PenstockAway, PenstockRefused, failure
from airflow_provider_penstock.hooks.penstock import Job, PenstockHook
from airflow_provider_penstock.links.penstock import JOB_URL, PenstockExplainLink, PenstockJobLink
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger

LOG_LINES = 10_000
"""Of the job's output, copied into the task's log; the last ones."""
LAST_LINES = 20
"""Of the job's output, in the message of a task that failed."""
_KEY = re.compile(r"[A-Za-z0-9_.:@/+-]{1,180}")


class _JobOperator(BaseOperator):
    """What operators that wait for one job have in common."""

    penstock_conn_id: str
    deferrable: bool
    poll_interval_s: float
    job_id: str | None
    cancel_on_kill: bool

    @property
    def hook(self) -> PenstockHook:
        """A hook for the task's connection."""
        return PenstockHook(self.penstock_conn_id)

    def _await(self, job_id: str) -> dict[str, Any]:
        """The job's summary; defers if the task is deferrable and the job has not ended."""
        if self.deferrable and self.hook.job(job_id)["state"] != "ended":
            self.defer(
                trigger=PenstockJobTrigger(self.penstock_conn_id, job_id, self.poll_interval_s, self.cancel_on_kill),
                method_name="execute_complete",
            )
        for job in self.hook.wait(job_id):
            self.log.info("job %s is %s", job_id, job["state"])
        return self._finish(job_id)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """After the trigger: the job's summary, or the task fails."""
        self.job_id = event["job_id"]
        if "error" in event:
            raise AirflowException(f"waiting for job {self.job_id} failed: {event['error']}")
        return self._finish(event["job_id"])

    def _finish(self, job_id: str) -> dict[str, Any]:
        job = self.hook.job(job_id)
        lines = self.hook.log_lines(job_id)[-LOG_LINES:]
        for line in lines:
            self.log.info("%s", line)
        if job["ended"] != "COMPLETED":
            raise failure(job["ended"])(
                f"job {job_id} has ended as {job['ended']}, exit code {job['exit_code']}. {self._reason(job_id)}\n"
                + "\n".join(lines[-LAST_LINES:])
            )
        return summary(job)

    def _reason(self, job_id: str) -> str:
        try:
            return self.hook.explain(job_id)
        except (PenstockRefused, PenstockAway):
            return ""

    def on_kill(self) -> None:
        """Somebody stopped the task while it ran on a worker: cancel its job."""
        if self.job_id and self.cancel_on_kill:
            self.hook.cancel(self.job_id)


class PenstockSubmitOperator(_JobOperator):
    """Submit a job, and wait until it has ended.

    Returns the job's `summary`. The same task of the same DAG run has one job: a retry finds it again by its key, waits for it if
    it is open, takes its result if it completed, and submits a new one if it failed. A cleared task is a new job.
    """

    template_fields: Sequence[str] = (
        "penstock_conn_id",
        "name",
        "script",
        "command",
        "wish",
        "options",
        "environment",
    )
    template_ext: Sequence[str] = (".sh", ".sbatch")
    template_fields_renderers = {"script": "bash", "wish": "json", "options": "json", "environment": "json"}  # noqa: RUF012
    operator_extra_links = (PenstockJobLink(), PenstockExplainLink())

    def __init__(
        self,
        *,
        script: str | None = None,
        command: Sequence[str] | None = None,
        name: str | None = None,
        wish: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        durable: bool = True,
        wait_for_completion: bool = True,
        deferrable: bool = True,
        cancel_on_kill: bool = True,
        poll_interval_s: float = 2.0,
        penstock_conn_id: str = PenstockHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        """`script` (its text, or a file *.sh or *.sbatch) or `command`; `wish` as in docs/jobs.md (`max_gpus`, `gpu_types` ...);
        `options` are the other fields of a submission (`partition`, `account`, `time_limit_s`, `output` ...).
        """
        super().__init__(**kwargs)
        self.script = script
        self.command = command
        self.name = name
        self.wish = wish
        self.options = options
        self.environment = environment
        self.durable = durable
        self.wait_for_completion = wait_for_completion
        self.deferrable = deferrable
        self.cancel_on_kill = cancel_on_kill
        self.poll_interval_s = poll_interval_s
        self.penstock_conn_id = penstock_conn_id
        self.job_id: str | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Submit or find the job, then wait."""
        ti = context["ti"]
        job = self._submit(ti)
        self.job_id = job["id"]
        with self.hook.get_conn() as client:
            url = str(client.base_url.join(f"/v1/jobs/{self.job_id}"))
        ti.xcom_push(key="job_id", value=self.job_id)
        ti.xcom_push(key=JOB_URL, value=url)
        return self._await(job["id"]) if self.wait_for_completion else summary(job)

    def submission(self, ti: Any) -> dict[str, Any]:
        """The body for the API but for its key; the same on each try, as a key holds for one body."""
        environment = {
            "AIRFLOW_CTX_DAG_ID": ti.dag_id,
            "AIRFLOW_CTX_DAG_RUN_ID": ti.run_id,
            "AIRFLOW_CTX_TASK_ID": ti.task_id,
            "AIRFLOW_CTX_MAP_INDEX": str(ti.map_index),
        }
        body = {
            "name": self.name or f"{ti.dag_id}.{ti.task_id}",
            "script": self.script,
            "command": self.command,
            "wish": self.wish,
            "environment": environment | (self.environment or {}),
        }
        return {name: value for name, value in body.items() if value is not None} | (self.options or {})

    def _submit(self, ti: Any) -> Job:
        body = self.submission(ti)
        if not self.durable:
            return self.hook.submit(body | {"key": f"airflow:{uuid.uuid4()}"})
        stem = job_key(ti, self.retries)
        number = 1
        while (job := self.hook.find(f"{stem}:{number}")) is not None:
            if job["state"] != "ended" or job["ended"] == "COMPLETED":
                self.log.info("job %s of an earlier try is %s: taken up again", job["id"], job["ended"] or job["state"])
                return job
            number += 1
        job = self.hook.submit(body | {"key": f"{stem}:{number}"})
        self.log.info("job %s, key %s", job["id"], job["key"])
        return job


class PenstockWaitOperator(_JobOperator):
    """Wait for a job that something else submitted. Returns its `summary`; fails if it did not complete."""

    template_fields: Sequence[str] = ("penstock_conn_id", "job_id")

    def __init__(
        self,
        *,
        job_id: str,
        deferrable: bool = True,
        cancel_on_kill: bool = False,
        poll_interval_s: float = 2.0,
        penstock_conn_id: str = PenstockHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_id: str | None = job_id
        self.deferrable = deferrable
        self.cancel_on_kill = cancel_on_kill
        self.poll_interval_s = poll_interval_s
        self.penstock_conn_id = penstock_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Wait."""
        return self._await(str(self.job_id))


class PenstockCancelOperator(BaseOperator):
    """Cancel a job. One that has ended stays as it is."""

    template_fields: Sequence[str] = ("penstock_conn_id", "job_id")

    def __init__(self, *, job_id: str, penstock_conn_id: str = PenstockHook.default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.penstock_conn_id = penstock_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Ask for it."""
        return summary(PenstockHook(self.penstock_conn_id).cancel(self.job_id))


def job_key(ti: Any, retries: int | None) -> str:
    """What all jobs of a task's tries have in common: the DAG, its run, the task, the map index, and how often it was cleared.

    Airflow adds the tries that a clear allows to `max_tries`, so that what is above the task's own `retries` tells clears
    apart on every version, and needs nothing to be stored between submission and answer.
    """
    cleared = max(ti.max_tries - (retries or 0), 0)
    key = f"airflow:{ti.dag_id}:{ti.run_id}:{ti.task_id}:{ti.map_index}:{cleared}"
    if _KEY.fullmatch(key):
        return key
    return f"airflow:{hashlib.sha256(key.encode()).hexdigest()}"


def summary(job: Job) -> dict[str, Any]:
    """What a task tells those after it."""
    return {
        "job_id": job["id"],
        "state": job["ended"] or job["state"],
        "exit_code": job["exit_code"],
        "gpu_hours": {gpu_type: seconds / 3600 for gpu_type, seconds in job["gpu_seconds"].items()},
        "restarts": job["restarts"],
    }
