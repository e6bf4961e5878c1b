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
    Airflow changes the start if a run that has ended is cleared or queued again. From Airflow 3.3 on, the start that the task's
    first try has seen is therefore kept in the task's state store, which Airflow deletes with the run.
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
    start_ms = _start_ms(context)
    task = f"{deployment}:{ti.dag_id}:{ti.run_id}:{ti.task_id}:{ti.map_index}"
    attempt = start_ms * _MOST_TRIES + min(ti.try_number, _MOST_TRIES - 1)
    return Ownership(
        name=_fit(f"airflow:{task}"),
        generation=f"{start_ms}:{ti.max_tries}",
        attempt=attempt,
        key=_fit(f"airflow:{task}:{attempt}"),
    )


KEPT = "penstock"
"""Key in the task's state store. Its value is made once, by the task's first submission."""


def kept(context: Any) -> dict[str, Any]:
    """The values that earlier tries of the task have kept; an empty dictionary before Airflow 3.3."""
    store = context.get("task_state_store")
    found = None if store is None else store.get(KEPT)
    return found if isinstance(found, dict) else {}


def keep(context: Any, **values: Any) -> None:
    """Keep values for later tries of the task, and for those after a clear. Does nothing before Airflow 3.3."""
    store = context.get("task_state_store")
    if store is None:
        return
    try:
        from airflow.sdk.execution_time.context import NEVER_EXPIRE
    except ImportError:
        store.set(KEPT, kept(context) | values)
    else:
        store.set(KEPT, kept(context) | values, retention=NEVER_EXPIRE)


def _start_ms(context: Any) -> int:
    """The start of the DAG run, as the task's first try has seen it, in ms."""
    if "start_ms" not in (known := kept(context)):
        known = {"start_ms": round(context["dag_run"].start_date.timestamp() * 1000)}
        keep(context, **known)
    return int(known["start_ms"])


def _fit(text: str) -> str:
    return text if _KEY.fullmatch(text) else f"airflow:{hashlib.sha256(text.encode()).hexdigest()}"
