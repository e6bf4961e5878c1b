"""Stores of the tests' own: in SQLite, and in PostgreSQL where its programs are installed."""

from __future__ import annotations

import pytest

from penstock_scheduler.store.sql import open_store
from tests.scheduler.databases import REASON, available, new_database, postgresql


@pytest.fixture(scope="session")
def server():
    if not available():
        pytest.skip(REASON)
    with postgresql() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request, tmp_path):
    """An empty place for a store: a folder, or a database of the server's."""
    if request.param == "sqlite":
        yield str(tmp_path / "state")
        return
    yield new_database(request.getfixturevalue("server"))


@pytest.fixture
def store(where):
    opened = open_store(where, writer=True, keep_rounds=2, keep_days=1)
    yield opened
    opened.close()
