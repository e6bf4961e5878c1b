"""`penstock db backup` and `penstock db restore`, in SQLite and PostgreSQL and from one to the other."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from penstock_scheduler.api.access_messages import SessionRow, TokenView
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.cli import make_app
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import backup, schema
from penstock_scheduler.store.backup import RESTORED, TERMS_SINCE, check_backup, make_backup, restore_backup
from penstock_scheduler.store.cloud_runs import OLDER_STORE
from penstock_scheduler.store.leadership.leader_table import LeaderTable
from penstock_scheduler.store.opening import open_engine
from penstock_scheduler.store.sql import open_store
from penstock_scheduler.store.tables import REVISION
from tests.scheduler.databases import new_database
from tests.scheduler.store.test_store import numbered, report, view


def token(name: str, *, revoked: bool = False) -> TokenView:
    fields = {"id": name, "user": "ada", "role": "admin", "created_s": 1.0, "expires_s": 9e9, "revoked": revoked}
    return TokenView.model_validate(fields | {"note": "", "job": None})


def fill(where: str) -> None:
    """Something in many tables."""
    store = open_store(where, writer=True)
    for number in (1, 2, 3):
        store.save_round(numbered(number, 1000.0 + number))
    store.add_reports([report(0), report(1)])
    charge = LedgerLine(
        id=0, key="k", time_s=1.0, account="a", user="ada", job="1", kind="gpu-seconds", amount=1.5, text="t4"
    )
    store.save_jobs([view("1"), view("2", state="ended", end_s=5.0)], [charge])
    store.add_token(token("one"), "digest")
    row = {"id": "s", "user": "ada", "token": None, "created_s": 1.0, "expires_s": 9e9, "address": ""}
    store.add_session(SessionRow.model_validate(row), "digest", now_s=1.0, most=5)
    store.set_control("paused", True)
    store.note("ada", "admin", "pause", "", allowed=True)
    store.close()


def contents(where: str) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table, without what a restore sets anew."""
    engine, _, _ = open_engine(where, lock=False)
    with engine.connect() as db:
        found = {
            table.name: [tuple(row) for row in db.execute(sa.select(table).order_by(*table.primary_key.columns))]
            for table in backup._tables(db)
        }
    engine.dispose()
    for name in ("leadership", "standbys", "sessions"):
        del found[name]
    found["controls"] = [row for row in found["controls"] if row[0] not in (RESTORED, OLDER_STORE)]
    found["audit"] = [row for row in found["audit"] if "penstock db restore" not in row]
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def other(request, tmp_path):
    """A second place for a store."""
    return str(tmp_path / "other") if request.param == "sqlite" else new_database(request.getfixturevalue("server"))


def test_a_backup_restores_every_row_into_either_database(where, other, tmp_path):
    fill(where)
    before = contents(where)
    file = tmp_path / "backup.db"
    told = CliRunner().invoke(make_app(), ["db", "backup", str(file), where])
    assert told.exit_code == 0, told.exception
    assert f"round 3, schema {REVISION}" in told.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "tokens' digests are in it"
    assert [path.name for path in file.parent.glob("*backup*")] == ["backup.db"], "nothing is left beside it"
    told = CliRunner().invoke(make_app(), ["db", "restore", str(file), other])
    assert told.exit_code == 0, told.exception
    assert "restored from the backup of" in told.output
    assert contents(other) == before
    store = open_store(other, writer=True)
    assert store.last_round() == numbered(3, 1003.0)
    store.add_reports([report(2)])
    store.save_jobs([view("3")])
    store.note("ada", "admin", "resume", "", allowed=True)
    assert len({line.id for line in store.audit()}) == 3, "new rows get new numbers"
    store.close()


def test_a_backup_is_of_one_moment_while_penstockd_writes(where, tmp_path, monkeypatch):
    fill(where)
    store = open_store(where, writer=True)
    wrote = threading.Event()

    def write_in_between(table: str, done: int, rows: int) -> None:
        if not wrote.is_set():
            wrote.set()
            store.save_round(numbered(4, 2000.0))
            store.save_jobs([view("4")])
            store.add_reports([report(7)])

    made = make_backup(where, tmp_path / "backup.db", write_in_between)
    assert wrote.is_set()
    assert made.round == 3
    store.close()
    restore_backup(tmp_path / "restored", tmp_path / "backup.db")
    restored = open_store(tmp_path / "restored")
    assert restored.round_numbers() == [1, 2, 3]
    assert restored.job("4") is None
    assert len(list(restored.reports())) == 2


def test_what_must_not_come_back(where, tmp_path):
    """Terms, browser sessions, revoked tokens; and penstockd and the audit log are told."""
    fill(where)
    make_backup(where, tmp_path / "backup.db")
    store = open_store(where, writer=True)
    store.revoke_token("one")
    table = LeaderTable(store.engine, "store")
    for holder in ("head1", "head2"):
        table.take(table.term(), holder, "0", "")
    number = table.term().number
    store.close()
    restore_backup(where, tmp_path / "backup.db", replace=True)
    store = open_store(where)
    term = LeaderTable(store.engine, "store").term()
    assert term.number == number + TERMS_SINCE
    assert term.released
    assert store.sessions() == []
    assert [view.revoked for view, _ in store.tokens()] == [True]
    assert store.control(RESTORED)["made_s"] > 1.7e9
    assert store.control(OLDER_STORE) is not None
    newest = store.audit(limit=1)[0]
    assert (newest.action, newest.target) == ("penstock db restore", str(tmp_path / "backup.db"))


def test_a_store_with_contents_is_replaced_only_when_told(where, tmp_path):
    fill(where)
    make_backup(where, tmp_path / "backup.db")
    store = open_store(where, writer=True)
    store.save_round(numbered(4, 9e9))
    store.close()
    before = contents(where)
    with pytest.raises(
        StoreError, match=r"has round 4 of 2255-.*, which is newer than the backup .*; nothing was restored"
    ):
        restore_backup(where, tmp_path / "backup.db")
    assert contents(where) == before
    restore_backup(where, tmp_path / "backup.db", replace=True)
    assert open_store(where).round_numbers() == [1, 2, 3]


def test_nothing_is_restored_under_a_running_penstockd(where, tmp_path):
    fill(where)
    make_backup(where, tmp_path / "backup.db")
    store = open_store(where, writer=True)
    with pytest.raises(StoreError, match="is in use by another penstockd; stop it"):
        restore_backup(where, tmp_path / "backup.db", replace=True)
    store.close()


def test_a_damaged_backup_restores_nothing(where, tmp_path):
    fill(where)
    file = tmp_path / "backup.db"
    make_backup(where, file)
    before = contents(where)
    with sqlite3.connect(file) as db:
        db.execute("UPDATE ledger SET amount = amount + 1")
    with pytest.raises(StoreError, match="is damaged: table ledger differs from its checksum"):
        check_backup(file)
    with pytest.raises(StoreError, match="is damaged: table ledger"):
        restore_backup(where, file, replace=True)
    assert contents(where) == before
    with sqlite3.connect(file) as db:
        db.execute("DROP TABLE ledger")
    with pytest.raises(StoreError, match="is damaged"):
        check_backup(file)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(StoreError):
        restore_backup(where, file, replace=True)
    assert contents(where) == before


def test_files_that_are_no_backup_are_named(tmp_path):
    fill(str(tmp_path / "state"))
    with pytest.raises(StoreError, match="does not exist"):
        restore_backup(tmp_path / "new", tmp_path / "none")
    with pytest.raises(StoreError, match="is no backup of Penstock"):
        restore_backup(tmp_path / "new", tmp_path / "state" / schema.FILE)
    (tmp_path / "text").write_text("hello, this is a file with some text in it, which is no database at all")
    with pytest.raises(StoreError, match="is no backup of Penstock"):
        restore_backup(tmp_path / "new", tmp_path / "text")


def test_a_file_that_exists_is_never_overwritten(tmp_path):
    fill(str(tmp_path / "state"))
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(StoreError, match="kept exists; give another name"):
        make_backup(tmp_path / "state", tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_backup_of_an_older_schema_is_upgraded(where, tmp_path, next_release):
    old = open_store(where, writer=True)
    old.set_control("paused", True)
    old.close()
    before, after = REVISION, next_release()
    about = make_backup(where, tmp_path / "backup.db")
    assert about.revision == before
    restore_backup(tmp_path / "new", tmp_path / "backup.db")
    restored = open_store(tmp_path / "new")
    assert restored.control("paused") is True
    with restored.read() as db:
        assert schema.revision(db) == after


def test_a_backup_of_a_newer_schema_is_refused(tmp_path):
    fill(str(tmp_path / "state"))
    file: Path = tmp_path / "backup.db"
    make_backup(tmp_path / "state", file)
    with sqlite3.connect(file) as db:
        db.execute("UPDATE backup SET about = json_set(about, '$.revision', '9999', '$.version', '9.9.0')")
    with pytest.raises(StoreError, match=r"has the schema 9999 of Penstock 9.9.0.*; install Penstock 9.9.0"):
        restore_backup(tmp_path / "new", file)


def test_no_message_has_the_databases_password(server, tmp_path):
    where = new_database(server).replace("penstock@", "penstock:open-sesame@")
    fill(where)
    told = CliRunner().invoke(make_app(), ["db", "backup", str(tmp_path / "b"), where])
    again = CliRunner().invoke(make_app(), ["db", "restore", str(tmp_path / "b"), where])
    replaced = CliRunner().invoke(make_app(), ["db", "restore", str(tmp_path / "b"), where, "--replace"])
    said = [told.output, str(again.exception), replaced.output]
    assert all("penstock:***@" in each for each in said), said
