"""Turns that the clients of the API share, so that nobody's many requests keep others waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from penstock_scheduler.safety.places import Places


class Turns:
    """Turns that clients share on one event loop: each has as many as `Places` allow, and those who wait are served one client
    after another. So however much one client asks for, others wait for what is under way and for each other."""

    def __init__(self, total: int) -> None:
        self._places = Places(total)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who were served longest ago come first."""

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Hold a turn, after waiting for it."""
        if not self._places.take(client):
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():
                    self._leave(client)
                raise
        try:
            yield
        finally:
            self._leave(client)

    def _leave(self, client: str) -> None:
        self._places.give_back(client)
        for each, queue in [*self._waiting.items()]:
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue and self._places.take(each):
                queue.popleft().set_result(None)
                self._waiting[each] = self._waiting.pop(each)
            if not queue:
                del self._waiting[each]
