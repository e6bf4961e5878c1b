"""Opening a database, and bringing its schema to the newest revision."""

from __future__ import annotations

import logging
import math
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import alembic.command
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from penstock_scheduler import __version__
from penstock_scheduler.people.errors import ConfigError, StoreError
from penstock_scheduler.store.tables import COMPATIBLE_FROM, REVISION, compatibility, metadata

log = logging.getLogger(__name__)

FILE = "penstock.db"
"""Name of the SQLite file in the daemon's state_dir."""

BUSY_S = 10.0
"""How long to wait for a locked SQLite file."""

MIGRATIONS = Path(__file__).parent / "migrations"

LOCK_NUMBER = 7_361_672_001
"""Number of the server's advisory lock on using the database. It is arbitrary, and the same in all versions."""

CREATE_NUMBER = LOCK_NUMBER + 1
"""Number of the server's advisory lock on creating or upgrading the schema."""

DDL_WAIT_S = 3.0
"""How long an upgrade beside a running penstockd waits for a table."""

NETWORK = {
    "connect_timeout": 3,
    "tcp_user_timeout": 4000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
}
"""libpq's parameters with which a server that is cut off is noticed within seconds; the URL may say otherwise. In s, but
tcp_user_timeout in ms."""


def sqlite_engine(path: Path, *, write: bool) -> Engine:
    """SQLite in WAL mode: readers do not wait for the writer. A commit is on disk when it returns."""

    def connect() -> sqlite3.Connection:
        mode = "rw" if write else "ro"  # a file that was removed does not come back empty
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode={mode}",
            uri=True,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        if write:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=5, max_overflow=20)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later fails if another one writes in between.
        writes = connection.get_execution_options().get("penstock_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def server_engine(url: str) -> Engine:
    """A database server, by SQLAlchemy's URL. Raises ConfigError."""
    try:
        parsed = make_url(url)
        bounds = {key: value for key, value in NETWORK.items() if key not in parsed.query}
        arguments = bounds if parsed.get_driver_name() in ("psycopg", "psycopg2") else {}
        return create_engine(parsed, pool_pre_ping=True, pool_size=5, max_overflow=20, connect_args=arguments)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(
            f"[daemon] store: {error}; give a URL such as postgresql+psycopg://user@host/penstock, and install "
            "psycopg (pip install 'psycopg[binary]')"
        ) from None


def bound_transactions(engine: Engine, timeout_s: float) -> None:
    """Let the server end each transaction of the engine's new connections in which nothing happens for this long."""

    @event.listens_for(engine, "connect")
    def bound(connection: Any, record: object) -> None:
        milliseconds = math.ceil(timeout_s * 1000)
        with connection.cursor() as cursor:
            cursor.execute(f"SET idle_in_transaction_session_timeout = {milliseconds}")
        connection.commit()


def tolerates_upgrade(where: str) -> bool:
    """Whether penstockd may use a server's database while it is upgraded: its version tolerates all missing migrations."""
    engine = server_engine(where)
    try:
        with engine.connect() as connection:
            found = revision(connection)
    except SQLAlchemyError as error:
        raise StoreError(f"{engine.url!r}: {str(error).splitlines()[0]}; check that the server is up") from error
    finally:
        engine.dispose()
    return found is not None and found >= COMPATIBLE_FROM


def revision(connection: Connection) -> str | None:
    """The schema's revision; None: the database is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: Engine, to: str = "head") -> None:
    """Run the missing migrations in one transaction. Raises StoreError; then the database is unchanged."""
    try:
        with engine.connect().execution_options(penstock_write=True) as connection, connection.begin():
            migrate(connection, to)
    except SQLAlchemyError as error:
        raise StoreError(
            f"{engine.url!r}: the schema cannot be brought to {to}: {error}; nothing was changed"
        ) from error


def upgrade_beside_others(engine: Engine) -> None:
    """The same while other penstockd use the database, for migrations that they tolerate.

    Raises:
        StoreError: as `upgrade`; also if a table was in use for too long.
    """
    try:
        with engine.connect() as connection, connection.begin():
            # A change to a table waits for the transactions that use it, and those that come later wait for the change.
            connection.execute(sa.text(f"SET LOCAL lock_timeout = '{DDL_WAIT_S:.0f}s'"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(CREATE_NUMBER)))
            migrate(connection)
    except SQLAlchemyError as error:
        cause = str(error).splitlines()[0]
        raise StoreError(
            f"{engine.url!r}: the schema cannot be upgraded beside a running penstockd: {cause}; nothing was changed. "
            "Try again, or stop all penstockd first"
        ) from error


def migrate(connection: Connection, to: str = "head") -> None:
    """Run the missing migrations in the connection's transaction, and note which versions can use the store from now on.

    Raises:
        StoreError: the schema, or the one to migrate to, is of a version before the first release.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    known = {"head", None, *(each.revision for each in ScriptDirectory.from_config(config).walk_revisions())}
    if strange := {revision(connection), to} - known:
        raise StoreError(
            f"the schema {strange.pop()} is of a development version from before the first release, and cannot be upgraded. "
            "The store stays as it is. Start penstockd with an empty one: jobs go on, and their history begins anew"
        )
    alembic.command.upgrade(config, to)
    if revision(connection) == REVISION:
        connection.execute(compatibility.delete())
        connection.execute(compatibility.insert(), {"from_revision": COMPATIBLE_FROM, "version": __version__})


def differences(engine: Engine) -> list[Any]:
    """Differences between the schema and what the code expects."""
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))


def expect_usable(connection: Connection, where: str) -> None:
    """Raises StoreError unless this version can use the store: its schema is this version's, or a newer one that allows it."""
    found = revision(connection)
    if found is None:
        raise StoreError(f"{where} holds no store yet; start penstockd, or give its state_dir")
    if found < REVISION:
        raise StoreError(f"{where} has the schema {found}, this version needs {REVISION}; run penstock db upgrade")
    if found == REVISION:
        return
    known = _compatibility(connection)
    if known is None or known[0] > REVISION:
        theirs = "a newer version of Penstock" if known is None else f"Penstock {known[1]}"
        raise StoreError(
            f"{where} has the schema {found} of {theirs}, and this version, {__version__}, can use no schema newer than "
            f"{REVISION} of it; upgrade Penstock here, or restore a backup from before the upgrade (penstock db restore)"
        )
    log.info("the store's schema is newer, and allows this version", extra={"schema": found, "mine": REVISION})


def _compatibility(connection: Connection) -> tuple[str, str] | None:
    """(oldest schema whose versions can use the store, the version that upgraded it); None: it does not say."""
    if not sa.inspect(connection).has_table(compatibility.name):
        return None
    row = connection.execute(sa.select(compatibility.c.from_revision, compatibility.c.version)).one_or_none()
    return None if row is None else (row[0], row[1])
