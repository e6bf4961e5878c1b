"""The endpoint that streams rounds and changes of jobs to clients as they happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock_scheduler.service.api import User
from penstock_scheduler.service.errors import Refusal

LISTENER_QUEUE = 1000
"""Events that wait for one listener. A listener that is further behind is disconnected."""
KEEP_ALIVE_S = 15.0

router = APIRouter(prefix="/v1")


@router.get("/events", response_class=StreamingResponse)
async def events(call: User) -> StreamingResponse:
    """Stream events as server-sent events: `round` for each round, `job` for each change of a job that you may see."""
    board = call.api.board
    places, user = call.api.listening, call.identity.user
    if not places.take(user):
        text = f"{places.held(user)} of your requests listen already, and others need the rest; close some, or try again later"
        raise Refusal(503, "busy", text, retry_after_s=60)
    queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue(LISTENER_QUEUE)

    def listen(kind: str, user: str, text: str) -> None:
        if not user or call.may_see(user):
            try:
                queue.put_nowait((kind, text))
            except asyncio.QueueFull:  # the client does not read; its events must not pile up
                board.listeners.discard(listen)

    board.listeners.add(listen)

    async def stream() -> AsyncIterator[str]:
        yield ": connected\n\n"
        while listen in board.listeners:
            try:
                kind, text = await asyncio.wait_for(queue.get(), KEEP_ALIVE_S)
                yield f"event: {kind}\ndata: {text}\n\n"
            except TimeoutError:
                yield ": keep-alive\n\n"

    def end() -> None:
        board.listeners.discard(listen)
        places.give_back(user)

    return _Stream(stream(), end)


class _Stream(StreamingResponse):
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
