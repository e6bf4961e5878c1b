"""TLS and MUNGE for real: a certificate of the test's own, and a munged of the test's own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from penstock_executor import Environment, connect
from penstock_executor.environment import Service
from penstock_loopback import wait_for
from penstock_profiles.wire import Observation
from penstock_scheduler.api.client import Client, DaemonAway
from penstock_scheduler.daemon.service import identity
from penstock_scheduler.model import Phase
from penstock_scheduler.people.errors import ConfigError
from tests.folders import public_folder
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ME, serving

MUNGED = shutil.which("munged") or shutil.which("munged", path="/usr/sbin")


@pytest.fixture
def munge_socket():
    if MUNGED is None or shutil.which("unmunge") is None:
        pytest.skip("munge is not installed (Debian: munge)")
    with public_folder() as folder:  # other users are to reach the socket
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        options = {"key-file": key, "socket": folder / "s", "pid-file": folder / "pid", "seed-file": folder / "seed"}
        words = [f"--{name}={value}" for name, value in options.items()]
        process = subprocess.Popen([MUNGED, "--foreground", "--force", f"--log-file={folder}/log", *words])
        try:
            wait_for((folder / "s").exists, 120, "munged to listen")
            yield folder / "s"
        finally:
            process.terminate()
            process.wait(20)


def credential(socket: Path, payload: str, **become: str) -> dict[str, str]:
    command = ["munge", f"--socket={socket}", "-s", payload]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", **become)
    return {"Authorization": f"MUNGE {made.stdout.strip()}"}


def test_munge_identifies_the_caller_and_each_credential_is_valid_once(tmp_path, munge_socket):
    with serving(tmp_path / "api", munge=True, munge_socket=munge_socket) as api:
        with Client(api.url, munge_socket=munge_socket) as me:
            assert (me.me().user, me.me().by) == (ME, "munge"), "each request makes a credential of its own"
            assert me.me().role == "user", "root is an admin on the daemon's own machine alone"
        with Client.open({"PENSTOCK_URL": api.url, "PENSTOCK_MUNGE_SOCKET": str(munge_socket)}) as me:
            assert me.me().user == ME

        # A job on a node with MUNGE and without the spool needs no token to report.
        api.look(job("7", user=ME, max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2)))
        run = connect(environment=Environment(job_id="7", service=Service((api.url,), munge_socket=munge_socket)))
        run.report(Observation(gpu_type="t4", nodes=1, gpus=2, atomic_batch=8, steps=1, step_time_s=1, progress=16))
        run.flush()
        with api.client("me") as me:
            assert [each["body"]["progress"] for each in me.history("7").observations] == [16]

        def ask(path: str, headers: dict[str, str]) -> httpx.Response:
            return httpx.get(api.url + path, headers=headers)

        once = credential(munge_socket, "penstock GET /v1/me")
        assert ask("/v1/me", once).json()["user"] == ME
        again = ask("/v1/me", once)
        assert (again.status_code, again.json()["error"]["code"]) == (401, "unauthenticated")
        assert "Replayed" in again.json()["error"]["message"]
        other = ask("/v1/jobs", credential(munge_socket, "penstock GET /v1/me"))
        assert other.status_code == 401
        assert "must be 'penstock GET /v1/jobs'" in other.json()["error"]["message"]
        good = credential(munge_socket, "penstock GET /v1/me")["Authorization"]
        assert ask("/v1/me", {"Authorization": good[:-20] + "A" * 19 + ":"}).status_code == 401
        if os.geteuid() == 0:
            nobody = credential(munge_socket, "penstock GET /v1/me", user="nobody", group="nogroup")
            assert ask("/v1/me", nobody).json()["user"] == "nobody"
    with serving(tmp_path / "without") as api:
        refused = httpx.get(f"{api.url}/v1/me", headers=credential(munge_socket, "penstock GET /v1/me"))
        assert refused.status_code == 401, "MUNGE is believed where the settings say so"


def test_the_api_says_that_munged_does_not_answer(tmp_path, munge_socket):
    proof = credential(munge_socket, "penstock GET /v1/me")
    with serving(tmp_path / "api", munge=True, munge_socket=tmp_path / "none") as api:
        refused = httpx.get(f"{api.url}/v1/me", headers=proof)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert "none" in refused.json()["error"]["message"]


def test_tls_works_and_an_unknown_certificate_is_not_trusted(tmp_path, certificate, monkeypatch):
    monkeypatch.setattr("penstock_scheduler.api.client.RETRY_PAUSES_S", ())
    made, key = certificate
    with serving(tmp_path / "api", tls_certificate=made, tls_key=key) as api:
        url = api.url.replace("http://", "https://")
        with Client(url, token=api.tokens["ada"], authority=made) as ada:
            assert ada.me().user == "ada"
        with Client.open({"PENSTOCK_URL": url, "PENSTOCK_TOKEN": api.tokens["ada"], "PENSTOCK_CA": str(made)}) as ada:
            assert ada.job("1").id == "1"
        for line in (Client(url, token=api.tokens["ada"]), Client(api.url, token=api.tokens["ada"])):
            with line, pytest.raises(DaemonAway):
                line.me()
        with pytest.raises(ConfigError, match="PENSTOCK_CA"):
            Client(url, authority=key)


def test_without_tls_no_certificates_are_read(monkeypatch):
    """It takes longer than most commands take to ask."""

    def refuse(*args, **kwargs):
        raise AssertionError("certificates are read")

    monkeypatch.setattr("ssl.create_default_context", refuse)
    for url in ("unix:/run/penstock.sock", "http://127.0.0.1:1"):
        Client(url).close()
    for url in ("https://127.0.0.1:1", "HTTPS://127.0.0.1:1"):
        with pytest.raises(AssertionError, match="certificates"):
            Client(url)


def test_failed_logins_are_slowed_down_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "FAILED_BURST", 5)
    monkeypatch.setattr(identity, "FAILED_PER_S", 1e-6)
    with serving(tmp_path) as api, api.client("ada") as ada:
        assert ada.me().user == "ada"
        tried = [httpx.get(f"{api.url}/v1/me", headers={"Authorization": f"Bearer penstock_{n}_x"}) for n in range(7)]
        assert [each.status_code for each in tried] == [401] * 5 + [429] * 2
        assert int(tried[-1].headers["Retry-After"]) > 1
        assert ada.me().user == "ada", "who was let in before is let in from the same address"
