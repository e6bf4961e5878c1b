"""A service in a process of its own, with a limit on open files, that runs a command again and again as the round loop does."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from penstock_scheduler.daemon.service import limits
from penstock_scheduler.people.logs import configure_logging
from penstock_scheduler.safety import open_files
from tests.forking import FORKING
from tests.scheduler.service.api import serving

FILES = 1024
"""The usual soft limit. Here it is the hard limit, too, so that it cannot be raised."""
HEAD_S = 3.0


class Flooded:
    """The service in the other process."""

    def __init__(self, folder: Path, pipe: Connection) -> None:
        self.folder, self._pipe = folder, pipe
        told = json.loads(pipe.recv())
        self.url, self.port, self.socket, self.tokens = told["url"], told["port"], told["socket"], told["tokens"]

    def commands(self) -> list[str]:
        """What the commands since the last call said; "ok" for those that could be run."""
        self._pipe.send("commands")
        said: list[str] = json.loads(self._pipe.recv())
        return said

    @property
    def log_bytes(self) -> int:
        """How much it has logged."""
        return (self.folder / "log").stat().st_size

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection to its Unix socket, on which `data` was sent."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(self.socket)
        with contextlib.suppress(BrokenPipeError):  # it was refused
            connection.sendall(data)
        return connection


def serve(folder: Path, pipe: Connection, files: int, settings: dict[str, object]) -> None:
    """Serve until told to stop."""
    with (folder / "log").open("ab") as file:
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 256), files))
    open_files.raise_limit()
    with (folder / "found").open("w") as file:
        for words in ((), open_files.as_found()):
            subprocess.run([*words, "sh", "-c", "ulimit -Sn"], stdout=file, check=True)
    configure_logging("logfmt")
    limits.HEAD_S = limits.BODY_S = HEAD_S
    with serving(folder, **settings) as api:
        told = {"url": api.url, "port": int(api.url.rpartition(":")[2]), "socket": api.socket[5:], "tokens": api.tokens}
        pipe.send(json.dumps(told))
        said: list[str] = []
        while True:
            if pipe.poll(0.05):
                if pipe.recv() == "stop":
                    return
                pipe.send(json.dumps(said))
                said = []
            try:
                subprocess.run(["true"], check=True, capture_output=True)
                said.append("ok")
            except OSError as error:
                said.append(str(error))
                time.sleep(0.05)


@contextmanager
def flooded(folder: Path, files: int = FILES, **settings: object) -> Iterator[Flooded]:
    """Start it, and stop it."""
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=serve, args=(folder, theirs, files, settings))
    process.start()
    try:
        assert ours.poll(120), "the service did not start"
        yield Flooded(folder, ours)
    finally:
        ours.send("stop")
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
