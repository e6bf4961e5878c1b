"""`penstock leader init` writes what the hosts of several penstockd need."""

from __future__ import annotations

import socket
import ssl
import threading
import tomllib
from pathlib import Path

import pytest

from penstock_scheduler.rounds.settings import load_settings
from tests.scheduler.cli.commands import run

SETTINGS = """# the site's own
[slurm]
partitions = ["gpu"]  # two of them soon
spool_dir = "/shared/spool"

[api]
listen = "0.0.0.0:7373"
admins = [
  "ada",
]
tls = false

[daemon]
round_s = 30.0
"""
STORE = "postgresql+psycopg://penstock:s3cret@db/penstock"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(SETTINGS)
    return path


def init(config: Path, out: Path, *words: str):
    return run("leader", "init", "head1", "head2.example.org:7474", "--config", config, "--out", out, *words)


def refusal(config: Path, out: Path, *words: str) -> str:
    done = init(config, out, *words)
    assert done.exit_code != 0
    assert not list(out.parent.glob("heads*")) or out.exists(), "nothing is left of what failed"
    return f"{done.exception} {done.output}"


def modes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mode & 0o7777:o}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def greeting(server: Path, host: str, authority: Path) -> str:
    """What a client that trusts `authority` hears of `host`, where the server has the files of `server`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "tls.crt", server / "tls.key")
    trusting = ssl.create_default_context(cafile=str(authority))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT  # as by default from Python 3.13 on
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                try:
                    with context.wrap_socket(connection, server_side=True) as end:
                        end.sendall(b"welcome")
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listening.getsockname(), timeout=10) as plain,
                trusting.wrap_socket(plain, server_hostname=host) as end,
            ):
                return end.recv(7).decode()
        finally:
            thread.join(10)


def test_both_hosts_have_all_they_need(config: Path, tmp_path: Path):
    out = tmp_path / "heads"
    done = init(config, out, "--store", STORE, "--name", "penstock.example.org", "--name", "10.0.0.5")
    assert done.exit_code == 0, done.exception
    host = {"ca.crt": "644", "penstock.toml": "600", "tls.crt": "644", "tls.key": "600"}
    assert modes(out) == {"ca/ca.crt": "644", "ca/ca.key": "600", "penstock.sh": "644"} | {
        f"{name}/{file}": mode for name in ("head1", "head2.example.org") for file, mode in host.items()
    }
    assert f"{out.stat().st_mode & 0o7777:o}" == "700"
    assert (out / "penstock.sh").read_text() == (
        "export PENSTOCK_URL=https://head1:7373,https://head2.example.org:7474\n"
        "export PENSTOCK_CA=/etc/penstock/ca.crt\n"
    )
    for name, listen in (("head1", "head1:7373"), ("head2.example.org", "head2.example.org:7474")):
        written = out / name / "penstock.toml"
        load_settings(written)
        tables = tomllib.loads(written.read_text())
        assert tables == {
            "slurm": {"partitions": ["gpu"], "spool_dir": "/shared/spool"},
            "daemon": {"round_s": 30.0, "store": STORE, "name": name},
            "api": {
                "admins": ["ada"],
                "listen": listen,
                "tls": True,
                "tls_certificate": "/etc/penstock/tls.crt",
                "tls_key": "/etc/penstock/tls.key",
                "munge": True,
            },
        }
        assert 'partitions = ["gpu"]  # two of them soon' in written.read_text(), "comments stay"
        for server in ("head1", "head2.example.org", "penstock.example.org", "10.0.0.5"):
            assert greeting(out / name, server, out / "head1/ca.crt") == "welcome"
        with pytest.raises(ssl.SSLCertVerificationError):
            greeting(out / name, "head3", out / "head1/ca.crt")
    assert (out / "head1/tls.key").read_bytes() != (out / "head2.example.org/tls.key").read_bytes()
    told = done.output
    for step in (f"{out}/head1/", "root@head2.example.org:/etc/penstock/", "--check", "penstock leader show", "ca.key"):
        assert step in told, told
    assert "s3cret" not in told


def test_nothing_is_written_over(config: Path, tmp_path: Path):
    out = tmp_path / "heads"
    assert init(config, out, "--store", STORE).exit_code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert f"{out} exists" in refusal(config, out, "--store", STORE)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_new_certificates_of_the_same_authority(config: Path, tmp_path: Path):
    """Clients that trust the old folder's authority trust the new certificates."""
    old, new = tmp_path / "old", tmp_path / "new"
    assert init(config, old, "--store", STORE).exit_code == 0
    assert init(config, new, "--store", STORE, "--ca", str(old / "ca")).exit_code == 0
    assert greeting(new / "head1", "head1", old / "head1/ca.crt") == "welcome"
    assert not (new / "ca/ca.key").exists(), "the key stays where it was"
    assert "no ca.key" in refusal(config, tmp_path / "heads", "--store", STORE, "--ca", str(new / "ca"))


def test_users_with_tokens(config: Path, tmp_path: Path):
    done = init(config, tmp_path / "heads", "--store", STORE, "--tokens")
    assert tomllib.loads((tmp_path / "heads/head1/penstock.toml").read_text())["api"]["munge"] is False
    assert "penstock token create --user" in done.output
    assert "PENSTOCK_TOKEN" in done.output


def test_what_cannot_work_is_refused(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "heads"
    assert "--store" in refusal(config, out), "SQLite has one penstockd"
    assert "postgresql" in refusal(config, out, "--store", "sqlite:////tmp/x")
    one = run("leader", "init", "head1", "--config", config, "--out", out, "--store", STORE)
    assert "two or more" in str(one.exception)
    same = run("leader", "init", "head1", "head1:7474", "--config", config, "--out", out, "--store", STORE)
    assert "twice" in str(same.exception)
    odd = run("leader", "init", "head1", "head/2", "--config", config, "--out", out, "--store", STORE)
    assert "head/2" in str(odd.exception)
    config.write_text('api.admins = ["ada"]\n' + SETTINGS.replace("[api]", "[slurm.x]"))
    assert "unknown key" in refusal(config, out, "--store", STORE), "the settings were wrong before"
    config.write_text('api = {admins = ["ada"]}\n[slurm]\npartitions = ["gpu"]\n')
    assert "a section [api]" in refusal(config, out, "--store", STORE)
    config.write_text(SETTINGS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install openssl" in refusal(config, out, "--store", STORE)
