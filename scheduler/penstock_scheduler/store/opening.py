"""Opening the store's database, and taking the right to write.

On a server, each penstockd that may lead holds an advisory lock together with the others. Whoever needs the database alone asks
for the same lock alone: `penstock db` and penstockd of versions that knew no leader.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import schema
from penstock_scheduler.store.schema import LOCK_NUMBER

LOCK_WAIT_S = 3
"""How long to wait for the lock: a server may notice late that its holder is gone."""

LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's SQLSTATE for a lock that was not available in that time."""


def is_server(where: str | Path) -> bool:
    """Whether a store is on a database server, where several penstockd can use it."""
    return "://" in str(where)


def name_of(where: str | Path) -> str:
    """A store as messages name it: a URL without its password."""
    return schema.server_engine(str(where)).url.render_as_string() if is_server(where) else str(where)


def open_engine(where: str | Path, *, lock: bool) -> tuple[Engine, str, TextIO | Connection | None]:
    """(engine, name for messages, the right to write or None). Raises what `open_store` raises."""
    if is_server(where):
        engine = schema.server_engine(str(where))
        name = engine.url.render_as_string(hide_password=True)
        return engine, name, _lock_server(engine, name) if lock else None
    folder = Path(where)
    path = folder / schema.FILE
    if not lock:
        if not path.is_file():
            raise StoreError(f"{folder} holds no store; give the daemon's state_dir")
        return schema.sqlite_engine(path, write=False), str(path), None
    held = _lock_folder(folder)
    engine = schema.sqlite_engine(path, write=True)
    return engine, str(path), held


def _lock_folder(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / "lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Reports and the audit log are private: users ask the API.
        os.close(os.open(folder / schema.FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except BlockingIOError:
        raise StoreError(
            f"{folder} is in use by another penstockd; stop it, or give this one its own state_dir"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{folder}: {error.strerror}; set [daemon] state_dir to a folder that penstockd may write"
        ) from None
    return held


def _lock_server(engine: Engine, name: str) -> Connection:
    try:
        held = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        held.execute(sa.text(f"SET lock_timeout = '{LOCK_WAIT_S}s'"))
        held.execute(sa.select(sa.func.pg_advisory_lock(LOCK_NUMBER)))
    except SQLAlchemyError as error:
        if isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) == LOCK_NOT_AVAILABLE:
            held.close()
            raise StoreError(
                f"{name} is in use by another penstockd; stop it, or give this one its own database"
            ) from None
        raise StoreError(f"{name}: {str(error).splitlines()[0]}; check that the server is up") from None
    return held


def candidate_engine(where: str, timeout_s: float) -> tuple[Engine, str]:
    """(engine, name for messages) of a server, for a penstockd that may lead. Each connection holds the lock beside others'.

    Args:
        where: the database's URL.
        timeout_s: how long the server waits for the next statement within a transaction. It ends the transactions of a frozen
            penstockd, which others would wait for.

    Raises:
        ConfigError: the URL is wrong.
    """
    engine = schema.server_engine(where)
    schema.bound_transactions(engine, timeout_s)
    name = engine.url.render_as_string(hide_password=True)

    @event.listens_for(engine, "connect")
    def share(connection: Any, record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_try_advisory_lock_shared({LOCK_NUMBER})")
            if not cursor.fetchone()[0]:
                raise StoreError(
                    f"{name} is in use by an older penstockd or a command of `penstock`; stop it, or wait until it has ended"
                )
        connection.commit()

    return engine, name
