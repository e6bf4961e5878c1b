"""What one client may take of the API: places for connections and waiting requests, and time to send and to read.

Nothing of a request is read before its connection has a place, and nothing of its body before the caller is known (`app.py`).
No limit here needs a setting for each user: see `places`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import socket
import struct
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock_scheduler.api.messages import MAX_BODY_BYTES
from penstock_scheduler.daemon.service.identity import host_of
from penstock_scheduler.safety.open_files import Places

log = logging.getLogger(__name__)

HEAD_S = 10.0
"""How long a connection may take until the headers of a request are complete. A TLS handshake has the same time."""
BODY_S = 30.0
"""How long a request's body may take: the largest body at 70 kB/s."""
PIECE = 64 * 1024
MOST_PIECES = 4096
"""Memory for the bodies of all requests in progress, 256 MiB. A user has at most as much as is free."""
READ_S = 30.0
"""How long a client may leave an answer unread before its connection is closed."""
RESERVED_FILES = 256
"""Files that connections leave to the store, the log and the commands of Slurm: 32 threads with three pipes each, and more."""
FEWEST_CONNECTIONS = 16
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before other work has its turn."""
PAUSE_S = 0.5
"""Pause after a failed accept(2), such as without a free file descriptor."""

MOST_VALUES = 100_000
"""Most values in a body. Validation tells what is wrong with each: 650,000 wrong ones held up all callers for 4 s."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def connections(wanted: int, open_files: int) -> int:
    """How many connections to serve at once: as many as wanted, if the limit on open files allows it."""
    return max(min(wanted, open_files - RESERVED_FILES), FEWEST_CONNECTIONS)


def peer_uid(connection: Any) -> int | None:
    """The uid of the process at the other end of a Unix socket when it connected, by the kernel; None: not a Unix socket."""
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid


def client_of(connection: socket.socket) -> str:
    """The client that a connection counts for: a user on the Unix socket, else a host."""
    uid = peer_uid(connection)
    if uid is not None:
        return f"uid {uid}"
    return host_of(str(connection.getpeername()[0]))


class LimitedProtocol(H11Protocol):
    """Uvicorn's HTTP protocol with deadlines, and with the peer's uid in the state of requests on a Unix socket."""

    private = False
    """Whether the peer is the API, which says who its caller is."""
    released: Callable[[], None] = staticmethod(lambda: None)
    """Called when the connection has ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the headers of a request."""
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        transport.set_write_buffer_limits(high=1)  # so that `pause_writing` is called for all that is not read
        uid = peer_uid(transport.get_extra_info("socket"))
        if uid is not None:
            self.app_state = dict(self.app_state) | {"peer_uid": uid, "private": self.private}
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        self._watch_head()

    def pause_writing(self) -> None:
        """The client does not read its answer."""
        super().pause_writing()
        self._start("unread", READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read its answer."""
        super().resume_writing()
        self._stop("unread")

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        for name in tuple(self._timers):
            self._stop(name)
        super().connection_lost(exc)
        self.released()

    def _watch_head(self) -> None:
        """Between requests the clock runs, whatever arrives: the rest of a body that nobody reads does not stop it, either."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("head")
        else:
            self._start("head", HEAD_S, self._give_up)

    def _give_up(self) -> None:
        if self.conn.our_state is h11.IDLE:
            text = f"the headers of the request were not complete after {HEAD_S:g} s"
            self.transport.write(_refusal("408 Request Timeout", "too-slow", text))
        self.transport.abort()

    def _start(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        if name not in self._timers and not self.transport.is_closing():
            self._timers[name] = self.loop.call_later(seconds, then)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _refusal(status: str, code: str, text: str) -> bytes:
    """A whole answer, for connections that get no further."""
    body = json.dumps({"error": {"code": code, "message": text}}).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    )
    return head.encode() + b"Retry-After: 5\r\n\r\n" + body


class LimitedServer(uvicorn.Server):
    """Uvicorn's server, but each connection gets its place before anything else is done for it.

    asyncio's own accept loop takes as many connections as the backlog has at once, gives a TLS handshake a minute, and without
    a free file descriptor logs one error for each of them (2,048 lines a second).

    Args:
        refused: called for each connection that gets no place.
        peers: users (uids) that may connect, to say who their caller is; None: everybody may, as oneself.
    """

    def __init__(
        self, config: uvicorn.Config, places: Places, refused: Callable[[], None], peers: frozenset[int] | None = None
    ) -> None:
        super().__init__(config)
        self._peers = peers
        self._places, self._refused = places, refused
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()
        """The TLS handshakes in progress."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self.servers = []  # uvicorn would close asyncio's servers
        for listening in sockets or []:
            listening.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listening)))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and end those that are there."""
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._shaking, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                for _ in range(ACCEPTED_AT_ONCE):
                    connection, _ = await loop.sock_accept(listening)
                    self._begin(connection)
                await asyncio.sleep(0)
            except ConnectionError:
                continue  # the client was gone at once
            except OSError as error:
                log.error("connections wait", extra={"text": f"accept: {error.strerror}"})
                await asyncio.sleep(PAUSE_S)

    def _begin(self, connection: socket.socket) -> None:
        try:
            client = client_of(connection)
        except OSError:  # it is gone already
            connection.close()
            return
        if self._peers is not None and peer_uid(connection) not in self._peers:
            log.warning("connection refused", extra={"client": client, "text": "it is not the user of penstock-api"})
            connection.close()
            return
        if not self._places.take(client):
            self._refused()
            log.warning("connection refused", extra={"client": client, "held": self._places.held(client)})
            if self.config.ssl is None:
                text = f"{client} holds {self._places.held(client)} connections, and others need the rest; close some"
                with contextlib.suppress(OSError):
                    connection.send(_refusal("503 Service Unavailable", "busy", text))
            connection.close()
            return
        task = asyncio.create_task(self._serve_connection(connection, client))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _serve_connection(self, connection: socket.socket, client: str) -> None:
        """Make the connection the protocol's, which gives its place back at its end."""
        loop = asyncio.get_running_loop()
        release = _once(functools.partial(self._places.give_back, client))

        def protocol() -> LimitedProtocol:
            made = LimitedProtocol(config=self.config, server_state=self.server_state, app_state={}, _loop=loop)
            made.released = release
            made.private = self._peers is not None
            return made

        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": HEAD_S}
        try:
            await loop.connect_accepted_socket(protocol, connection, **tls)
        except (OSError, asyncio.CancelledError):  # also: no TLS handshake, or none in time
            connection.close()
            release()


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, but only the first time."""
    left = [call]
    return lambda: left.pop()() if left else None


class LimitBodies:
    """ASGI middleware that stops reading a body above the limit, that does not arrive in time, or for which there is no memory,
    and refuses the request. It also refuses a body of too many values."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._memory = Places(MOST_PIECES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        identity = scope.get("state", {}).get("identity")
        client = "" if identity is None else identity.user or identity.address
        held = 0

        def remember(read: int) -> None:
            nonlocal held
            while held * PIECE < read:
                if not self._memory.take(client):
                    text = "the bodies of your requests take all memory that there is for them; send fewer at the same time"
                    raise HTTPException(503, text, {"Connection": "close", "Retry-After": "5"})
                held += 1

        try:
            await self._serve(scope, receive, send, remember)
        finally:
            for _ in range(held):
                self._memory.give_back(client)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, remember: Callable[[int], None]) -> None:
        read, whole, parts, commas = 0, False, list[bytes](), 0
        until_s: float | None = None

        async def limited() -> Message:
            nonlocal read, whole, until_s, commas
            if whole:
                return await receive()  # waits for the client to leave
            until_s = until_s or asyncio.get_running_loop().time() + BODY_S
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                text = f"the body was not complete after {BODY_S:g} s; send it at once"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            parts.append(message.get("body", b""))
            read, commas = read + len(parts[-1]), commas + parts[-1].count(b",")
            whole = not message.get("more_body", False)
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes; send less in one request")
            remember(read)
            if whole and commas >= MOST_VALUES and _STRING.sub(b"", b"".join(parts)).count(b",") >= MOST_VALUES:
                raise HTTPException(413, f"the body has more than {MOST_VALUES} values; send less in one request")
            return message

        await self._app(scope, limited, send)
