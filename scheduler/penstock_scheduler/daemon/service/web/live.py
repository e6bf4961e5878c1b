"""Keeps open pages up to date: reads the world once for all viewers, and sends each of them what has changed on its page.

An event carries whole fragments, never differences in what they mean. So it does not matter which events a browser has missed: a
stream that begins sends the page as it is, and there can be no gap and no event that counts twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from penstock_scheduler.daemon.service.api import Api
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.known import Event
from penstock_scheduler.daemon.service.web import cells, site
from penstock_scheduler.daemon.service.web.cells import World
from penstock_scheduler.daemon.service.web.job import Reader
from penstock_scheduler.daemon.service.web.render import Fragments, change
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import one_line

log = logging.getLogger(__name__)

EACH_S = 1.0
"""Shortest time between two readings, and between two events of one page."""
UNASKED_S = 5.0
"""The world is read again after this time without a change that anybody told of: indices of GPUs come without one."""
BUSY_S = 60.0
"""Utilisation is read this often: jobs' samples are a minute apart."""
KEEP_ALIVE_S = 15.0
KEPT = 5
"""Readings that are kept, so that a page that has just been opened need not be sent again by its stream."""
SHARE = 0.25
"""Most of a core that pages take to be kept up to date. With more viewers, or larger pages, updates come less often."""


async def nothing(now: World) -> None:
    """What a page needs that shows the world alone."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page as one viewer may see it."""

    template: str
    draw: Callable[[World, Any], Fragments]
    """Makes the page of the world and of what `prepare` has read. It runs on the event loop, so it reads nothing itself."""
    prepare: Callable[[World], Awaitable[Any]] = nothing
    """Reads what the world does not have. Raises PenstockError."""


class Live:
    """The world for pages. One for each API process; belongs to its event loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._boot = secrets.token_hex(4)
        self._world: World | None = None
        self._last: deque[World] = deque(maxlen=KEPT)
        self._read_s = 0.0
        """When it was read, by the monotonic clock."""
        self._busy: tuple[float, dict[str, float]] = (-BUSY_S, {})
        self._changed = True
        self._state: object = None
        self._reading = asyncio.Lock()
        self._rest_s = 0.0
        """How long a page rests, so that all of them together keep to `SHARE`."""
        self.viewers = 0
        self.jobs = Reader()
        """Reads the pages of jobs."""
        self.site = site.Reader()
        """Reads the page of the site."""
        api.known.listeners.add(self._listen)

    def _listen(self, event: Event) -> None:
        self._changed = True

    async def world(self) -> World:
        """The world, at most `EACH_S` old if anything has changed. Raises StoreError."""
        async with self._reading:
            age_s = time.monotonic() - self._read_s
            if self._world is None or age_s > UNASKED_S or (age_s >= EACH_S and self._is_news()):
                began_s = time.monotonic()
                self._changed, self._state = False, self._api.known.state
                number = 1 if self._world is None else self._world.number + 1
                fresh = began_s - self._busy[0] < BUSY_S
                busy = self._busy[1] if fresh else None
                self._world = await asyncio.to_thread(cells.read, self._api, number, busy)
                if not fresh:
                    self._busy = began_s, dict(self._world.busy)
                self._last.append(self._world)
                self._read_s = time.monotonic()
            return self._world

    def _is_news(self) -> bool:
        state = self._api.known.state
        if self._changed or self._world is None:
            return True
        if state is self._state:
            return False
        before, self._state = self._state, state
        return not (
            state is not None
            and before is not None
            and getattr(before, "nodes", None) == state.nodes
            and getattr(before, "refused", None) == state.refused
        )

    @property
    def at(self) -> str:
        """Names the world that was read last. A page tells its stream which one it shows."""
        return "" if self._world is None else f"{self._boot}.{self._world.number}"

    async def stream(self, page: Page, shows: str) -> AsyncIterator[str]:
        """The events of one open page.

        Args:
            shows: `at` of the page that the browser has; empty or unknown: it gets the page as it is.
        """
        self.viewers += 1
        spoke_s = time.monotonic()
        sent: Fragments | None = None
        if page.prepare is nothing:
            had = next((each for each in self._last if shows == f"{self._boot}.{each.number}"), None)
            sent = None if had is None else page.draw(had, None)
        try:
            yield "retry: 2000\n\n"
            while True:
                try:
                    now = await self.world()
                    facts = await page.prepare(now)
                except (PenstockError, Refusal) as error:
                    yield f"event: trouble\ndata: {one_line(str(error))}\n\n"
                    await asyncio.sleep(5 * EACH_S)
                    continue
                began_s = time.thread_time()
                drawn = page.draw(now, facts)
                event, sent = change(sent, drawn), drawn
                cost_s = time.thread_time() - began_s
                self._rest_s += 0.1 * (self.viewers * cost_s / SHARE - self._rest_s)
                if event is not None:
                    spoke_s = time.monotonic()
                    yield f"id: {self._boot}.{now.number}\n{event}"
                elif time.monotonic() - spoke_s > KEEP_ALIVE_S:
                    spoke_s = time.monotonic()
                    yield "event: alive\ndata: \n\n"
                await asyncio.sleep(max(EACH_S, self._rest_s))
        finally:
            self.viewers -= 1
