"""Which failures of a task's job are retried."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow_provider_penstock.exceptions import PenstockAway, PenstockFunctionFailed, PenstockJobInterrupted


def retry_policy(delay: timedelta = timedelta(0)) -> Any:
    """A value for a task's `retry_policy`. Older versions than Airflow 3.3 only have `retries`.

    The policy retries, after `delay`, if the job's node or another job ended it (PREEMPTED, NODE_FAIL, BOOT_FAIL) or if penstockd
    does not answer. It does not retry a function that raised. Refused requests, OUT_OF_MEMORY, TIMEOUT and DEADLINE fail at once
    without any policy. Everything else follows the task's own settings.

    Raises:
        ImportError: this Airflow has no retry policies.
    """
    from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule

    def names(*kinds: type[Exception]) -> list[type[BaseException] | str]:
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]

    return ExceptionRetryPolicy(
        rules=[
            RetryRule(
                exception=names(PenstockJobInterrupted, PenstockAway),
                action=RetryAction.RETRY,
                retry_delay=delay,
                reason="the job's node or another job ended it, or penstockd does not answer",
            ),
            RetryRule(
                exception=names(PenstockFunctionFailed),
                action=RetryAction.FAIL,
                reason="the function raised an exception, and would again",
            ),
        ]
    )
