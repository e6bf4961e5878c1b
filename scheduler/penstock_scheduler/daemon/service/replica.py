"""What an API process of its own knows: a copy of penstockd's board, read from the store a few times a second."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from penstock_scheduler.api.estimate_messages import Estimates
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.daemon.service.known import Event, Known
from penstock_scheduler.daemon.service.port import Chosen
from penstock_scheduler.daemon.service.publisher import BEAT, CHOSEN, CLUSTER, ESTIMATES, ROUND, Beat, Cluster, Round
from penstock_scheduler.model import ClusterState
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import PenstockError, StoreError
from penstock_scheduler.store.leadership.leader_table import LeaderTable
from penstock_scheduler.store.leadership.site_clock import SITE_CLOCK, site_time_s
from penstock_scheduler.store.published import LiveFigures
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

READ_S = 0.2
"""How often the store is read."""
SILENT_S = 10.0
"""penstockd publishes once a second or more often. After this time it counts as silent."""
PAGE = 1000
ASK_TIME_S = 10.0
"""How often a database server is asked for its time."""
ROUNDS = 100
"""Most rounds that are told of after a pause."""

_CLUSTER = TypeAdapter(Cluster)


class Replica(Known):
    """See `Known`. `refresh` and `follow` read the store; all else answers from memory."""

    def __init__(self, store: SqlStore) -> None:
        super().__init__(store)
        self.chosen: Chosen
        self.beat: Beat
        self.on_tokens: Callable[[], None] = lambda: None
        """Called when tokens have been made or revoked."""
        self._round: Round | None = None
        self._record: tuple[int, RoundRecord | None] | None = None
        self._figures: dict[str, LiveFigures] = {}
        self._read: dict[str, Any] = {}
        """Name -> what was read last under this name."""
        self._reading = threading.Lock()
        self._loading = threading.Lock()
        self._failing = False
        self._time_due_s = 0.0
        self._changed = store.newest_job_change()
        self._figures_changed = 0
        self._live = self._stored()
        if store.published(BEAT) is None:
            raise PenstockError(
                f"{store.name}: penstockd has published nothing here; set [api] embedded = false, and start penstockd first"
            )
        self._take()

    @property
    def silent_since_s(self) -> float | None:
        """When penstockd last published, s since 1970; None: it does."""
        return self.beat.time_s if self.beat.stopped or site_time_s() - self.beat.time_s > SILENT_S else None

    @property
    def round(self) -> tuple[int, dict[str, float]] | None:
        """See `Known`."""
        return None if self._round is None else (self._round.number, self._round.prices)

    @property
    def record(self) -> RoundRecord | None:
        """See `Known`. It is read when it is asked for the first time."""
        newest = self._round
        if newest is None:
            return None
        with self._loading:
            if self._record is None or self._record[0] != newest.number:
                self._record = newest.number, self.store.round(newest.number)
            return self._record[1]

    def figures_of(self, view: JobView) -> JobView:
        """See `Known`."""
        figures = self._figures.get(view.id)
        if view.state == "ended" or figures is None:
            return view
        gpu_seconds = figures.gpu_seconds_at(self.observed_s or figures.at_s) or view.gpu_seconds
        progress = view.progress if figures.progress is None else figures.progress
        total = view.total if figures.progress is None else figures.total
        return view.model_copy(update={"progress": progress, "total": total, "gpu_seconds": gpu_seconds})

    async def refresh(self) -> None:
        """Read the store now. What penstockd has published before this call is known when it returns."""
        try:
            await asyncio.to_thread(self._take)
        except StoreError as error:
            if not self._failing:
                log.error("the store cannot be read", extra={"text": str(error)})
            self._failing = True
        except Exception:  # what cannot be read now must not end the reading
            log.exception("reading the store failed unexpectedly; please report this as a bug")
        else:
            self._failing = False

    async def follow(self) -> None:
        """Read the store again and again."""
        while True:
            await self.refresh()
            await asyncio.sleep(READ_S)

    def _take(self) -> None:
        with self._reading:
            self._take_time()
            self._take_beat()
            self._take_jobs()
            for number, job, figures in self.store.figures_changed(self._figures_changed):
                self._figures_changed = number
                self._figures[job] = figures
            for job in self._figures.keys() - self._live.keys():
                del self._figures[job]

    def _take_time(self) -> None:
        """Go by the clock that penstockd goes by, which may run on another host."""
        if self.store.file is None and time.monotonic() >= self._time_due_s:
            SITE_CLOCK.ask(LeaderTable(self.store.engine, self.store.name).time_s)
            self._time_due_s = time.monotonic() + ASK_TIME_S

    def _take_beat(self) -> None:
        found = self.store.published(BEAT)
        if found == self._read.get(BEAT):
            return
        self._read[BEAT] = found
        beat = Beat.model_validate(found, extra="ignore")
        self.beat = beat
        if (cluster := self._news(CLUSTER, beat)) is not None:
            known = _CLUSTER.validate_python(cluster)
            self.held = known.held
            self.state = ClusterState(known.nodes, (), refused=known.refused, unknown=known.unknown)
        if (chosen := self._news(CHOSEN, beat)) is not None:
            self.chosen = Chosen.model_validate(chosen, extra="ignore")
        if (newest := self._news(ROUND, beat)) is not None:
            before, self._round = self._round, Round.model_validate(newest, extra="ignore")
            self._tell_of_rounds(None if before is None else before.number)
        if (estimates := self._news(ESTIMATES, beat)) is not None:
            self.estimates = Estimates.model_validate(estimates)
        tokens = (beat.pid, beat.started_s, beat.versions.get("tokens"))
        if self._read.get("tokens") != tokens:
            self._read["tokens"] = tokens
            self.on_tokens()
        self.observed_s = beat.observed_s

    def _news(self, name: str, beat: Beat) -> Any:
        """What is published under a name if it has changed since it was read; None: it has not."""
        version = (beat.pid, beat.started_s, beat.versions.get(name))
        if version[2] is None or self._read.get(name) == version:
            return None
        self._read[name] = version
        return self.store.published(name)

    def _tell_of_rounds(self, after: int | None) -> None:
        if after is None:
            return
        for summary in reversed(self.store.summaries(None, ROUNDS)):
            if summary.round > after:
                self._publish(Event("round", "", summary.model_dump_json(), summary.round))

    def _take_jobs(self) -> None:
        while True:
            found = self.store.jobs_changed(self._changed, limit=PAGE)
            with self._lock:
                for number, view in found:
                    self._changed = number
                    if view.state == "ended":
                        self._live.pop(view.id, None)
                    else:
                        self._live[view.id] = view
            for number, view in found:
                self._publish(Event("job", view.user, view.model_dump_json(), number, view.id))
            if len(found) < PAGE:
                return
