"""Stores of the tests' own: in SQLite, and in PostgreSQL where its programs are installed."""

from __future__ import annotations

import shutil

import pytest

from penstock_scheduler.cli import db
from penstock_scheduler.store import schema, tables
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


NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0012", "0011"


def upgrade():
    op.add_column("jobs", sa.Column("of_the_next_release", sa.String(10)))
"""


@pytest.fixture
def next_release(monkeypatch, tmp_path_factory):
    """This version with one more migration, which only adds: the release after this one. A function to become it."""

    def become() -> str:
        folder = tmp_path_factory.mktemp("next") / "migrations"
        shutil.copytree(schema.MIGRATIONS, folder)
        (folder / "versions" / "v0012_next.py").write_text(NEXT)
        monkeypatch.setattr(schema, "MIGRATIONS", folder)
        for module in (tables, schema, db):
            monkeypatch.setattr(module, "REVISION", "0012")
        return "0012"

    return become
