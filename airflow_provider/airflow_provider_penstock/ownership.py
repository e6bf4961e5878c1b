"""What a task of Airflow is to penstockd: the owner of its jobs. penstockd keeps one job for an owner."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(r"[A-Za-z0-9_.:@/+-]{1,200}")
_MOST_TRIES = 1000
"""`attempt` has a try's number in its last three digits."""


@dataclass(frozen=True)
class Ownership:
    """One try of a task, in the words of penstockd's API. Texts that the API would not take are replaced by their SHA-256.

    A DAG run is identified by its start, not only by its name: a run that was deleted may be triggered again with the same name.
    Airflow changes the start only when it starts the run, or a run that has ended is cleared.
    """

    name: str
    """The task: the same over all its tries, also those of deleted DAG runs."""
    generation: str
    """Changes when the task runs anew: when it is cleared, or the DAG run is deleted and triggered again.

    Airflow sets `max_tries` when it creates the task, and raises it when the task is cleared. It does not change with `retries`.
    """
    attempt: int
    """Grows with each try."""
    key: str
    """The key of this try's submission."""
    lease_s: float | None = None
    """Seconds after which penstockd cancels the job if nothing waits for it."""

    @property
    def body(self) -> dict[str, Any]:
        """The field `owner` of a submission."""
        body = {"name": self.name, "generation": self.generation, "attempt": self.attempt}
        return body if self.lease_s is None else body | {"lease_s": self.lease_s}


def ownership(context: Any, deployment: str) -> Ownership:
    """The ownership of the try that a context is of. `deployment` names this Airflow."""
    ti = context["ti"]
    start_ms = round(context["dag_run"].start_date.timestamp() * 1000)
    task = f"{deployment}:{ti.dag_id}:{ti.run_id}:{ti.task_id}:{ti.map_index}"
    attempt = start_ms * _MOST_TRIES + min(ti.try_number, _MOST_TRIES - 1)
    return Ownership(
        name=_fit(f"airflow:{task}"),
        generation=f"{start_ms}:{ti.max_tries}",
        attempt=attempt,
        key=_fit(f"airflow:{task}:{attempt}"),
    )


def _fit(text: str) -> str:
    return text if _KEY.fullmatch(text) else f"airflow:{hashlib.sha256(text.encode()).hexdigest()}"
