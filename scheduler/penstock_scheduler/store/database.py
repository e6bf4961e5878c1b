"""A database that one process writes: reading, writing, and the errors of both."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.people.errors import NotLeading, StoreError
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.leadership.lease import ALONE

CHUNK = 1000
"""Rows that are read at a time."""


class NoSuchRow(StoreError):
    """What was asked for is not in the store."""


class Database:
    """The base of the store's parts. All methods may be called from any thread, and raise StoreError.

    Args:
        engine: the database.
        name: its name in messages.
        lock: what holds the right to write; None: a reader.
    """

    def __init__(self, engine: Engine, name: str, lock: TextIO | Connection | None) -> None:
        self.engine = engine
        self.name = name
        self._lock = lock
        self.leadership: Leadership = ALONE
        """Whether this process may write, where several penstockd use the database."""
        self._writing = threading.Lock()
        self._insert: Callable[[sa.Table], Any] = (
            postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
        )

    def close(self) -> None:
        """Close the database and give up the right to write."""
        if self._lock is not None:
            self._lock.close()
        self.engine.dispose()

    @property
    def file(self) -> Path | None:
        """The database's file; None: the database is on a server."""
        return Path(self.name) if self.engine.dialect.name == "sqlite" else None

    def used_bytes(self) -> int:
        """What the database takes on its disk."""
        if (file := self.file) is None:
            with self.read() as db:
                return int(db.scalar(sa.text("SELECT pg_database_size(current_database())")) or 0)
        return sum(part.stat().st_size for part in (file, file.with_name(file.name + "-wal")) if part.exists())

    def export(self) -> Iterator[dict[str, Any]]:
        """Every row of every table, as JSON objects with the key `table`; secrets' digests are left out."""
        for table in t.metadata.sorted_tables:
            with self.read() as db:
                for row in db.execution_options(yield_per=CHUNK).execute(sa.select(table)):
                    values = dict(row._mapping)
                    values.pop("digest", None)
                    if "record" in values and isinstance(values["record"], bytes):
                        values["record"] = json.loads(zlib.decompress(values["record"]))
                    yield {"table": table.name} | values

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read with."""
        try:
            with self.engine.connect() as db:
                yield db
        except SQLAlchemyError as error:
            raise self._unusable(error) from error

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction. Writers of this process queue here rather than at SQLite, which polls.

        If others may take over, it fails unless this process leads until it ends: a takeover waits for it.
        """
        assert self._lock is not None or self.leadership.fenced, "a reader does not write"
        try:
            with (
                self._writing,
                self.leadership.write("store", "transaction"),
                self.engine.connect().execution_options(penstock_write=True) as db,
                db.begin(),
            ):
                if self.leadership.fenced and not db.scalar(_present(self.leadership.number)):
                    raise NotLeading(f"nothing is written to the store {self.name}: another penstockd leads")
                yield db
        except SQLAlchemyError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: SQLAlchemyError) -> StoreError:
        cause = str(getattr(error, "orig", None) or error).strip()
        if "full" in cause:
            return StoreError(f"{self.name}: {cause}; free some space, running jobs are not affected")
        return StoreError(f"{self.name}: {cause}; check that the database is up and may be written")

    def _upsert(self, table: sa.Table, keys: Sequence[str], values: Sequence[str]) -> Any:
        """An insert that replaces these values where a row with these keys exists."""
        insert = self._insert(table)
        return insert.on_conflict_do_update(
            index_elements=keys, set_={name: getattr(insert.excluded, name) for name in values}
        )

    def _rows(self, id_: Any, column: Any, where: Any) -> Iterator[str]:
        """A column in the order of `id_`, in chunks, so that a reader does not hold up the writer's clean-up."""
        last = -1
        while True:
            chosen = sa.select(id_, column).where(where, id_ > last).order_by(id_).limit(CHUNK)
            with self.read() as db:
                rows = db.execute(chosen).all()
            for _, value in rows:
                yield value
            if len(rows) < CHUNK:
                return
            last = rows[-1][0]


def _present(number: int) -> Any:
    """The query that finds this term while it is the present one, and keeps it so until the transaction ends."""
    c = t.leadership.c
    return sa.select(c.number).where(c.number == number).with_for_update(read=True, key_share=True)


def newest_change(db: Connection, table: sa.Table) -> int:
    """The number of the newest change in a table with the column `changed`; 0: there was none."""
    return int(db.scalar(sa.select(sa.func.max(table.c.changed))) or 0)


def named(row: Any) -> dict[str, Any]:
    """A row as a dict, with the column `user_name` as `user`."""
    values = dict(row._mapping)
    values["user"] = values.pop("user_name")
    return values
