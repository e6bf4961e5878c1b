"""Serves the API: uvicorn on a Unix socket and, if the settings say so, on TCP; or on penstockd's private socket."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pwd
import socket
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_scheduler.daemon.service import submitting
from penstock_scheduler.daemon.service.errors import problem
from penstock_scheduler.daemon.service.known import Known
from penstock_scheduler.daemon.service.limits import LimitedServer, connections
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.safety import open_files
from penstock_scheduler.safety.open_files import Places
from penstock_scheduler.store.sql import SqlStore

log = logging.getLogger(__name__)

BACKLOG = 2048
_GIVEN = 3
"""File descriptor of the first socket that systemd hands over (sd_listen_fds)."""
THREADS = 32
"""Threads for calls that may block: the store, Slurm, files. Python's default is 6 on a machine with two cores."""
GRACE_S = 2
"""How long requests in progress have to finish when the API stops."""

SWITCH_S = 0.0005
"""How long a computing thread, such as the round loop's, may keep the interpreter while a request waits for it. A request waits
about ten times. With Python's default of 5 ms, the slowest requests took a tenth of a second longer."""

FULL_COLLECTIONS = 1000
"""Number of collections of the middle generation before Python collects all generations. A full collection blocks all requests
for 0.1 s with 2,000 jobs and 500 waiting clients. With Python's default of 10, there was one every 8 s."""


class AnswerWhatIsCutOff:
    """ASGI middleware that answers a request that GRACE_S cuts off. uvicorn alone answers "Internal Server Error"."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if begun:
                raise
            text = "penstockd ended meanwhile; look whether the request was carried out before you repeat it"
            await problem(504, "daemon-away", text, {"Retry-After": "5"})(scope, receive, send)


class Service:
    """Serves the API from `start` to `stop`. Binds the sockets at once. Raises ConfigError if that fails.

    Args:
        private: whether to serve penstock-api on the private socket, and nobody else.
    """

    def __init__(self, settings: ApiSettings, app: FastAPI, known: Known, *, private: bool = False) -> None:
        self._app, self._known, self._settings = app, known, settings
        self._peers = peers(settings) if private else None
        self._path = settings.private_socket if private else settings.socket
        given = None if private else given_socket(settings.socket)
        self._own = given is None
        self._sockets = [(given or _bind_unix(self._path, self._peers), False)]
        self.port: int | None = None
        if settings.listen and not private:
            listening = _bind_tcp(settings.listen)
            self.port = listening.getsockname()[1]
            self._sockets.append((listening, settings.tls_certificate is not None))
        self._servers: list[uvicorn.Server] = []
        self._thread: threading.Thread | None = None

    @property
    def serves(self) -> bool:
        """Whether it serves now."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, *besides: Coroutine[Any, Any, None]) -> None:
        """Start serving in a thread of its own. `besides` runs on the same event loop meanwhile."""
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()  # objects of imported modules live until the end; leave them out of full collections
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
        self._make_servers()  # before `stop` may look for them
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(*besides)), name="api", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving. Requests in progress have a moment to finish."""
        self._app.state.api.close()
        for server in self._servers:
            server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=GRACE_S + 5)
        if self._own:
            self._path.unlink(missing_ok=True)

    def _make_servers(self) -> None:
        places = Places(connections(self._settings.max_connections, open_files.limit()))
        for _, tls in self._sockets:
            config = uvicorn.Config(
                AnswerWhatIsCutOff(self._app),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_S,
                ssl_certfile=str(self._settings.tls_certificate) if tls else None,
                ssl_keyfile=str(self._settings.tls_key) if tls else None,
            )
            self._servers.append(LimitedServer(config, places, self._note_refused, self._peers))

    async def _serve(self, *besides: Coroutine[Any, Any, None]) -> None:
        self._known.serve_on(asyncio.get_running_loop())
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "api"))
        pairs = zip(self._servers, self._sockets, strict=True)
        api = self._app.state.api
        leases = [] if api.leases is None else [api.leases.run(partial(submitting.give_up, api))]
        tasks = [asyncio.create_task(each) for each in (*besides, *leases)]
        try:
            await asyncio.gather(*(server.serve(sockets=[listening]) for server, (listening, _) in pairs))
        finally:
            for task in tasks:
                task.cancel()
            await api.daemon.close()

    def _note_refused(self) -> None:
        self._known.counters["connections refused"] += 1


def given_socket(path: Path) -> socket.socket | None:
    """The Unix socket that systemd listens on for this process (penstock-api.socket); None: there is none. Raises ConfigError."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    given = socket.socket(fileno=_GIVEN)
    if given.getsockname() != str(path):
        raise ConfigError(f"[api] socket={str(path)!r}: systemd listens on {given.getsockname()}; make the two agree")
    return given


def peers(settings: ApiSettings) -> frozenset[int]:
    """Users (uids) that may connect to the private socket: root, this process's, and that of penstock-api. Raises ConfigError."""
    account = api_account(settings)
    return frozenset({0, os.geteuid()} | (set() if account is None else {account.pw_uid}))


def api_account(settings: ApiSettings) -> pwd.struct_passwd | None:
    """The account that penstock-api runs as; None: penstockd's own. Raises ConfigError."""
    if settings.user is None:
        return None
    try:
        return pwd.getpwnam(settings.user)
    except KeyError:
        text = f"[api] user={settings.user!r}: there is no such user; create it, such as with useradd --system"
        raise ConfigError(f"{text} {settings.user}") from None


def let_read(store: SqlStore, settings: ApiSettings) -> None:
    """Let penstock-api read the store if it is a file. Raises ConfigError."""
    account, file = api_account(settings), store.file
    if account is None or file is None:
        return
    try:
        for name in ("", "-wal", "-shm"):
            if (part := file.with_name(file.name + name)).exists():
                os.chown(part, -1, account.pw_gid)
                part.chmod(0o640)
    except OSError as error:
        text = f"[api] user={settings.user!r}: {file} cannot be given to that user's group: {error.strerror}"
        raise ConfigError(
            f"{text}; run penstock-api as penstockd's own user, or put penstockd's user into that group"
        ) from None


def _bind_unix(path: Path, peers: frozenset[int] | None) -> socket.socket:
    if _answers(path):
        raise ConfigError(
            f"[api] socket={str(path)!r}: another penstockd or penstock-api serves there; stop it, or choose another path"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # users must reach the socket, whatever the umask
        path.unlink(missing_ok=True)  # a killed daemon left it
        listening.bind(str(path))
        if peers is None:
            os.chmod(path, 0o666)  # noqa: S103, PTH101 - the kernel tells who connects
        else:
            _let_connect(path, peers)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"[api] socket={str(path)!r}: {error.strerror or error}; choose another path") from None
    return listening


def _let_connect(path: Path, peers: frozenset[int]) -> None:
    """Let only these users connect. `LimitedServer` asks the kernel, too. Raises OSError."""
    others = [uid for uid in peers if uid not in (0, os.geteuid())]
    path.chmod(0o600)
    if others:
        os.chown(path, others[0], -1)


def _answers(path: Path) -> bool:
    """Whether a process listens on the Unix socket. Raises ConfigError if the path is of another kind of file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            if not path.is_socket():
                if path.exists():
                    raise ConfigError(f"[api] socket={str(path)!r} is not a socket; choose another path")
                return False
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError as error:
            raise ConfigError(f"[api] socket={str(path)!r}: {error.strerror or error}; choose another path") from None
    return True


def _bind_tcp(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"[api] listen={listen!r}: {error}; choose an address of this host and a free port") from None
    return listening
