"""Rolling upgrades of the schema: a version works with a newer schema that allows it, or refuses and says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import schema
from penstock_scheduler.store.opening import candidate_engine, open_engine
from penstock_scheduler.store.sql import open_store
from penstock_scheduler.store.tables import COMPATIBLE_FROM, REVISION
from tests.scheduler.databases import new_database
from tests.scheduler.store.test_store import numbered


def revisions() -> list[str]:
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    return sorted(script.revision for script in ScriptDirectory.from_config(config).walk_revisions())


def seen(engine: sa.Engine | sa.Connection) -> dict[str, dict[str, Any]]:
    """Table -> its columns, and what restricts its rows."""
    found = {}
    inspector = sa.inspect(engine)
    for table in inspector.get_table_names():
        unique = {str(index["column_names"]) for index in inspector.get_indexes(table) if index["unique"]}
        unique |= {str(each["column_names"]) for each in inspector.get_unique_constraints(table)}
        limits = unique | {str(inspector.get_pk_constraint(table)["constrained_columns"])}
        limits |= {str(each) for each in (*inspector.get_foreign_keys(table), *inspector.get_check_constraints(table))}
        found[table] = {"columns": {each["name"]: each for each in inspector.get_columns(table)}, "limits": limits}
    return found


def disturbs(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """What a version that knows the schema before would notice of the schema after."""
    found = [f"table {name} is gone" for name in before.keys() - after.keys()]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if old["limits"] != new["limits"]:
            found.append(f"{name} restricts its rows in another way")
        for column, about in old["columns"].items():
            now = new["columns"].get(column)
            if now is None or str(now["type"]) != str(about["type"]) or now["nullable"] != about["nullable"]:
                found.append(f"{name}.{column} is gone or another")
        for column in new["columns"].keys() - old["columns"].keys():
            about = new["columns"][column]
            if not about["nullable"] and about["default"] is None:
                found.append(f"{name}.{column} must be set by each version that writes")
    return found


def test_a_migration_only_adds_unless_the_number_says_otherwise(tmp_path):
    engine, _, lock = open_engine(tmp_path, lock=True)
    steps = revisions()
    assert steps[-1] == REVISION
    assert COMPATIBLE_FROM in steps
    before: dict[str, dict[str, Any]] = {}
    for step in steps:
        schema.upgrade(engine, step)
        after = seen(engine)
        assert not disturbs(before, after) or step <= COMPATIBLE_FROM, f"migration {step}: {disturbs(before, after)}"
        before = after
    lock.close()


def test_what_only_adds_is_told_from_the_rest(tmp_path):
    engine, _, lock = open_engine(tmp_path, lock=True)
    schema.upgrade(engine)
    before = seen(engine)

    def after(statement: str) -> list[str]:
        with engine.connect() as db:
            transaction = db.begin()
            db.execute(sa.text(statement))
            found = disturbs(before, seen(db))
            transaction.rollback()
        return found

    assert after("ALTER TABLE jobs ADD COLUMN cost FLOAT") == []
    assert after("ALTER TABLE jobs ADD COLUMN cost FLOAT NOT NULL DEFAULT 0") == []
    assert after("CREATE TABLE more (x INTEGER PRIMARY KEY)") == []
    assert after("CREATE INDEX more ON jobs (name)") == []
    assert after("CREATE UNIQUE INDEX more ON jobs (name)") == ["jobs restricts its rows in another way"]
    assert after("DROP TABLE figures") == ["table figures is gone"]
    assert after("ALTER TABLE jobs RENAME COLUMN name TO title") == [
        "jobs.name is gone or another",
        "jobs.title must be set by each version that writes",
    ]
    lock.close()


def become_newer(where: str, from_revision: str | None) -> None:
    """Bring a store to a schema that this version does not know: a later version has added a column."""
    engine, _, lock = open_engine(where, lock=True)
    with engine.connect().execution_options(penstock_write=True) as db, db.begin():
        db.execute(sa.text("ALTER TABLE jobs ADD COLUMN of_a_later_version VARCHAR(10)"))
        db.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        if from_revision is None:
            db.execute(sa.text("DROP TABLE compatibility"))
        else:
            db.execute(sa.text("UPDATE compatibility SET from_revision = :x, version = '9.9.0'"), {"x": from_revision})
    lock.close()
    engine.dispose()


def test_a_newer_schema_that_allows_this_version_is_used(where):
    open_store(where, writer=True).close()
    become_newer(where, REVISION)
    store = open_store(where, writer=True)
    store.save_round(numbered(1))
    store.close()
    assert open_store(where).round_numbers() == [1]


@pytest.mark.parametrize(
    ("from_revision", "whose"), [("9999", "Penstock 9.9.0"), (None, "a newer version of Penstock")]
)
def test_a_newer_schema_that_does_not_is_refused_with_the_remedy(where, from_revision, whose):
    open_store(where, writer=True).close()
    become_newer(where, from_revision)
    for writer in (True, False):
        with pytest.raises(StoreError, match=f"has the schema 9999 of {whose}, and this version") as told:
            open_store(where, writer=writer)
        assert "upgrade Penstock here, or restore a backup" in str(told.value)
    error = CliRunner().invoke(make_app(), ["db", "upgrade", where]).exception
    assert "has the schema 9999, which is newer than this version's" in str(error)


@pytest.fixture
def leads(server, next_release):
    """A database with the schema before the newest, and the connection of a penstockd of that version that leads."""
    where = new_database(server)
    engine, _, lock = open_engine(where, lock=True)
    schema.upgrade(engine)
    lock.close()
    engine.dispose()
    leader, _ = candidate_engine(where, 5.0)
    next_release()
    with leader.connect() as connection:
        yield where, connection
    leader.dispose()


def test_a_running_penstockd_that_tolerates_the_upgrade_goes_on(leads, monkeypatch):
    where, connection = leads
    monkeypatch.setattr(schema, "COMPATIBLE_FROM", revisions()[-2])
    told = CliRunner().invoke(make_app(), ["db", "upgrade", where])
    assert told.exit_code == 0, told.exception
    assert f"upgraded from schema {revisions()[-2]} to {schema.REVISION}" in told.output
    assert connection.scalar(sa.text("SELECT count(*) FROM leadership")) == 1


def test_a_running_penstockd_that_does_not_tolerate_it_stops_the_upgrade(leads, monkeypatch):
    where, _ = leads
    monkeypatch.setattr(schema, "COMPATIBLE_FROM", schema.REVISION)
    error = CliRunner().invoke(make_app(), ["db", "upgrade", where]).exception
    assert "is in use by another penstockd; stop it" in str(error)


def test_an_upgrade_does_not_wait_for_ever_for_a_table_in_use(leads, monkeypatch):
    where, connection = leads
    monkeypatch.setattr(schema, "COMPATIBLE_FROM", revisions()[-2])
    monkeypatch.setattr(schema, "DDL_WAIT_S", 1.0)
    connection.execute(sa.text("LOCK TABLE alembic_version IN SHARE MODE"))
    error = CliRunner().invoke(make_app(), ["db", "upgrade", where]).exception
    assert "Try again, or stop all penstockd first" in str(error)
