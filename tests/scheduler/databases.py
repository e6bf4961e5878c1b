"""A PostgreSQL server of the tests' own, where its programs are installed."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from penstock_loopback.machine import free_ports
from penstock_scheduler.store.sql import SqlStore
from penstock_scheduler.store.tables import submissions

REASON = "needs PostgreSQL's initdb and pg_ctl, on PATH or where Debian puts them"

COUNT = itertools.count()


def program(name: str) -> str | None:
    """A program of the server's. Debian keeps them out of PATH."""
    return shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None)


def available() -> bool:
    return all(map(program, ("initdb", "pg_ctl")))


def new_database(server: str) -> str:
    """URL of a new, empty database on this server."""
    name = f"test{os.getpid()}_{next(COUNT)}"
    engine = sa.create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}/{name}"


class Server:
    """A server that can be stopped and started again."""

    def __init__(self, folder: Path, port: int, common: dict[str, object]) -> None:
        self.url = f"postgresql+psycopg://penstock@127.0.0.1:{port}"
        self.port = port
        self._data, self._log, self._common = folder / "data", folder / "log", common
        self._options = f"-p {port} -h 127.0.0.1 -c unix_socket_directories='' -c fsync=off"

    def start(self) -> None:
        options = ["-l", self._log, "-w", "-t", "60", "-o", self._options]
        subprocess.run([program("pg_ctl"), "-D", self._data, *options, "start"], **self._common)  # type: ignore[call-overload]

    def stop(self) -> None:
        subprocess.run([program("pg_ctl"), "-D", self._data, "-m", "immediate", "-w", "stop"], **self._common)  # type: ignore[call-overload]


@contextmanager
def restartable() -> Iterator[Server]:
    """A fresh server on loopback. It refuses root, so root starts it as nobody."""
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as name:
        folder = Path(name)
        who: dict[str, object] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        common = {"check": True, "stdout": subprocess.DEVNULL, "cwd": folder, "env": {"PATH": os.environ["PATH"]}} | who
        data = ["-D", folder / "data", "-U", "penstock", "-A", "trust", "-E", "UTF8"]
        subprocess.run([program("initdb"), *data], **common)  # type: ignore[call-overload]
        server = Server(folder, free_ports(1), common)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def postgresql() -> Iterator[str]:
    """URL of a fresh server on loopback, up to the database's name."""
    with restartable() as server:
        yield server.url


def open_submissions(store: SqlStore) -> list[tuple[str, str]]:
    """(user, key) of submissions whose outcome is not known yet."""
    c = submissions.c
    with store.read() as db:
        return [(row.user_name, row.key) for row in db.execute(sa.select(c.user_name, c.key).where(c.job.is_(None)))]
