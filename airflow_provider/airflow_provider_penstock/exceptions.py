"""The exceptions with which the provider's tasks fail."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

UNAUTHENTICATED = "unauthenticated"
"""The API's error code for a token that is unknown, revoked or expired."""


class PenstockRefused(AirflowFailException):
    """penstockd refused the request, and would refuse it again. The task fails at once, with penstockd's message."""

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        """The API's error code, such as `key-used`."""


class PenstockAway(AirflowException):
    """penstockd does not answer, or is overloaded. A retry may help."""


class PenstockTimeout(AirflowException):
    """The job has not ended within the task's `execution_timeout`. A retry has a new job."""


class PenstockJobFailed(AirflowException):
    """The job has ended, but not as COMPLETED."""


class PenstockJobInterrupted(PenstockJobFailed):
    """The job's node or another job ended it. A retry may help."""


class PenstockFunctionFailed(PenstockJobFailed):
    """The function of a `@task.penstock` raised an exception.

    The message has the traceback. `__cause__` is the exception, if it could be sent.
    """


class PenstockJobCancelled(PenstockJobFailed, AirflowFailException):
    """Somebody cancelled the job. The task fails at once: a retry would start again what a person stopped."""


class PenstockJobExhausted(PenstockJobFailed, AirflowFailException):
    """The job ran out of memory or time. A retry would too, so the task fails at once."""


INTERRUPTED = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
EXHAUSTED = frozenset({"OUT_OF_MEMORY", "TIMEOUT", "DEADLINE"})


def failure(state: str) -> type[PenstockJobFailed]:
    """The exception for a job that has ended in this state of Slurm."""
    if state in INTERRUPTED:
        return PenstockJobInterrupted
    if state == "CANCELLED":
        return PenstockJobCancelled
    return PenstockJobExhausted if state in EXHAUSTED else PenstockJobFailed
