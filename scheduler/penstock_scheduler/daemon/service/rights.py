"""Ends an answer that goes on when the right of its caller ends: a token, a session, a role or an account.

That holds for streams of events, open pages and requests that wait, without a word about it in any endpoint.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_scheduler.daemon.service.errors import problem
from penstock_scheduler.people.errors import StoreError

if TYPE_CHECKING:
    from penstock_scheduler.api.access_messages import Identity
    from penstock_scheduler.daemon.service.identity import Gatekeeper

CHECK_S = 1.0
"""How often the right of a caller is looked at while the answer goes on; and before each part of it."""
UNCONFIRMED_S = 30.0
"""How long an answer goes on while the store is away, so that nobody knows whether the right holds."""


class Right:
    """The right of a caller to an answer that goes on."""

    def __init__(self, gatekeeper: Gatekeeper, identity: Identity) -> None:
        self._gatekeeper, self._identity = gatekeeper, identity
        self._confirmed_s = time.monotonic()

    async def holds(self) -> bool:
        """Whether the caller would be let in now as before."""
        try:
            found = await self._gatekeeper.still(self._identity)
        except StoreError:
            return time.monotonic() - self._confirmed_s < UNCONFIRMED_S
        self._confirmed_s = time.monotonic()
        return found


class EndWithRight:
    """ASGI middleware; see above. A request that changes something is carried out whole."""

    def __init__(self, app: ASGIApp, gatekeeper: Gatekeeper) -> None:
        self._app, self._gatekeeper = app, gatekeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        state = scope.get("state", {})
        if "identity" not in state or state.get("private") or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        right, loop, begun = Right(self._gatekeeper, state["identity"]), asyncio.get_running_loop(), False
        watching: set[asyncio.Task[None]] = set()

        async def checked(message: Message) -> None:
            nonlocal begun
            if message.get("more_body") and not await right.holds():
                await end()
            begun = True
            await send(message)

        async def end() -> None:
            going.reschedule(loop.time())
            await asyncio.Event().wait()

        async def watch() -> None:
            while await right.holds():
                await asyncio.sleep(CHECK_S)
            going.reschedule(loop.time())

        timer = loop.call_later(CHECK_S, lambda: watching.add(loop.create_task(watch())))
        try:
            async with asyncio.timeout(None) as going:
                await self._app(scope, receive, checked)
        except TimeoutError:
            if not going.expired():
                raise
            if begun:
                await send({"type": "http.response.body", "body": b""})
            else:
                text = "the right of this request has ended; log in again, or ask an admin for a token"
                await problem(401, "unauthenticated", text)(scope, receive, send)
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()
