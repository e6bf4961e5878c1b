"""The stream of events of one client: a snapshot or what it has missed, then each change, at most once a second for each job.

Changes of jobs are numbered in the store, in the order in which they were made. An event carries the whole job, so a client that
has been away needs the newest state of each job that has changed since, and nothing else. So a stream goes on without a gap and
without a double in another process, and after a restart of penstockd or of the API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock_scheduler.api.messages import JobView
from penstock_scheduler.daemon.service.known import LIVE, Event, Known

EACH_S = 1.0
"""Shortest time between two events of one job."""
KEEP_ALIVE_S = 15.0
PAGE = 500
"""Jobs of one event `snapshot`."""
MOST_PENDING = 50_000
"""Events that wait for one client. A client that is further behind is disconnected, and may go on after its last event."""
MOST_MISSED = 5000
"""Jobs that a client may have missed. One that has missed more gets a snapshot."""
MOST_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Position:
    """What a client has seen: changes of jobs up to a number, and rounds up to a number. `id:` of the events."""

    change: int
    round: int

    def __str__(self) -> str:
        return f"{self.change}.{self.round}"

    @classmethod
    def read(cls, given: str | None) -> Position | None:
        """A client's `Last-Event-ID`; None: there is none, or it is not one of ours."""
        change, dot, number = (given or "").partition(".")
        if not dot or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in (change, number)):
            return None
        return cls(int(change), int(number))


class Stream:
    """Belongs to the API's event loop.

    Args:
        user: the user whose jobs the client may see; None: those of all users.
        seen: what the client has seen before; None: nothing.
    """

    def __init__(self, known: Known, user: str | None, seen: Position | None) -> None:
        self._known, self._user, self._seen = known, user, seen
        self._pending: dict[tuple[str, str | int], Event] = {}
        """(kind, job or number of the round) -> its newest event."""
        self._newer: dict[str, int] = {}
        """Job -> number of the change that the client has, of jobs that changed while the snapshot was read."""
        self._there = asyncio.Event()
        self._open = True
        self._known.listeners.add(self._listen)

    def close(self) -> None:
        """Stop listening."""
        self._open = False
        self._known.listeners.discard(self._listen)

    def _listen(self, event: Event) -> None:
        if self._user is not None and event.user not in ("", self._user):
            return
        self._pending[event.kind, event.job or event.number] = event
        if len(self._pending) > MOST_PENDING:
            self.close()  # the client does not read; its events must not pile up
        self._there.set()

    async def messages(self) -> AsyncIterator[str]:
        """The events, as text."""
        yield ": connected\n\n"
        at = await self._resume()
        if at is None:
            newest = self._known.round
            at = Position(
                await asyncio.to_thread(self._known.store.newest_job_change), 0 if newest is None else newest[0]
            )
            async for text in self._snapshot(at):
                yield text
        else:
            for event in await asyncio.to_thread(self._missed, at):
                at = _after(at, event)
                yield _text(at, event.kind, event.text)
        while self._open:
            try:
                await asyncio.wait_for(self._there.wait(), KEEP_ALIVE_S)
            except TimeoutError:
                yield ": keep-alive\n\n"
                continue
            self._there.clear()
            pending, self._pending = self._pending, {}
            for event in sorted(pending.values(), key=lambda event: (event.kind, event.number)):
                if self._is_news(at, event):
                    at = _after(at, event)
                    yield _text(at, event.kind, event.text)
            await asyncio.sleep(EACH_S)

    def _is_news(self, at: Position, event: Event) -> bool:
        if event.kind == "round":
            return event.number > at.round
        return event.number > self._newer.get(event.job, at.change)

    async def _resume(self) -> Position | None:
        """Where the client goes on; None: it needs a snapshot."""
        seen, store = self._seen, self._known.store
        if seen is None or seen.change > await asyncio.to_thread(store.newest_job_change):
            return None  # the second: the event was another database's, or of a store before a backup was restored
        newest = await asyncio.to_thread(store.summaries, None, 1)
        if seen.round > (newest[0].round if newest else 0):
            return None
        missed = await asyncio.to_thread(store.count_jobs_changed, seen.change, self._user)
        return None if missed > MOST_MISSED else seen

    def _missed(self, seen: Position) -> list[Event]:
        """What has happened since, in the order in which the client gets it."""
        store = self._known.store
        rounds = [each for each in store.summaries(None, MOST_ROUNDS) if each.round > seen.round]
        found = [Event("round", "", each.model_dump_json(), each.round) for each in reversed(rounds)]
        for number, view in store.jobs_changed(seen.change, self._user, limit=2 * MOST_MISSED):
            found.append(Event("job", view.user, self._known.shown(view).model_dump_json(), number, view.id))
        return found

    async def _snapshot(self, at: Position) -> AsyncIterator[str]:
        """All live jobs as they are, or a little newer than `at`. Only the last event moves the client to `at`."""
        after: int | None = None
        while True:
            rows = await asyncio.to_thread(self._known.store.jobs_with_changes, LIVE, self._user, after, PAGE)
            self._newer |= {view.id: changed for _, changed, view in rows if changed > at.change}
            last = len(rows) < PAGE
            yield _text(at if last else None, "snapshot", self._page([view for _, _, view in rows], last=last))
            if last:
                return
            after = rows[-1][0]

    def _page(self, views: list[JobView], *, last: bool) -> str:
        jobs = ",".join(self._known.shown(view).model_dump_json() for view in views)
        return f'{{"jobs":[{jobs}],"last":{json.dumps(last)}}}'


def _after(at: Position, event: Event) -> Position:
    if event.kind == "round":
        return Position(at.change, event.number)
    return Position(event.number, at.round)


def _text(at: Position | None, kind: str, text: str) -> str:
    return ("" if at is None else f"id: {at}\n") + f"event: {kind}\ndata: {text}\n\n"


class Answer(StreamingResponse):
    """Server-sent events. Calls `end` when they end, also if the client leaves before the first one."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
