"""When a task whose job has failed is tried again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow_provider_penstock.exceptions import PenstockAway, PenstockFunctionFailed, PenstockJobInterrupted


def retry_policy(delay: timedelta = timedelta(0)) -> Any:
    """For a task's `retry_policy`, from Airflow 3.3 on; in older versions the task's `retries` alone count.

    A job that its node or another job ended (PREEMPTED, NODE_FAIL, BOOT_FAIL) is tried again after `delay`, as is a daemon that
    does not answer; a function that raised is not. Refused requests, OUT_OF_MEMORY, TIMEOUT and DEADLINE fail at once without
    any policy. All else goes by the task's own settings.

    Raises:
        ImportError: this Airflow has no retry policies.
    """
    from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule

    def names(*kinds: type[Exception]) -> list[str]:
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]

    return ExceptionRetryPolicy(
        rules=[
            RetryRule(
                exception=names(PenstockJobInterrupted, PenstockAway),
                action=RetryAction.RETRY,
                retry_delay=delay,
                reason="the job was well: its node, another job or the daemon's absence ended it",
            ),
            RetryRule(
                exception=names(PenstockFunctionFailed),
                action=RetryAction.FAIL,
                reason="the function raised, and would again",
            ),
        ]
    )
