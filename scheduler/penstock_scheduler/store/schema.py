"""Opening a database, and bringing its schema to the newest revision."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import alembic.command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from penstock_scheduler.errors import ConfigError, StoreError
from penstock_scheduler.store.tables import REVISION, metadata

FILE = "penstock.db"
"""Name of the SQLite file in the daemon's state_dir."""

BUSY_S = 10.0
"""How long to wait for a locked SQLite file."""

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
        mode = "rwc" if write else "ro"
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


def revision(connection: Connection) -> str | None:
    """The schema's revision; None: the database is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: Engine, to: str = "head") -> None:
    """Run the missing migrations in one transaction. Raises StoreError; then the database is unchanged."""
    try:
        with engine.connect().execution_options(penstock_write=True) as connection, connection.begin():
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, to)
    except SQLAlchemyError as error:
        raise StoreError(
            f"{engine.url!r}: the schema cannot be brought to {to}: {error}; nothing was changed"
        ) from error


def differences(engine: Engine) -> list[Any]:
    """Differences between the schema and what the code expects."""
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))


def expect_newest(connection: Connection, where: str) -> None:
    """Raises StoreError unless the schema is the newest."""
    found = revision(connection)
    if found is None:
        raise StoreError(f"{where} holds no store yet; start penstockd, or give its state_dir")
    if found < REVISION:
        raise StoreError(f"{where} has the schema {found}, this version needs {REVISION}; run penstock db upgrade")
    if found > REVISION:
        raise StoreError(f"{where} has the schema {found}, newer than {REVISION}; upgrade penstock")
