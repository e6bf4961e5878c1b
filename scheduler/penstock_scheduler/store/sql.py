"""The store in a database: SQLite in the daemon's state_dir, or a server such as PostgreSQL.

One process writes, and holds a lock for that: a file beside SQLite's, or an advisory lock of the server. What a method has
written is on disk when it returns. When a method raises StoreError, nothing of it is written and it can be called again.
"""

from __future__ import annotations

import socket
from pathlib import Path

from sqlalchemy import Engine

from penstock_scheduler import __version__
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import schema
from penstock_scheduler.store.admin import AdminStore
from penstock_scheduler.store.jobs import JobStore
from penstock_scheduler.store.leadership.leader_table import LeaderTable
from penstock_scheduler.store.leadership.lease import Alone, Lease
from penstock_scheduler.store.opening import open_engine
from penstock_scheduler.store.published import PublishedStore
from penstock_scheduler.store.rounds import RoundStore
from penstock_scheduler.store.series import SeriesStore
from penstock_scheduler.store.spans import SpanStore, WaitStore

DAY_S = 86_400.0


class SqlStore(RoundStore, JobStore, SpanStore, WaitStore, SeriesStore, AdminStore, PublishedStore):
    """The store; `open_store` makes it. All methods may be called from any thread, and raise StoreError."""


def open_store(
    where: str | Path,
    *,
    writer: bool = False,
    leadership: Lease | None = None,
    keep_rounds: int = 50_000,
    keep_days: float = 365.0,
    keep_audit_days: float = 1825.0,
) -> SqlStore:
    """The store in a folder (the daemon's state_dir) or at a database's URL.

    Args:
        writer: whether this process writes: only one may. The writer creates the store if there is none.
        leadership: the term in which this process writes, where several penstockd use the database; None: it writes alone.
        keep_rounds: newest rounds that are kept.
        keep_days: days for which a job's history is kept after its end.
        keep_audit_days: days for which the audit log is kept.

    Raises:
        StoreError: there is no store, another process writes it, or it has another schema.
        ConfigError: the URL is wrong.
    """
    engine, name, lock = open_engine(where, lock=writer and leadership is None)
    if leadership is not None:
        schema.bound_transactions(engine, leadership.lease_s / 2)
    keep_s, keep_audit_s = keep_days * DAY_S, keep_audit_days * DAY_S
    store = SqlStore(engine, name, lock, keep_rounds=keep_rounds, keep_s=keep_s, keep_audit_s=keep_audit_s)
    try:
        with store.read() as db:
            found = schema.revision(db)
        if found is None and writer:
            schema.upgrade(engine)
        with store.read() as db:
            schema.expect_usable(db, name)
        if leadership is not None:
            store.leadership = leadership
        elif writer and store.file is not None:
            store.leadership = _alone(engine, name)
    except StoreError:
        store.close()
        raise
    return store


def _alone(engine: Engine, name: str) -> Alone:
    """A new term of the only penstockd that can use a file: its lock is held."""
    table = LeaderTable(engine, name)
    number = table.take(table.term(), socket.gethostname(), __version__, "")
    assert number is not None, "nobody else writes"
    return Alone(number)
