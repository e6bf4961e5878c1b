"""What `airflow penstock check` does."""

from __future__ import annotations

import os
import sys
from typing import Any

from airflow.providers.common.compat.sdk import conf

from airflow_provider_penstock.hooks.penstock import PenstockHook

SHORT_WAIT_S = 600.0
"""Airflow's default of `[scheduler] task_queued_timeout`. After it the scheduler revokes a task that has not begun."""


def check(arguments: Any) -> None:
    """Print a line for each thing that was looked at. Exits with status 1 if one of them has to be changed."""
    # As in Airflow's own processes. Without it, Airflow 3 looks for connections everywhere but in its database.
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    lines = [connection(arguments.conn_id)]
    if "PenstockExecutor" in conf.get("core", "executor"):
        lines.append(executor())
    for is_good, sentence in lines:
        print("ok:    " if is_good else "change:", sentence)  # noqa: T201 # a command's output
    if not all(is_good for is_good, _ in lines):
        sys.exit(1)


def connection(conn_id: str) -> tuple[bool, str]:
    """Whether a connection works, and a sentence."""
    try:
        is_good, sentence = PenstockHook(conn_id).test_connection()
    except Exception as error:  # such as: there is no such connection
        return False, f"connection {conn_id}: {error}"
    return is_good, f"connection {conn_id}: {sentence}"


def executor() -> tuple[bool, str]:
    """Whether tasks of PenstockExecutor may wait long enough for their GPUs, and a sentence."""
    timeout_s = conf.getfloat("scheduler", "task_queued_timeout", fallback=SHORT_WAIT_S)
    sentence = (
        f"[scheduler] task_queued_timeout is {timeout_s:.0f} s: a task of PenstockExecutor whose job waits longer for its GPUs "
        "is queued again, and then fails"
    )
    if timeout_s <= SHORT_WAIT_S:
        return False, f"{sentence}; set it above the longest wait in the queue"
    return True, sentence
