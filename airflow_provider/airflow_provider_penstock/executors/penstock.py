"""An Airflow executor that runs tasks as Slurm jobs, for tasks that need a GPU themselves. Needs Airflow 3."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from airflow.executors.base_executor import BaseExecutor
from airflow.providers.common.compat.sdk import conf

from airflow_provider_penstock.cli import check
from airflow_provider_penstock.exceptions import UNAUTHENTICATED, PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import OPEN, Job, PenstockHook, read

SECTION = "penstock_executor"
TIMEOUT_S = 5.0
"""Time limit of one request. The scheduler waits meanwhile."""
UNMOVED = {"preemptible": False}
"""A task's job must not be restarted: Airflow does not accept a second run of the same try."""
SCRIPT = """#!/bin/sh
umask 077
file=$(mktemp) || exit 1
trap 'rm -f "$file"' EXIT
cat >"$file" <<'END_OF_WORKLOAD'
{workload}
END_OF_WORKLOAD
{python} -m airflow.sdk.execution_time.execute_workload --json-path "$file"
"""
"""The workload is in a file, because its token would be visible in the list of processes."""


class PenstockExecutor(BaseExecutor):
    """Runs a task with `executor="PenstockExecutor"` as a Slurm job, described by `executor_config={"penstock": {...}}`.

    A job's key has the id of the task's try and a number, because a task that defers itself runs several times in one try. So a
    scheduler that was killed finds its jobs again. No error here may end the scheduler, not even a deleted connection: errors are
    logged, and the next heartbeat tries again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hook = PenstockHook(conf.get(SECTION, "conn_id", fallback=PenstockHook.default_conn_name))
        self._client: httpx.Client | None = None
        self._poll_s = conf.getfloat(SECTION, "poll_interval_s", fallback=2.0)
        self._polled_s = float("-inf")
        self.jobs: dict[Any, str] = {}
        """Key of a running task -> its job's id; empty while the id is unknown because penstockd did not answer."""
        self.keys: dict[Any, str] = {}
        """Key of a running task -> the common part of its jobs' keys."""
        self.revoked: set[str] = set()
        """Ids of jobs that must end, although their task may be queued again with the same id."""

    def start(self) -> None:
        """Warn about a setting with which the scheduler revokes tasks that wait in Slurm's queue."""
        is_good, sentence = check.executor()
        if not is_good:
            self.log.warning("%s", sentence)

    def _process_workloads(self, workloads: Sequence[Any]) -> None:
        """Submit each workload. Those that penstockd does not accept now stay queued for the next heartbeat."""
        for workload in workloads:
            key = workload.ti.key
            if key in self.jobs:  # it was deferred or rescheduled, and its last job has not ended yet
                continue
            try:
                job = self._submit(workload)
            except PenstockRefused as refused:
                self.queued_tasks.pop(key, None)
                self.fail(key, str(refused))
                continue
            except Exception as error:
                self.log.warning("penstockd does not answer (%s): %s stays queued", error, key)
                return
            self.queued_tasks.pop(key, None)
            self._watch(key, job_key(workload.ti.id), job["id"])
            self.running_state(key, job["id"])

    def _submit(self, workload: Any) -> Job:
        stem = job_key(workload.ti.id)
        newest, number = self._newest(stem)
        if newest is not None and newest["state"] != "ended":
            if newest["id"] not in self.revoked:
                return newest
            self._cancel(newest["id"])  # again, because penstockd may not have answered
        return dict(self._ask("POST", "/v1/jobs", json=self.submission(workload) | {"key": f"{stem}:{number + 1}"}))

    def submission(self, workload: Any) -> dict[str, Any]:
        """The body for the API, without its key."""
        ti = workload.ti
        given = dict((ti.executor_config or {}).get("penstock", {}))
        python = conf.get(SECTION, "python", fallback="python3")
        script = SCRIPT.format(workload=workload.model_dump_json(), python=shlex.quote(python))
        server = conf.get("core", "execution_api_server_url", fallback="")
        environment = {"AIRFLOW__CORE__EXECUTION_API_SERVER_URL": server} if server else {}
        environment["AIRFLOW__CORE__EXECUTOR"] = conf.get(
            "core", "executor"
        )  # a DAG that names an unknown executor is not read
        environment |= conf.getjson(SECTION, "environment", fallback={})
        own = {
            "script": script,
            "spec": UNMOVED | given.pop("spec", {}),
            "environment": environment | given.pop("environment", {}),
        }
        output = conf.get(SECTION, "output_file", fallback=None)
        return {"name": f"{ti.dag_id}.{ti.task_id}"} | ({"output": output} if output else {}) | given | own

    def sync(self) -> None:
        """Check every `poll_interval_s` which jobs have ended."""
        if not self.jobs or time.monotonic() - self._polled_s < self._poll_s:
            return
        self._polled_s = time.monotonic()
        try:
            for key in [key for key, job_id in self.jobs.items() if not job_id]:
                job, _ = self._newest(self.keys[key])
                if job is None:
                    self._end(key, None)
                else:
                    self.jobs[key] = job["id"]
            still_open = self._open() if self.jobs else set()
            for key in [key for key, job_id in self.jobs.items() if job_id not in still_open]:
                try:
                    job = self._ask("GET", f"/v1/jobs/{self.jobs[key]}")
                except PenstockRefused:
                    self._end(key, None)
                    continue
                if job["state"] == "ended":
                    self._end(key, job)
        except Exception as error:
            self.log.warning("penstockd does not answer (%s); asking again at the next heartbeat", error)

    def try_adopt_task_instances(self, tis: Sequence[Any]) -> Sequence[Any]:
        """Adopt the jobs of a scheduler that has ended. Returns the tasks without a job.

        If penstockd does not answer, the jobs are unknown, and `sync` fails a task whose job it does not find later: that is
        better than a second run beside the first. penstockd is asked only once, because the scheduler waits meanwhile.
        """
        lost, away = [], False
        for ti in tis:
            key, job_id = job_key(ti.id), ""
            if not away:
                try:
                    job, _ = self._newest(key)
                except Exception as error:
                    self.log.warning(
                        "penstockd does not answer (%s): the jobs of running tasks are looked up later", error
                    )
                    away = True
                else:
                    if job is None or job["state"] == "ended":
                        lost.append(ti)
                        continue
                    job_id = job["id"]
            self._watch(ti.key, key, job_id)
        return lost

    def get_task_log(self, ti: Any, try_number: int) -> tuple[list[str], list[str]]:
        """The job's output, which is the task's log while it runs."""
        try:
            job, _ = self._newest(job_key(ti.id))
            if job is None:
                return ["penstockd has no job of this try"], []
            head = f"output of job {job['id']}, {self._hook.job_url(job['id'])}/page"
            return [head], ["\n".join(self._hook.log_lines(job["id"]))]
        except Exception as error:
            return [f"penstockd has no output of this task: {error}"], []

    def revoke_task(self, *, ti: Any) -> None:
        """Cancel a task's job, if it has one."""
        self.queued_tasks.pop(ti.key, None)
        self.running.discard(ti.key)
        self.keys.pop(ti.key, None)
        job_id = self.jobs.pop(ti.key, "")
        try:
            if not job_id:
                job, _ = self._newest(job_key(ti.id))
                if job is None:
                    return
                job_id = job["id"]
            self.revoked.add(job_id)
            self._cancel(job_id)
        except Exception as error:
            self.log.warning("the job of %s could not be cancelled: %s", ti.key, error)

    def end(self) -> None:
        """Do nothing: the next scheduler adopts running jobs."""

    def terminate(self) -> None:
        """Do nothing: the next scheduler adopts running jobs."""

    def _watch(self, key: Any, own: str, job_id: str) -> None:
        self.running.add(key)
        self.jobs[key], self.keys[key] = job_id, own

    def _end(self, key: Any, job: Job | None) -> None:
        del self.jobs[key], self.keys[key]
        if job is None:
            self.fail(key, "penstockd knows no job of this task")
        elif job["ended"] == "COMPLETED":
            self.success(key)
        else:
            self.fail(key, f"job {job['id']} has ended as {job['ended']}, exit code {job['exit_code']}")

    def _cancel(self, job_id: str) -> None:
        self._ask("POST", f"/v1/jobs/{job_id}/cancel")

    def _newest(self, stem: str) -> tuple[Job | None, int]:
        """The newest job of a task's try and its number; None and 0 if there is none."""
        newest, number = None, 0
        while jobs := self._ask("GET", "/v1/jobs", params={"key": f"{stem}:{number + 1}"})["jobs"]:
            newest, number = jobs[0], number + 1
        return newest, number

    def _open(self) -> set[str]:
        found: set[str] = set()
        query: dict[str, Any] = {"state": list(OPEN), "limit": 500}
        while True:
            page = self._ask("GET", "/v1/jobs", params=query)
            found |= {job["id"] for job in page["jobs"]}
            if page["next"] is None:
                return found
            query["after"] = page["next"]

    def _ask(self, method: str, path: str, **request: Any) -> Any:
        """Send a request once; twice if penstockd does not know the token any more. The next heartbeat tries again."""
        was_open = self._client is not None
        try:
            return self._send(method, path, **request)
        except PenstockRefused as refused:
            if refused.code != UNAUTHENTICATED or not was_open:
                raise
            self._close()
            return self._send(method, path, **request)
        except (httpx.TransportError, PenstockAway):
            self._close()  # the connection may have another address by now
            raise

    def _send(self, method: str, path: str, **request: Any) -> Any:
        if self._client is None:
            # Another thread reads the connection: the scheduler asks while it holds a session of its database, Airflow keeps one
            # session for each thread, and reading a connection closes the session of the thread that reads.
            with ThreadPoolExecutor(1) as thread:
                self._client = thread.submit(self._hook.get_conn).result()
        return read(self._client.request(method, path, timeout=TIMEOUT_S, **request))

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def job_key(task_instance_id: Any) -> str:
    """The common part of the keys of a try's jobs. Airflow gives each try an id of its own."""
    return f"airflow:executor:{task_instance_id}"
