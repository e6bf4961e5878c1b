"""The service in a thread of the daemon: uvicorn on a unix socket and, if the settings say so, on TCP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.service.board import Board
from penstock_scheduler.service.identity import PeerProtocol
from penstock_scheduler.service.settings import ApiSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
THREADS = 32
"""For what may wait: the store, Slurm, files. Python's own default is 6 on a machine of two cores."""
GRACE_S = 2

SWITCH_S = 0.0005
"""A thread that computes (a round, a look at the cluster) keeps the interpreter for so long before a request gets its turn. A
request takes some ten turns, so Python's own 5 ms made the slowest of them wait for a tenth of a second."""

FULL_COLLECTIONS = 1000
"""Python looks through all objects for garbage after so many looks through the young ones, and nobody is answered meanwhile:
for 0.1 s with 2,000 jobs and 500 who wait, 0.2 to 0.4 s with what the imports made. Python's own 10 did that every 8 s."""


class Service:
    """Serves from `start` to `stop`. The sockets are bound when it is made: what is wrong with them is said early."""

    def __init__(self, settings: ApiSettings, path: Path, app: FastAPI, board: Board) -> None:
        self._app, self._board, self._path = app, board, path
        self._sockets = [(_bind_unix(path), False)]
        self.port: int | None = None
        if settings.listen:
            listening = _bind_tcp(settings.listen)
            self.port = listening.getsockname()[1]
            self._sockets.append((listening, settings.tls_certificate is not None))
        self._settings = settings
        self._servers: list[uvicorn.Server] = []
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Serve in a thread of its own."""
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()  # what the imports made stays for ever, and need not be looked through again
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
        self._thread.start()

    def stop(self) -> None:
        """Answer what is being asked, for a moment, and end."""
        for server in self._servers:
            server.should_exit = True
        self._thread.join(timeout=GRACE_S + 5)
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._board.serve_on(asyncio.get_running_loop())
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "api"))
        for _, tls in self._sockets:
            config = uvicorn.Config(
                self._app,
                http=PeerProtocol,
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
            self._servers.append(uvicorn.Server(config))
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[listening]) for server, (listening, _) in pairs))


def _bind_unix(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a daemon that was killed: the store's lock says that none is there
        listening.bind(str(path))
        os.chmod(path, 0o666)  # noqa: S103, PTH101 - whoever connects is known by name
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"[api] socket={str(path)!r}: {error.strerror or error}; give another path") from None
    return listening


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
        raise ConfigError(f"[api] listen={listen!r}: {error}; give an address of this host and a free port") from None
    return listening
