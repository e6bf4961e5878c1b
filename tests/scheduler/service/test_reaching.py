"""`penstockd --check` connects to what the settings name."""

from __future__ import annotations

import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from penstock_loopback.machine import free_ports
from penstock_scheduler.daemon import penstockd
from penstock_scheduler.store.sql import open_store
from tests.scheduler import databases
from tests.scheduler.service.test_log_in import IdentityProvider, provider

__all__ = ["provider"]

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


def test_an_identity_provider_that_does_not_answer_or_calls_itself_otherwise_is_found(
    tmp_path: Path, provider: IdentityProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    text = (
        f"[daemon]\ncluster = 'simulated'\nstate_dir = '{tmp_path / 'state'}'\n[api.oidc]\nissuer = '{{}}'\n"
        f"client_id = 'penstock'\nclient_secret_file = '{secret}'\npublic_url = 'https://penstock.example.org'\n"
    )
    status, _, err = check(tmp_path / "p.toml", text.format(f"http://127.0.0.1:{free_ports(1)}"), capsys)
    assert status == 1
    assert "[api.oidc]: the identity provider does not answer" in err
    status, _, err = check(tmp_path / "p.toml", text.format(f"{provider.url}/"), capsys)
    assert status == 1
    assert "it calls itself" in err
    assert check(tmp_path / "p.toml", text.format(provider.url), capsys)[0] == 0
    secret.unlink()
    status, _, err = check(tmp_path / "p.toml", text.format(provider.url), capsys)
    assert status == 1
    assert str(secret) in err


def test_the_end_of_a_certificate_is_told_and_an_expired_one_is_a_fault(
    tmp_path: Path, certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    made, key = certificate
    text = (
        f"[daemon]\ncluster = 'simulated'\nstate_dir = '{tmp_path / 'state'}'\n"
        f"[api]\ntls_certificate = '{made}'\ntls_key = '{key}'\n"
    )
    status, out, _ = check(tmp_path / "p.toml", text, capsys)
    assert status == 0
    assert f"certificate: {made} expires on {datetime.now(UTC) + timedelta(days=2):%Y-%m-%d}" in out
    before, signer = x509.load_pem_x509_certificate(made.read_bytes()), load_pem_private_key(key.read_bytes(), None)
    assert isinstance(signer, RSAPrivateKey | EllipticCurvePrivateKey)
    ended = datetime.now(UTC) - timedelta(days=1)
    begun, number = ended - timedelta(days=1), before.serial_number
    builder = x509.CertificateBuilder(before.issuer, before.subject, before.public_key(), number, begun, ended)
    made.write_bytes(builder.sign(signer, SHA256()).public_bytes(Encoding.PEM))
    status, _, err = check(tmp_path / "p.toml", text, capsys)
    assert status == 1
    assert f"[api] tls_certificate: {made}: certificate has expired" in err
