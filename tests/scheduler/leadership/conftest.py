"""Databases of the tests' own on a PostgreSQL server."""

from __future__ import annotations

import pytest

from tests.scheduler.databases import REASON, available, new_database, postgresql


@pytest.fixture(scope="session")
def server():
    if not available():
        pytest.skip(REASON)
    with postgresql() as url:
        yield url


@pytest.fixture
def make_database(server):
    """Makes empty databases; each call returns the URL of one."""
    return lambda: new_database(server)


@pytest.fixture
def database(make_database):
    return make_database()
