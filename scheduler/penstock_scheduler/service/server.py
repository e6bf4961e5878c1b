"""Serves the API in a thread of the daemon: uvicorn on a Unix socket and, if the settings say so, on TCP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from penstock_scheduler import open_files
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.service import submitting
from penstock_scheduler.service.board import Board
from penstock_scheduler.service.limits import LimitedServer, Places, connections
from penstock_scheduler.service.settings import ApiSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
THREADS = 32
"""Threads for calls that may block: the store, Slurm, files. Python's default is 6 on a machine with two cores."""
GRACE_S = 2

SWITCH_S = 0.0005
"""How long a computing thread, such as the round loop's, may keep the interpreter while a request waits for it. A request waits
about ten times. With Python's default of 5 ms, the slowest requests took a tenth of a second longer."""

FULL_COLLECTIONS = 1000
"""Number of collections of the middle generation before Python collects all generations. A full collection blocks all requests
for 0.1 s with 2,000 jobs and 500 waiting clients. With Python's default of 10, there was one every 8 s."""


class Service:
    """Serves the API from `start` to `stop`. Binds the sockets at once. Raises ConfigError if that fails."""

    def __init__(self, settings: ApiSettings, app: FastAPI, board: Board) -> None:
        self._app, self._board = app, board
        self._sockets = [(_bind_unix(settings.socket), False)]
        self.port: int | None = None
        if settings.listen:
            listening = _bind_tcp(settings.listen)
            self.port = listening.getsockname()[1]
            self._sockets.append((listening, settings.tls_certificate is not None))
        self._settings = settings
        self._servers: list[uvicorn.Server] = []
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Start serving in a thread of its own."""
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()  # objects of imported modules live until the end; leave them out of full collections
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving. Requests in progress have a moment to finish."""
        for server in self._servers:
            server.should_exit = True
        self._thread.join(timeout=GRACE_S + 5)
        self._settings.socket.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._board.serve_on(asyncio.get_running_loop())
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "api"))
        places = Places(connections(self._settings.max_connections, open_files.limit()))
        for _, tls in self._sockets:
            config = uvicorn.Config(
                self._app,
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
            self._servers.append(LimitedServer(config, places, self._note_refused))
        pairs = zip(self._servers, self._sockets, strict=True)
        api = self._app.state.api
        leases = asyncio.create_task(api.leases.run(partial(submitting.cancel_unowned, api)))
        try:
            await asyncio.gather(*(server.serve(sockets=[listening]) for server, (listening, _) in pairs))
        finally:
            leases.cancel()

    def _note_refused(self) -> None:
        self._board.counters["connections refused"] += 1


def _bind_unix(path: Path) -> socket.socket:
    if _answers(path):
        raise ConfigError(
            f"[api] socket={str(path)!r}: another penstockd serves its clients there; stop it, or choose another path"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # users must reach the socket, whatever the umask
        path.unlink(missing_ok=True)  # a killed daemon left it
        listening.bind(str(path))
        os.chmod(path, 0o666)  # noqa: S103, PTH101 - the kernel tells who connects
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"[api] socket={str(path)!r}: {error.strerror or error}; choose another path") from None
    return listening


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
