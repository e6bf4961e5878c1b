"""An Airflow executor that runs tasks as Slurm jobs, for tasks that need a GPU themselves. Needs Airflow 3."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from airflow.executors.base_executor import BaseExecutor
from airflow.providers.common.compat.sdk import conf

from airflow_provider_penstock.cli import check
from airflow_provider_penstock.exceptions import UNAUTHENTICATED, PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import OPEN, Job, PenstockHook, did_not_answer, read
from airflow_provider_penstock.news import ending
from airflow_provider_penstock.silence import Silence

log = logging.getLogger(__name__)

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


SILENT = (httpx.TransportError, PenstockAway)
"""The errors of a penstockd that does not answer."""
PATH = f"{__name__}.PenstockExecutor"
"""As Airflow's settings name the executor."""


def connection_of(executor_config: Any) -> str:
    """The connection for a task's jobs: `conn_id` of `executor_config["penstock"]`, else that of the settings."""
    given = executor_config.get("penstock") if isinstance(executor_config, dict) else None
    conn_id = given.get("conn_id") if isinstance(given, dict) else None
    return str(conn_id or conf.get(SECTION, "conn_id", fallback=PenstockHook.default_conn_name))


class Line:
    """The executor's line to the penstockd of one connection: an HTTP client that stays open."""

    def __init__(self, conn_id: str) -> None:
        self.hook = PenstockHook(conn_id)
        self.silence = Silence(log, f"the executor keeps waiting for the jobs of {conn_id}")
        self._client: httpx.Client | None = None

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """Send a request once; twice if penstockd does not know the token any more. The next heartbeat tries again."""
        was_open = self._client is not None
        try:
            answer = self._send(method, path, **request)
        except PenstockRefused as refused:
            if refused.code != UNAUTHENTICATED or not was_open:
                raise
            self._close()
            return self._send(method, path, **request)
        except (httpx.TransportError, PenstockAway) as error:
            if self._client is not None:
                did_not_answer(self._client)
            self._close()  # the connection may have another address by now
            self.silence.goes_on(error)
            raise
        self.silence.ends()
        return answer

    def _send(self, method: str, path: str, **request: Any) -> Any:
        if self._client is None:
            # Another thread reads the connection: the scheduler asks while it holds a session of its database, Airflow keeps one
            # session for each thread, and reading a connection closes the session of the thread that reads.
            with ThreadPoolExecutor(1) as thread:
                self._client = thread.submit(self.hook.get_conn).result()
        return read(self._client.request(method, path, timeout=TIMEOUT_S, **request))

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def find(self, key: str) -> Job | None:
        """The job with a key; None if there is none."""
        jobs = self.ask("GET", "/v1/jobs", params={"key": key})["jobs"]
        return jobs[0] if jobs else None

    def newest(self, stem: str) -> tuple[Job | None, int]:
        """The newest job of a task's try and its number; None and 0 if there is none."""
        newest, number = None, 0
        while (job := self.find(f"{stem}:{number + 1}")) is not None:
            newest, number = job, number + 1
        return newest, number

    def open(self) -> set[str]:
        """The keys of the jobs that have not ended."""
        found: set[str] = set()
        query: dict[str, Any] = {"state": list(OPEN), "limit": 500}
        while True:
            page = self.ask("GET", "/v1/jobs", params=query)
            found |= {job["key"] for job in page["jobs"]}
            if page["next"] is None:
                return found
            query["after"] = page["next"]

    def cancel(self, job: Job) -> None:
        """Cancel a job that was found a moment ago."""
        if job["state"] != "ended":
            self.ask("POST", f"/v1/jobs/{job['id']}/cancel")


@dataclass
class Watched:
    """A task that was handed to Slurm."""

    line: Line
    stem: str
    """The common part of the keys of its jobs."""
    key: str
    """That of its newest job. Empty while it is unknown, because penstockd did not answer.

    Not the job's id: a slurmctld that was killed may give the id of a job that it has lost to the next one.
    """


class PenstockExecutor(BaseExecutor):
    """Runs a task with `executor="PenstockExecutor"` as a Slurm job, described by `executor_config={"penstock": {...}}`.

    A job's key has the id of the task's try and a number, because a task that defers itself runs several times in one try. So a
    scheduler that was killed finds its jobs again. No error here may end the scheduler, not even a deleted connection: errors are
    logged, and the next heartbeat tries again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines: dict[str, Line] = {}
        """By connection."""
        self._poll_s = conf.getfloat(SECTION, "poll_interval_s", fallback=2.0)
        self._polled_s = float("-inf")
        self.watched: dict[Any, Watched] = {}
        """By the keys of running tasks."""
        self.revoked: set[str] = set()
        """Keys of jobs that must end, although their task may be queued again with the same id."""

    def start(self) -> None:
        """Warn about a setting with which the scheduler revokes tasks that wait in Slurm's queue."""
        is_good, sentence = check.executor()
        if not is_good:
            self.log.warning("%s", sentence)

    def _process_workloads(self, workloads: Sequence[Any]) -> None:
        """Submit each workload. Those that penstockd does not accept now stay queued for the next heartbeat."""
        away = set()  # each is asked only once, because the scheduler waits meanwhile
        for workload in workloads:
            key, line = workload.ti.key, self._line(workload.ti)
            if key in self.watched:  # it was deferred or rescheduled, and its last job has not ended yet
                continue
            if line in away:
                continue
            try:
                job = self._submit(workload)
            except PenstockRefused as refused:
                self.queued_tasks.pop(key, None)
                self.fail(key, str(refused))
                continue
            except Exception as error:
                self._say_unless_silent(error, f"{key} stays queued")
                away.add(line)
                continue
            self.queued_tasks.pop(key, None)
            self._watch(workload.ti, job["key"])
            self.running_state(key, job["id"])

    def _submit(self, workload: Any) -> Job:
        stem, line = job_key(workload.ti.id), self._line(workload.ti)
        newest, number = line.newest(stem)
        if newest is not None and newest["state"] != "ended":
            if newest["key"] not in self.revoked:
                return newest
            line.cancel(newest)  # again, because penstockd may not have answered
        return dict(line.ask("POST", "/v1/jobs", json=self.submission(workload) | {"key": f"{stem}:{number + 1}"}))

    def _line(self, ti: Any) -> Line:
        conn_id = connection_of(ti.executor_config)
        return self._lines.setdefault(conn_id, Line(conn_id))

    def submission(self, workload: Any) -> dict[str, Any]:
        """The body for the API, without its key."""
        ti = workload.ti
        given = dict((ti.executor_config or {}).get("penstock", {}))
        given.pop("conn_id", None)
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
        if not self.watched or time.monotonic() - self._polled_s < self._poll_s:
            return
        self._polled_s = time.monotonic()
        for line in {id(each.line): each.line for each in self.watched.values()}.values():
            try:
                self._sync(line)
            except Exception as error:
                self._say_unless_silent(error, "asking again at the next heartbeat")

    def _say_unless_silent(self, error: Exception, outcome: str) -> None:
        """Log what went wrong at a heartbeat, unless Penstock did not answer: its line's `Silence` tells that, and only once."""
        if not isinstance(error, SILENT):
            self.log.warning("%s: %s", outcome, error)

    def _sync(self, line: Line) -> None:
        ours = {key: each for key, each in self.watched.items() if each.line is line}
        for key, each in list(ours.items()):
            if not each.key:
                job, _ = line.newest(each.stem)
                if job is None:
                    self._end(key, None)
                    del ours[key]
                else:
                    each.key = job["key"]
        still_open = line.open() if ours else set()
        for key, each in ours.items():
            if each.key not in still_open:
                job = line.find(each.key)
                if job is None or job["state"] == "ended":
                    self._end(key, job)

    def try_adopt_task_instances(self, tis: Sequence[Any]) -> Sequence[Any]:
        """Adopt the jobs of a scheduler that has ended. Returns the tasks without a job.

        If penstockd does not answer, the jobs are unknown, and `sync` fails a task whose job it does not find later: that is
        better than a second run beside the first. A penstockd is asked only once, because the scheduler waits meanwhile.
        """
        lost: list[Any] = []
        away: set[Line] = set()
        for ti in tis:
            found, line = "", self._line(ti)
            if line not in away:
                try:
                    job, _ = line.newest(job_key(ti.id))
                except Exception as error:
                    self.log.warning(
                        "penstockd does not answer (%s): the jobs of running tasks are looked up later", error
                    )
                    away.add(line)
                else:
                    if job is None or job["state"] == "ended":
                        lost.append(ti)
                        continue
                    found = job["key"]
            self._watch(ti, found)
        return lost

    def get_task_log(self, ti: Any, try_number: int) -> tuple[list[str], list[str]]:
        """The job's output, which is the task's log while it runs."""
        line = self._line(ti)
        try:
            job, _ = line.newest(job_key(ti.id))
            if job is None:
                return ["penstockd has no job of this try"], []
            head = f"output of job {job['id']}, {line.hook.job_url(job['id'])}/page"
            return [head], ["\n".join(line.hook.log_lines(job["id"]))]
        except SILENT as error:
            return [f"{line.silence.sentence(error)}; the task keeps waiting for its job"], []
        except Exception as error:
            return [f"penstockd has no output of this task: {error}"], []

    def revoke_task(self, *, ti: Any) -> None:
        """Cancel a task's job, if it has one."""
        self.queued_tasks.pop(ti.key, None)
        self.running.discard(ti.key)
        known, line = self.watched.pop(ti.key, None), self._line(ti)
        try:
            if known and known.key:
                self.revoked.add(known.key)
            job, _ = line.newest(job_key(ti.id))
            if job is not None:
                self.revoked.add(job["key"])
                line.cancel(job)
        except Exception as error:
            self.log.warning("the job of %s could not be cancelled: %s", ti.key, error)

    def end(self) -> None:
        """Do nothing: the next scheduler adopts running jobs."""

    def terminate(self) -> None:
        """Do nothing: the next scheduler adopts running jobs."""

    def _watch(self, ti: Any, key: str) -> None:
        self.running.add(ti.key)
        self.watched[ti.key] = Watched(self._line(ti), job_key(ti.id), key)

    def _end(self, key: Any, job: Job | None) -> None:
        del self.watched[key]
        if job is None:
            self.fail(key, "penstockd knows no job of this task")
        elif job["ended"] == "COMPLETED":
            self.success(key)
        else:
            self.fail(key, ending(job))


def job_key(task_instance_id: Any) -> str:
    """The common part of the keys of a try's jobs. Airflow gives each try an id of its own."""
    return f"airflow:executor:{task_instance_id}"
