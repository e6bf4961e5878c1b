"""Stores of the tests' own: in SQLite, and in PostgreSQL where its programs are installed."""

from __future__ import annotations

import itertools

import pytest
import sqlalchemy as sa

from penstock_scheduler.store import open_store
from tests.scheduler.databases import REASON, available, postgresql


@pytest.fixture(scope="session")
def server():
    if not available():
        pytest.skip(REASON)
    with postgresql() as url:
        yield url


COUNT = itertools.count()


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request, tmp_path):
    """An empty place for a store: a folder, or a database of the server's."""
    if request.param == "sqlite":
        yield str(tmp_path / "state")
        return
    url, name = request.getfixturevalue("server"), f"test{next(COUNT)}"
    engine = sa.create_engine(f"{url}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    yield f"{url}/{name}"


@pytest.fixture
def store(where):
    opened = open_store(where, writer=True, keep_rounds=2, keep_days=1)
    yield opened
    opened.close()
