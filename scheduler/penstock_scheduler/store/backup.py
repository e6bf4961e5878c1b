"""Backups of the store: one SQLite file with every row, whichever database the store is in.

A backup is made in one read transaction, so it is the store of one moment, while penstockd goes on writing. It can be restored
into SQLite and into PostgreSQL, so it also moves a store from one to the other. Besides the store's own tables, the file has:

- `backup`: one row, an `About`;
- `backup_tables`: the number of rows of each table, and a checksum over them.

A restore replaces the whole store in one transaction, or nothing. What it cannot know is said in docs/admin/maintenance.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from penstock_profiles.wire import read
from penstock_scheduler import __version__
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.people.units import moment
from penstock_scheduler.store import schema
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.cloud_runs import OLDER_STORE
from penstock_scheduler.store.opening import open_engine

FORMAT = 1
"""Version of the file's form. A reader refuses a newer one."""

CHUNK = 1000
"""Rows that are copied at a time."""

RESTORED = "restored"
"""Name of the stored control that says that the store was restored (a `Restored`), or was found to be older than the jobs (why).
penstockd removes it when it acts."""

TERMS_SINCE = 1_000_000
"""By how much a restore raises the fencing number: more terms than there can have been since the backup was made. A frozen
leader of one of them wakes up to a higher number."""

OWN_TABLES = ("backup", "backup_tables")
NOT_COUNTED = ("alembic_version", "compatibility", "leadership", "standbys")
"""Tables that an empty store has rows in."""

Tell = Callable[[str, int, int], None]
"""Called with a table, the rows of it that are done, and all of its rows."""


class About(BaseModel):
    """What a backup is of."""

    model_config = ConfigDict(frozen=True)

    format: int = FORMAT
    made_s: float
    """When its transaction began, s since 1970."""
    version: str
    """The version of Penstock that made it."""
    revision: str
    """The store's schema."""
    round: int | None
    """The newest round; None: there is none."""

    def __str__(self) -> str:
        return f"of {moment(self.made_s)}, {'no round' if self.round is None else f'round {self.round}'}"


class Restored(BaseModel):
    """What a restored store says of itself."""

    model_config = ConfigDict(frozen=True)

    made_s: float
    """When the backup was made, s since 1970."""
    restored_s: float


def make_backup(where: str | Path, file: Path, tell: Tell = lambda table, done, rows: None) -> About:
    """Copy a store into a new file that only its owner may read, and check the copy.

    Raises:
        StoreError: the file exists or cannot be written, there is no store, or its schema is newer than this version's.
    """
    if file.exists():
        raise StoreError(f"{file} exists; give another name, or remove it first")
    engine, name, _ = open_engine(where, lock=False)
    beside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        about = _copy_out(engine, name, beside, tell)
        check_backup(beside)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        os.link(beside, file)  # fails if the file exists, which a rename does not
    except FileExistsError:
        raise StoreError(f"{file} exists; give another name, or remove it first") from None
    except OSError as error:
        raise StoreError(f"{file}: {error.strerror}; give a file in a folder with enough space") from None
    except SQLAlchemyError as error:
        raise StoreError(f"{name}: no backup was made: {_cause(error)}") from error
    finally:
        for suffix in ("", "-wal", "-shm"):
            beside.with_name(beside.name + suffix).unlink(missing_ok=True)
        engine.dispose()
    return about


def check_backup(file: Path) -> About:
    """Read a whole backup. Raises StoreError if it is none, or damaged."""
    with _opened(file) as source:
        about = _about(source, file)
        for table, rows, checksum in _contents(source, file):
            _compare(file, table.name, rows, checksum, *_copy(source, None, table, rows))
    return about


def restore_backup(
    where: str | Path, file: Path, *, replace: bool = False, tell: Tell = lambda table, done, rows: None
) -> About:
    """Replace a store by a backup, and bring it to this version's schema. All or nothing.

    Raises:
        StoreError: penstockd uses the store; the store has contents and `replace` is false; or the file is no backup, is
            damaged, or is of a newer version.
    """
    with _opened(file) as source:
        about = _about(source, file)
        if about.revision > t.REVISION:
            raise StoreError(
                f"{file} has the schema {about.revision} of Penstock {about.version}, and this version knows {t.REVISION}; "
                f"install Penstock {about.version} to restore it"
            )
        engine, name, lock = open_engine(where, lock=True)
        assert lock is not None
        try:
            with engine.connect().execution_options(penstock_write=True) as target, target.begin():
                kept = _make_room(target, name, about, replace=replace)
                schema.migrate(target, about.revision)
                for table, rows, checksum in _contents(source, file):
                    _compare(file, table.name, rows, checksum, *_copy(source, target, table, rows, tell))
                schema.migrate(target)
                _adjust(target, about, file, kept)
        except SQLAlchemyError as error:
            raise StoreError(f"{name}: nothing was restored: {_cause(error)}") from error
        finally:
            lock.close()
            engine.dispose()
    return about


def _copy_out(engine: Engine, name: str, file: Path, tell: Tell) -> About:
    consistent = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
    target_engine = schema.sqlite_engine(file, write=True)
    with engine.connect().execution_options(**consistent) as source, source.begin():
        found = schema.revision(source)  # from here on, the transaction sees the store of this moment
        made_s = time.time()
        if found is None:
            raise StoreError(f"{name} holds no store yet; there is nothing to back up")
        if found > t.REVISION:
            raise StoreError(f"{name} has the schema {found}; make the backup with the newer version that made it")
        schema.upgrade(target_engine, found)
        with target_engine.connect().execution_options(penstock_write=True) as target, target.begin():
            about = About(
                made_s=made_s,
                version=__version__,
                revision=found,
                round=source.scalar(sa.text("SELECT max(round) FROM rounds")),
            )
            target.execute(sa.text("CREATE TABLE backup (about TEXT NOT NULL)"))
            target.execute(sa.text("CREATE TABLE backup_tables (name TEXT, number INTEGER, checksum TEXT)"))
            target.execute(sa.text("INSERT INTO backup VALUES (:about)"), {"about": about.model_dump_json()})
            for table in _tables(target):
                rows = int(source.scalar(sa.select(sa.func.count()).select_from(table)) or 0)
                done, checksum = _copy(source, target, table, rows, tell)
                target.execute(
                    sa.text("INSERT INTO backup_tables VALUES (:name, :number, :checksum)"),
                    {"name": table.name, "number": done, "checksum": checksum},
                )
    with closing(target_engine.raw_connection()) as raw:
        raw.cursor().execute("PRAGMA journal_mode=DELETE")  # the file is whole without a file beside it
    target_engine.dispose()
    return about


def _tables(connection: Connection) -> list[sa.Table]:
    """The store's tables as they are in a database, without Alembic's."""
    found = sa.MetaData()
    found.reflect(connection)
    return [table for table in found.sorted_tables if table.name not in ("alembic_version", *OWN_TABLES)]


def _contents(source: Connection, file: Path) -> Iterator[tuple[sa.Table, int, str]]:
    """(table, rows, checksum) of a backup. Raises StoreError if a table lacks."""
    rows = source.execute(sa.text("SELECT name, number, checksum FROM backup_tables")).all()
    tables = {table.name: table for table in _tables(source)}
    if lacking := {name for name, _, _ in rows} ^ tables.keys():
        raise StoreError(f"{file} is damaged: {', '.join(sorted(lacking))}; use another backup")
    for name, number, checksum in rows:
        yield tables[name], number, checksum


def _copy(
    source: Connection,
    target: Connection | None,
    table: sa.Table,
    rows: int,
    tell: Tell = lambda table, done, rows: None,
) -> tuple[int, str]:
    """Copy a table's rows, if there is a target, in place of those there. Returns their number, and a checksum over them."""
    keys = [*table.primary_key.columns]
    chosen = sa.select(table).order_by(*keys)
    checksum, done = hashlib.sha256(), 0
    if target is not None:
        target.execute(table.delete())
    with source.execute(chosen.execution_options(yield_per=CHUNK)) as found:
        for part in found.partitions():
            for row in part:
                checksum.update(_line(row))
            if target is not None:
                target.execute(table.insert(), [dict(row._mapping) for row in part])
            done += len(part)
            tell(table.name, done, rows)
    if target is not None:
        _number_on(target, table)
    return done, checksum.hexdigest()


def _line(row: Sequence[Any]) -> bytes:
    """A row as text, the same from every database."""
    return json.dumps([each.hex() if isinstance(each, bytes) else each for each in row]).encode() + b"\n"


def _number_on(target: Connection, table: sa.Table) -> None:
    """Let PostgreSQL number the next rows after those that were copied with their numbers."""
    if target.dialect.name != "postgresql":
        return
    for column in table.primary_key.columns:
        sequence = target.scalar(sa.select(sa.func.pg_get_serial_sequence(table.name, column.name)))
        if sequence is not None:
            newest = target.scalar(sa.select(sa.func.max(column)))
            if newest is not None:
                target.execute(sa.select(sa.func.setval(sequence, newest)))


def _compare(file: Path, table: str, rows: int, checksum: str, found: int, sum_found: str) -> None:
    if (rows, checksum) != (found, sum_found):
        raise StoreError(f"{file} is damaged: table {table} differs from its checksum; use another backup")


@contextmanager
def _opened(file: Path) -> Iterator[Connection]:
    """A backup, read only. Raises StoreError."""
    if not file.is_file():
        raise StoreError(f"{file} does not exist; give a file that `penstock db backup` made")
    engine = schema.sqlite_engine(file, write=False)
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise StoreError(f"{file} cannot be read as a backup: {_cause(error)}") from error
    finally:
        engine.dispose()


def _about(source: Connection, file: Path) -> About:
    try:
        about = read(About, str(source.scalar(sa.text("SELECT about FROM backup"))))
    except (SQLAlchemyError, ValidationError):
        raise StoreError(f"{file} is no backup of Penstock; give a file that `penstock db backup` made") from None
    if about.format > FORMAT:
        raise StoreError(f"{file} has format {about.format}, and this version reads {FORMAT}; upgrade Penstock")
    return about


def _make_room(target: Connection, name: str, about: About, *, replace: bool) -> dict[str, Any]:
    """Drop the store that is there. Returns what outlives it: its fencing number and its revoked tokens. Raises StoreError."""
    found = sa.MetaData()
    found.reflect(target)
    if not found.tables:
        return {"number": 0, "revoked": []}
    filled = [
        table
        for table in found.sorted_tables
        if table.name not in NOT_COUNTED
        and target.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first()
    ]
    if filled and not replace:
        newest = None
        if "rounds" in found.tables:
            c = found.tables["rounds"].c
            newest = target.execute(sa.select(c.round, c.time_s).order_by(c.round.desc()).limit(1)).first()
        has = "is not empty" if newest is None else f"has round {newest[0]} of {moment(newest[1])}"
        newer = newest is not None and newest[1] > about.made_s
        raise StoreError(
            f"{name} {has}{', which is newer than the backup' if newer else ''} ({about}); nothing was restored. Make a "
            "backup of it, then use --replace to put the older store in its place"
        )
    number, revoked = 0, []
    if "leadership" in found.tables:
        number = int(target.scalar(sa.select(sa.func.max(found.tables["leadership"].c.number))) or 0)
    if "tokens" in found.tables:
        c = found.tables["tokens"].c
        revoked = [*target.scalars(sa.select(c.token).where(c.revoked.is_(True)))]
    found.drop_all(target)
    return {"number": number, "revoked": revoked}


def _adjust(target: Connection, about: About, file: Path, kept: dict[str, Any]) -> None:
    """What must not be as it was when the backup was made."""
    now_s = time.time()
    newest = max(kept["number"], int(target.scalar(sa.select(sa.func.max(t.leadership.c.number))) or 0))
    given_up = {"number": newest + TERMS_SINCE, "released": True, "successor": ""}
    target.execute(t.leadership.update().values(**given_up))
    target.execute(t.standbys.delete())
    target.execute(t.sessions.delete())  # one may have been ended since
    for token in kept["revoked"]:
        target.execute(t.tokens.update().where(t.tokens.c.token == token).values(revoked=True))
    told = Restored(made_s=about.made_s, restored_s=now_s).model_dump_json()
    target.execute(t.controls.delete().where(t.controls.c.name.in_((RESTORED, OLDER_STORE))))
    target.execute(t.controls.insert(), [{"name": name, "value": told} for name in (RESTORED, OLDER_STORE)])
    line = {
        "time_s": now_s,
        "user_name": _user(),
        "role": "admin",
        "action": "penstock db restore",
        "target": str(file)[:255],
    }
    text = f"the backup {about}; audit lines since then are lost"
    target.execute(t.audit.insert(), line | {"allowed": True, "text": text, "address": "", "token": ""})


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _cause(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]
