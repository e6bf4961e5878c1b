"""Airflow owns the jobs of its tasks: jobs whose task Airflow has ended are cancelled, whatever was away when it ended.

A thread of each scheduler and triggerer does it, shortly after the start and then every few minutes. Workers do not: from
Airflow 3 on they may not read the database, and the token of a running task is for this task's state. They need not: without a
scheduler no worker is given a task, so that wherever a worker starts, a scheduler looks. `lease` is the second line, for jobs of
an Airflow that does not run any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

from airflow.models.connection import Connection
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import select, tuple_

from airflow_provider_penstock.exceptions import PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import OPEN, PenstockHook

log = logging.getLogger(__name__)

AT_ONCE = 200
"""Tasks that one query of the database asks for."""
EVERY_S = 300.0
"""Pause between two looks."""
ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States of tasks for which no job may run. A task that is to be tried again takes up its job."""


@dataclass(frozen=True)
class TaskOfJob:
    """The task that a job's key names."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int


States = dict[TaskOfJob, tuple[str | None, int]]
"""Task -> its state and `max_tries`."""


def task_of(key: str | None, deployment: str) -> TaskOfJob | None:
    """The task of this Airflow that the key of a submission names, if it names one and was not too long to be readable."""
    start = f"airflow:{deployment}:"
    if key is None or not key.startswith(start):
        return None
    dag_id, _, rest = key.removeprefix(start).partition(":")
    try:
        run_id, task_id, map_index, _ = rest.rsplit(":", 3)
        return TaskOfJob(dag_id, run_id, task_id, int(map_index))
    except ValueError:
        return None


def is_over(state: str | None, max_tries: int, generation: str) -> bool:
    """Whether Airflow has ended the task of a job of this generation: it has ended, or was cleared and has not begun again."""
    if state in ENDED:
        return True
    of_job = generation.split(":")[1:2]
    return state is None and of_job != [] and of_job[0].isdigit() and int(of_job[0]) < max_tries


def look(hook: PenstockHook, states: Callable[[set[TaskOfJob]], States]) -> list[str]:
    """Cancel the jobs whose tasks are over. Returns their ids.

    A job without a lease is to outlive its task. A task that Airflow does not have any more says nothing about its job: its
    database may be another one.

    Args:
        hook: of the connection.
        states: asked after Penstock, so that no state is older than a job.
    """
    jobs = list(open_jobs(hook))
    found = states({task for _, _, task in jobs}) if jobs else {}
    cancelled = []
    for job_id, key, task in jobs:
        state, max_tries = found.get(task, ("unknown", 0))
        if state is not None and state not in ENDED:
            continue
        owner = hook.owner(key.rpartition(":")[0])
        if owner is None or owner["job"] != job_id or owner.get("lease_s") is None:
            continue
        if is_over(state, max_tries, owner["generation"]):
            hook.cancel(job_id, for_owner=True)
            log.warning("job %s is cancelled: Airflow has ended its task %s as %s", job_id, task, state or "cleared")
            cancelled.append(job_id)
    return cancelled


def open_jobs(hook: PenstockHook) -> Iterator[tuple[str, str, TaskOfJob]]:
    """The jobs of this Airflow's tasks that have not ended: id, key and task."""
    deployment, query = hook.deployment, {"state": list(OPEN), "limit": 500}
    while True:
        page = hook.ask("GET", "/v1/jobs", params=query, pauses_s=())
        for job in page["jobs"]:
            if (task := task_of(job["key"], deployment)) is not None:
                yield job["id"], job["key"], task
        if page["next"] is None:
            return
        query["after"] = page["next"]


def states_of(tasks: set[TaskOfJob]) -> States:
    """The states of tasks in Airflow's database. Tasks that it does not have are left out."""
    columns = [getattr(TaskInstance, name) for name in ("dag_id", "run_id", "task_id", "map_index")]
    wanted = [astuple(task) for task in tasks]
    found: States = {}
    with create_session() as session:
        for first in range(0, len(wanted), AT_ONCE):
            query = select(*columns, TaskInstance.state, TaskInstance.max_tries)
            for row in session.execute(query.where(tuple_(*columns).in_(wanted[first : first + AT_ONCE]))):
                found[TaskOfJob(*row[:4])] = (row[4], row[5])
    return found


def connections() -> list[str]:
    """The connections of type `penstock` in Airflow's database and in variables, and the default one."""
    with create_session() as session:
        found = set(session.execute(select(Connection.conn_id).where(Connection.conn_type == "penstock")).scalars())
    names = [name for name in os.environ if name.startswith("AIRFLOW_CONN_PENSTOCK")]
    found |= {name.removeprefix("AIRFLOW_CONN_").lower() for name in names}
    return sorted(found | {PenstockHook.default_conn_name})


def look_everywhere() -> None:
    """Look at the jobs of every connection. One that does not answer, or does not work, is looked at the next time."""
    for conn_id in connections():
        try:
            look(PenstockHook(conn_id), states_of)
        except (PenstockAway, PenstockRefused) as error:
            log.info("jobs of %s whose tasks have ended are looked for later: %s", conn_id, error)
        except Exception as error:  # such as an absent connection: the component that runs this thread must go on
            log.debug("jobs of %s whose tasks have ended cannot be looked for: %s", conn_id, error)


def keep_looking() -> None:
    """Look every few minutes, without end."""
    while True:
        try:
            look_everywhere()
        except Exception as error:  # such as that of the database
            log.warning("jobs whose tasks have ended are looked for later: %s", error)
        time.sleep(EVERY_S)
