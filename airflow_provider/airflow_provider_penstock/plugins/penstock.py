"""Links on tasks of PenstockExecutor, and what schedulers and triggerers do beside their own work.

Their operators are not the provider's, so that Airflow asks a plugin for the links of every task. Every process of Airflow loads
this module, so that what makes a link is imported only then.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

from airflow.providers.common.compat.sdk import AirflowPlugin, BaseOperatorLink, conf

from airflow_provider_penstock.links.penstock import PenstockExplainLink, PenstockJobLink

log = logging.getLogger(__name__)

BEGIN_S = 10.0
"""Pause before the first look for jobs of tasks that have ended. The component starts meanwhile."""


def page_of(ti_key: Any) -> str:
    """The page of the job of a task of PenstockExecutor; empty if another executor ran the task, or if it has no job yet."""
    try:
        return _page_of(ti_key)
    except Exception as error:  # such as a deleted connection: a link must not break the page of a task
        log.warning("no link to the job of %s: %s", ti_key, error)
        return ""


def _page_of(ti_key: Any) -> str:
    from airflow.executors.executor_loader import ExecutorLoader
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.taskinstancehistory import TaskInstanceHistory
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_provider_penstock.executors.penstock import PATH, connection_of
    from airflow_provider_penstock.hooks.penstock import PenstockHook

    with create_session(scoped=False) as session:
        for table in (TaskInstance, TaskInstanceHistory):
            found = session.execute(
                select(table.executor, table.executor_config, table.external_executor_id).where(
                    table.dag_id == ti_key.dag_id,
                    table.run_id == ti_key.run_id,
                    table.task_id == ti_key.task_id,
                    table.map_index == ti_key.map_index,
                    table.try_number == ti_key.try_number,
                )
            ).first()
            if found is not None:
                break
    if found is None or not found.external_executor_id:
        return ""
    name = found.executor
    executor = ExecutorLoader.lookup_executor_name_by_str(name) if name else ExecutorLoader.get_default_executor_name()
    if executor.module_path != PATH:
        return ""
    job = PenstockHook(connection_of(found.executor_config)).job_url(found.external_executor_id)
    return f"{job}/page"


class ExecutorJobLink(BaseOperatorLink):
    """Link to the job's page."""

    name = PenstockJobLink.name

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The URL; empty if the task has no job of PenstockExecutor."""
        return page_of(ti_key)


class ExecutorExplainLink(BaseOperatorLink):
    """Link to the explanation of the job's GPUs on its page."""

    name = PenstockExplainLink.name

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The URL; empty if the task has no job of PenstockExecutor."""
        page = page_of(ti_key)
        return f"{page}#explain" if page else ""


def _keep_looking() -> None:
    time.sleep(BEGIN_S)
    from airflow_provider_penstock.reconciling import keep_looking

    keep_looking()


class PenstockPlugin(AirflowPlugin):
    """The links, for every task of an Airflow that has PenstockExecutor, and what begins with a component."""

    name = "penstock"
    is_used = "PenstockExecutor" in conf.get("core", "executor")
    global_operator_extra_links = [ExecutorJobLink(), ExecutorExplainLink()] if is_used else []

    @classmethod
    def on_load(cls, *_: Any, **__: Any) -> None:
        """Let schedulers and triggerers cancel the jobs of tasks that Airflow has ended. Airflow calls this in all processes.

        No listener does it: if there is one, Airflow refuses tasks with `end_from_trigger`.
        """
        if sys.argv[1:2] in (["scheduler"], ["triggerer"]):  # they may read Airflow's database, which workers may not
            threading.Thread(target=_keep_looking, name="penstock-reconciling", daemon=True).start()
