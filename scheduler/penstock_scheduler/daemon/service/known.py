"""What an API process knows now, and the clients that wait for it to change.

`Board` is filled by the round loop of the same process. `Replica` is filled from the store, into which another process publishes.
Endpoints that read use nothing else, so both give the same answers.
"""

from __future__ import annotations

import abc
import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock_scheduler.api.estimate_messages import Estimates
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.daemon.service.counts import Counts
from penstock_scheduler.model import ClusterState, Refusal
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.store.sql import SqlStore

LIVE = ("queued", "starting", "running", "stopping")
"""States of jobs that have not ended."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change that clients may listen to."""

    kind: str
    """`job` or `round`."""
    user: str
    """The user that may see it; empty: all users."""
    text: str
    """JSON."""
    number: int
    """Of a change of a job: its number in the order of all changes. Of a round: the round's number."""
    job: str = ""


Listener = Callable[[Event], None]


class Known(abc.ABC):
    """What is known now. Methods may be called from any thread."""

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.counters: Counter[str] = Counter()
        self.counts = Counts()
        self.state: ClusterState | None = None
        self.observed_s: float | None = None
        """When the cluster was last observed, s since 1970."""
        self.held: dict[str, int] = {}
        """Node -> GPUs that Penstock's jobs hold there."""
        self.estimates: Estimates | None = None
        """When the jobs of a recent round start and end; None: not estimated yet."""
        self.listeners: set[Listener] = set()
        self._live: dict[str, JobView] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        """Live job -> is set when the job changes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop on which clients wait."""
        self._loop = loop

    @property
    @abc.abstractmethod
    def record(self) -> RoundRecord | None:
        """The newest round. May read the store, and take seconds with very many jobs. Raises StoreError."""

    @property
    @abc.abstractmethod
    def round(self) -> tuple[int, dict[str, float]] | None:
        """The number of the newest round, and GPU type -> its price there; None: there was no round."""

    @abc.abstractmethod
    def figures_of(self, view: JobView) -> JobView:
        """A job with its live figures as of the newest tick. A job that has ended keeps those of its end."""

    def shown(self, view: JobView) -> JobView:
        """A job with its live figures and, unless it has ended, its newest estimate."""
        found = self.figures_of(view)
        estimates = self.estimates
        if view.state == "ended" or estimates is None:
            return found
        estimate = estimates.of(view.id, view.submit_s, waits=view.state == "queued")
        return found.model_copy(update={"estimate": estimate})

    def job(self, job: str) -> JobView | None:
        """A job, live or ended; None: there is none. Raises StoreError."""
        return self.live_job(job) or self.store.job(job)

    def live_job(self, job: str) -> JobView | None:
        """A job that has not ended; None: it has ended, or there is none."""
        view = self._live.get(job)
        return None if view is None else self.shown(view)

    def live(self) -> list[JobView]:
        """All jobs that have not ended, with the figures of their newest versions."""
        with self._lock:
            return list(self._live.values())

    def refusal(self, job: str) -> Refusal | None:
        """Why Penstock does not manage a job that has a job spec; None: it manages the job, or there is no job spec."""
        state = self.state
        return next((each for each in state.refused if each.job == job), None) if state is not None else None

    @property
    def awaited(self) -> frozenset[str]:
        """Jobs that clients wait for: they are answered at the job's next change."""
        return frozenset(self._waiting)

    async def wait_for_change(self, job: str, version: int, timeout_s: float) -> None:
        """Return when a live job's version is above `version` or it has ended, at the latest after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while (view := self._live.get(job)) is not None and view.version <= version:
            event = self._waiting.setdefault(job, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), max(until_s - time.monotonic(), 0.0))
            except TimeoutError:
                return

    def _stored(self) -> dict[str, JobView]:
        return {view.id: view for _, view in self.store.jobs(states=LIVE)}

    def _publish(self, event: Event) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, event)

    def _wake(self, event: Event) -> None:
        if (waiting := self._waiting.pop(event.job, None)) is not None:
            waiting.set()
        for listener in tuple(self.listeners):
            listener(event)
