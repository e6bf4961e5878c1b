"""The database's side of leadership: the tables `leadership` and `standbys`.

`leadership` has one row. Its key is the fencing number, because of what PostgreSQL does with keys: each transaction of the store
locks the row of its number FOR KEY SHARE. A confirmation changes no key and goes on beside that. A takeover changes the key, so
it waits for transactions of the term before, and whatever this term sends later finds no row with its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.leadership.terms import Leader, Standby, Term

FORGET_S = 86_400.0
"""A standby that has not been heard of for this long is forgotten."""

_END_STALE = sa.text(
    """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE usename = current_user AND pid <> pg_backend_pid() AND xact_start <= clock_timestamp() - make_interval(secs => :seconds)
    AND pid IN (SELECT pid FROM pg_locks WHERE relation = 'leadership'::regclass AND database =
        (SELECT oid FROM pg_database WHERE datname = current_database()) AND mode IN ('RowShareLock', 'RowExclusiveLock'))
    """
)
"""The server's own limit (`schema.bound_transactions`) does not end a transaction whose client stopped within an executemany:
psycopg sends that as a pipeline, and the server waits for its end as long as it takes."""


class LeaderTable:
    """See the module. Methods raise StoreError.

    Args:
        engine: an engine of its own, so that a confirmation never waits for a connection.
        name: the database's name in messages.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self.name = engine, name
        self._server = engine.dialect.name == "postgresql"
        self._now: Any = (
            sa.func.extract("epoch", sa.func.clock_timestamp())
            if self._server
            else (sa.func.julianday("now") - 2440587.5) * 86400.0
        )

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def time_s(self) -> float:
        """The time by the database's clock, s since 1970."""
        with self._transaction() as db:
            return float(db.execute(sa.select(self._now)).scalar_one())

    def term(self) -> Term:
        """The present term. Before the first one, it is a released one with the number 0."""
        c = t.leadership.c
        with self._transaction() as db:
            return Term(*db.execute(sa.select(c.number, c.beat, c.holder, c.released, c.successor)).one())

    def take(self, seen: Term, holder: str, version: str, address: str, stale_s: float = math.inf) -> int | None:
        """Begin a new term after `seen`. Returns its fencing number; None: the term has changed meanwhile.

        Transactions of the same database user that would hold this up, and began `stale_s` ago or earlier, are ended: those of a
        frozen penstockd.
        """
        if self._server and stale_s < math.inf:
            with self._transaction() as db:
                db.execute(_END_STALE, {"seconds": stale_s})
        now = {"since_s": self._now, "beat_s": self._now}
        about = {"holder": holder, "version": version, "address": address, "released": False, "successor": ""}
        c = t.leadership.c
        with self._transaction() as db:
            same = c.number == seen.number, c.beat == seen.beat, c.released.is_(seen.released)
            new = {"number": c.number + 1, "beat": c.beat + 1}
            done = db.execute(t.leadership.update().where(*same).values(**new, **about, **now))
            if done.rowcount != 1:
                return None
            db.execute(t.standbys.delete().where(t.standbys.c.name == holder))
        return seen.number + 1

    def confirm(self, number: int) -> bool:
        """Confirm the term of this number. Returns whether it is still the present one."""
        c = t.leadership.c
        with self._transaction() as db:
            done = db.execute(
                t.leadership.update()
                .where(c.number == number, c.released.is_(False))
                .values(beat=c.beat + 1, beat_s=self._now)
            )
            return bool(done.rowcount)

    def release(self, number: int, successor: str) -> None:
        """Give up the term of this number, if it is still the present one."""
        c = t.leadership.c
        with self._transaction() as db:
            db.execute(
                t.leadership.update()
                .where(c.number == number)
                .values(beat=c.beat + 1, released=True, successor=successor)
            )

    def stand_by(self, name: str, version: str, round_: int | None) -> None:
        """Note that this penstockd stands by and has loaded this round."""
        insert = (postgresql.insert if self._server else sqlite.insert)(t.standbys)
        values = {"version": version, "round": round_, "seen_s": self._now}
        c = t.standbys.c
        with self._transaction() as db:
            db.execute(
                insert.values(name=name, since_s=self._now, **values).on_conflict_do_update(
                    index_elements=["name"],
                    set_=values | {"since_s": sa.case((c.seen_s < self._now - 60.0, self._now), else_=c.since_s)},
                )
            )
            db.execute(t.standbys.delete().where(c.seen_s < self._now - FORGET_S))

    def leave(self, name: str) -> None:
        """Note that this penstockd stands by no longer."""
        with self._transaction() as db:
            db.execute(t.standbys.delete().where(t.standbys.c.name == name))

    def leader(self) -> Leader:
        """The present term, for people."""
        c = t.leadership.c
        columns = (c.number, c.beat, c.holder, c.released, c.successor, c.version, c.address)
        with self._transaction() as db:
            row = db.execute(sa.select(*columns, self._now - c.since_s, self._now - c.beat_s)).one()
        return Leader(Term(*row[:5]), row[5], row[6], max(float(row[7]), 0.0), max(float(row[8]), 0.0))

    def standbys(self) -> list[Standby]:
        """All that have stood by within a day."""
        c = t.standbys.c
        chosen = sa.select(c.name, c.version, self._now - c.seen_s, self._now - c.since_s, c.round).order_by(c.name)
        with self._transaction() as db:
            rows = db.execute(chosen).all()
        return [Standby(row[0], row[1], max(float(row[2]), 0.0), max(float(row[3]), 0.0), row[4]) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(penstock_write=True) as db, db.begin():
                yield db
        except SQLAlchemyError as error:
            cause = str(getattr(error, "orig", None) or error).strip()
            raise StoreError(f"{self.name}: {cause}; check that the database is up and may be written") from error
