"""`penstockd --check` connects to what the settings name."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock_loopback.machine import free_ports
from penstock_scheduler.daemon import penstockd
from penstock_scheduler.store.sql import open_store
from tests.scheduler import databases

SIMULATED = "[simulated]\nnodes = 't4:2x4'\n"


def check(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    path.write_text(text + SIMULATED)
    status = penstockd.main(["--config", str(path), "--check"])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.skipif(not databases.available(), reason=databases.REASON)
def test_a_wrong_password_of_the_database_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    with databases.restartable() as server:
        where = databases.new_database(server.url)
        engine = sa.create_engine(f"{server.url}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sa.text("ALTER USER penstock PASSWORD 'right'"))
            rules = Path(str(connection.scalar(sa.text("SHOW hba_file"))))
            rules.write_text("host all all 127.0.0.1/32 scram-sha-256\n")
            connection.execute(sa.text("SELECT pg_reload_conf()"))
        engine.dispose()
        time.sleep(0.5)
        settings = "[daemon]\ncluster = 'simulated'\nstore = '{}'\n"
        right, wrong = (where.replace("penstock@", f"penstock:{word}@") for word in ("right", "wrong"))
        status, out, err = check(tmp_path / "p.toml", settings.format(wrong), capsys)
        assert (status, out) == (1, "")
        assert "[daemon] store: " in err
        assert "password authentication failed" in err
        assert "wrong@" not in err, "the password is not shown"
        assert check(tmp_path / "p.toml", settings.format(right), capsys)[0] == 0


def test_all_faults_are_told_at_once_and_in_time(
    tmp_path: Path, certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of an older Penstock, a key that is none, no mail server; one webhook listens, and of another nothing answers."""
    store = open_store(tmp_path / "state", writer=True)
    with store.engine.connect() as db:
        db.execute(sa.text("UPDATE alembic_version SET version_num = '0000'"))
        db.commit()
    store.close()
    closed, silent = free_ports(1), tmp_path / "key"
    silent.write_text("no key\n")
    with socket.create_server(("127.0.0.1", 0)) as hook, socket.create_server(("127.0.0.1", 0)) as mute:
        began_s = time.monotonic()
        text = (
            f"[daemon]\ncluster = 'simulated'\nstate_dir = '{tmp_path / 'state'}'\n"
            f"[api]\ntls_certificate = '{certificate[0]}'\ntls_key = '{silent}'\n"
            f"[notices]\nsmtp = '127.0.0.1:{closed}'\n"
            f"webhooks = ['http://127.0.0.1:{hook.getsockname()[1]}/x', 'https://127.0.0.1:{mute.getsockname()[1]}/x']\n"
        )
        status, out, err = check(tmp_path / "p.toml", text, capsys)
        assert time.monotonic() - began_s < 30
    assert (status, out) == (1, "")
    told = err.splitlines()
    assert [line.split(":")[1].strip() for line in told] == [
        "[daemon] store",
        "[api] tls_certificate",
        "[notices] smtp",
        "[notices] webhooks",
    ], err
    assert "penstock db upgrade" in told[0]
    assert str(silent) in told[1]


def test_nothing_is_made_by_the_check(
    tmp_path: Path, certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        f"[daemon]\ncluster = 'simulated'\nstate_dir = '{tmp_path / 'state'}'\n"
        f"[api]\ntls_certificate = '{certificate[0]}'\ntls_key = '{certificate[1]}'\n"
    )
    status, out, _ = check(tmp_path / "p.toml", text, capsys)
    assert status == 0
    assert "settings: ok" in out
    assert not (tmp_path / "state").exists()
