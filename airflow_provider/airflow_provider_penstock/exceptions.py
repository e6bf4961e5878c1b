"""How tasks of the provider fail."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException


class PenstockRefused(AirflowFailException):
    """penstockd refused the request, in its own words: the task fails at once, as the same request is refused again."""

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        """The API's word for the kind of refusal, such as `key-used`."""


class PenstockAway(AirflowException):
    """penstockd does not answer, or cannot at the moment: a retry may help."""


class PenstockJobFailed(AirflowException):
    """The job has ended, and not well."""


class PenstockJobInterrupted(PenstockJobFailed):
    """The job was well and its node, or somebody else's job, ended it: a retry may help."""


class PenstockFunctionFailed(PenstockJobFailed):
    """The function of a `@task.penstock` raised; the message has its traceback, `__cause__` the exception if it could be sent."""


class PenstockJobExhausted(PenstockJobFailed, AirflowFailException):
    """The job ran out of memory or time: the same job would again, so that the task fails at once."""


INTERRUPTED = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
EXHAUSTED = frozenset({"OUT_OF_MEMORY", "TIMEOUT", "DEADLINE"})


def failure(state: str) -> type[PenstockJobFailed]:
    """The class for a job that has ended in this state of Slurm's."""
    if state in INTERRUPTED:
        return PenstockJobInterrupted
    return PenstockJobExhausted if state in EXHAUSTED else PenstockJobFailed
