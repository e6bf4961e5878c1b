"""Log-in with an identity provider and with PAM: a real provider over HTTP, a real PAM."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from penstock_loopback.machine import free_ports
from penstock_scheduler.daemon.service.identity import GUESSES_BURST, GUESSES_PER_S
from penstock_scheduler.daemon.service.oidc import local_path
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import ConfigError
from tests.scheduler.service.api import ME, serving

REASON = "authlib is not installed: pip install authlib"


class IdentityProvider(ThreadingHTTPServer):
    """An OpenID Connect provider that logs everybody in as `user`."""

    def __init__(self) -> None:
        from joserfc.jwk import RSAKey

        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.key = RSAKey.generate_key(2048, {"kid": "1"})
        self.signs_with = self.key
        self.user: str | None = ME
        self.changes: dict[str, object] = {}
        """Claims that it gets wrong."""
        self.asked: dict[str, dict[str, str]] = {}
        """Code -> what the log-in asked for."""
        self.authorised = ""

    def id_token(self, asked: dict[str, str]) -> str:
        from joserfc import jwt

        claims = {"iss": self.url, "aud": "penstock", "exp": int(time.time()) + 60, "sub": "7", "nonce": asked["nonce"]}
        claims |= {"preferred_username": self.user} | self.changes
        return jwt.encode({"alg": "RS256", "kid": "1"}, claims, self.signs_with)


class _Handler(BaseHTTPRequestHandler):
    server: IdentityProvider

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, body: object, status: int = 200, **headers: str) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(text))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        url, path = self.server.url, urlsplit(self.path)
        if path.path == "/.well-known/openid-configuration":
            names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
            self.answer({"issuer": url} | {name: f"{url}/{where}" for name, where in names.items()})
        elif path.path == "/keys":
            self.answer({"keys": [self.server.key.as_dict(private=False)]})
        else:
            asked = {name: values[0] for name, values in parse_qs(path.query).items()}
            code = f"code{len(self.server.asked)}"
            self.server.asked[code] = asked
            query = urlencode({"code": code, "state": asked["state"]})
            self.answer({}, 302, Location=f"{asked['redirect_uri']}?{query}")

    def do_POST(self) -> None:
        from authlib.oauth2.rfc7636 import create_s256_code_challenge

        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.authorised = self.headers["Authorization"]
        asked = self.server.asked.pop(form["code"][0], None)
        if asked is None or create_s256_code_challenge(form["code_verifier"][0]) != asked["code_challenge"]:
            self.answer({"error": "invalid_grant"}, 400)
            return
        self.answer({"access_token": "a", "token_type": "Bearer", "id_token": self.server.id_token(asked)})


@pytest.fixture
def provider():
    pytest.importorskip("authlib", reason=REASON)
    with IdentityProvider() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path, provider):
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    listen = f"127.0.0.1:{free_ports(1)}"
    oidc = {
        "issuer": provider.url,
        "client_id": "penstock",
        "client_secret_file": str(secret),
        "public_url": f"http://{listen}",
    }
    with serving(tmp_path, separate=request.param, listen=listen, oidc=oidc, operators=[ME]) as api:
        yield api


@pytest.fixture
def browser(api):
    with httpx.Client(base_url=api.url, timeout=60) as browser:
        yield browser


def come_back(browser: httpx.Client, next_: str = "/v1/me") -> httpx.Response:
    """Go to the provider and come back; the answer of Penstock to that."""
    there = browser.get("/v1/session/oidc", params={"next": next_})
    assert there.status_code == 303, there.text
    back = browser.get(there.headers["location"])
    return browser.get(back.headers["location"])


def test_a_browser_logs_in_at_the_provider_and_goes_on(api, browser, provider):
    assert browser.get("/v1/session/ways").json() == {"password": False, "oidc": True}
    answer = come_back(browser, "/v1/me?x=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/v1/me?x=1")
    me = browser.get("/v1/me").json()
    assert (me["user"], me["role"], me["by"], me["token"]) == (ME, "operator", "session", None)
    assert provider.authorised.startswith("Basic "), "the secret goes to the provider alone"
    lines = api.board.store.audit(limit=5)
    assert (lines[0].user, lines[0].action, lines[0].address) == (ME, "POST /v1/session", "127.0.0.1") or (
        lines[0].user,
        lines[0].action,
    ) == (ME, "GET /v1/session/oidc/callback")
    csrf = browser.get("/v1/session").json()["csrf"]
    assert browser.delete("/v1/session", headers={"X-CSRF-Token": csrf}).status_code == 204
    assert browser.get("/v1/me").status_code == 401


@pytest.mark.parametrize(
    "wrong",
    [
        {"iss": "http://other.example"},
        {"aud": "somebody-else"},
        {"exp": 1000},
        {"nonce": "of-another-log-in"},
        {"preferred_username": None},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_answer_that_is_not_for_this_log_in_is_refused(browser, provider, wrong):
    provider.changes = wrong
    answer = come_back(browser)
    assert answer.status_code == 401
    assert browser.get("/v1/me").status_code == 401


def test_another_signature_is_refused(browser, provider):
    from joserfc.jwk import RSAKey

    provider.signs_with = RSAKey.generate_key(2048, {"kid": "1"})
    assert come_back(browser).status_code == 401


def test_a_log_in_ends_in_the_browser_that_began_it_and_once(api, browser, provider):
    there = browser.get("/v1/session/oidc").headers["location"]
    back = browser.get(there).headers["location"]
    with httpx.Client(base_url=api.url) as victim:  # an attacker sends the victim this link
        assert victim.get(back).status_code == 401
        victim.get("/v1/session/oidc")
        assert victim.get(back).status_code == 401
    assert browser.get(back).status_code == 303
    assert browser.get(back).status_code == 401


def test_a_user_whom_the_site_does_not_know_is_refused(browser, provider):
    provider.user = "nobody-has-this-name"
    answer = come_back(browser)
    assert (answer.status_code, "no account" in answer.text) == (403, True)


def test_a_provider_that_is_away_refuses_a_log_in_and_nothing_else(tmp_path):
    pytest.importorskip("authlib", reason=REASON)
    secret = tmp_path / "secret"
    secret.write_text("x")
    oidc = {
        "issuer": f"http://127.0.0.1:{free_ports(1)}",
        "client_id": "x",
        "client_secret_file": str(secret),
        "public_url": "http://127.0.0.1",
    }
    with serving(tmp_path, oidc=oidc) as api, httpx.Client(base_url=api.url) as browser:
        assert browser.get("/v1/session/oidc").status_code == 503
        assert api.client("ada").me().user == "ada"


def test_the_secrets_file_must_be_there(tmp_path):
    pytest.importorskip("authlib", reason=REASON)
    oidc = {"issuer": "http://x", "client_id": "x", "client_secret_file": tmp_path / "no", "public_url": "http://x"}
    with pytest.raises(ConfigError, match="client_secret_file"), serving(tmp_path, oidc=oidc):
        pass


@pytest.mark.parametrize("path", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "", "/a\nb"])
def test_a_log_in_goes_on_to_this_site_alone(path):
    assert local_path(path) == "/"
    assert local_path("/v1/jobs/1/page?x=1") == "/v1/jobs/1/page?x=1"


@pytest.fixture
def pam(tmp_path):
    """A service of PAM that takes the password `right`."""
    pytest.importorskip("pamela", reason="pamela is not installed: pip install pamela")
    if os.geteuid() != 0:
        pytest.skip("needs root to write a service of PAM")
    check = tmp_path / "check"
    check.write_text('#!/bin/sh\nread -r word || true\n[ "$word" = right ]\n')
    check.chmod(0o755)
    service = Path("/etc/pam.d") / f"penstock-test-{os.getpid()}"
    service.write_text(f"auth required pam_exec.so expose_authtok quiet {check}\naccount required pam_permit.so\n")
    yield service.name
    service.unlink()


@pytest.mark.parametrize("separate", [False, True], ids=["embedded", "separate"])
def test_pam_checks_a_password(tmp_path, pam, separate):
    with (
        serving(tmp_path, separate=separate, pam_service=pam) as api,
        httpx.Client(base_url=api.url, timeout=60) as http,
    ):

        def guess(user: str, password: str) -> httpx.Response:
            return http.post("/v1/session", json={"user": user, "password": password})

        def log_in(user: str, password: str) -> int:
            return guess(user, password).status_code

        assert http.get("/v1/session/ways").json() == {"password": True, "oidc": False}
        assert log_in(ME, "wrong") == 401
        assert http.get("/v1/me").status_code == 401
        assert log_in("nobody-has-this-name", "right") == 403
        assert log_in(ME, "right") == 201
        me = http.get("/v1/me").json()
        assert (me["user"], me["role"], me["by"]) == (ME, "user", "session")
        started_s = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            statuses = list(pool.map(lambda _: log_in("daemon", "wrong"), range(20)))
        again = 1 + (time.monotonic() - started_s) * GUESSES_PER_S
        assert GUESSES_BURST <= statuses.count(401) <= GUESSES_BURST + again, "guesses at the same time count, too"
        assert set(statuses) == {401, 429}
        for _ in range(20):  # on a slow machine, the user has earned another guess meanwhile
            refused = guess("daemon", "wrong")
            if refused.status_code == 429 and int(refused.headers["Retry-After"]) > 5:
                break
        assert log_in("daemon", "right") == 429, "nobody finds a password by trying"
        assert log_in(ME, "right") == 201, "others are not locked out"
        assert api.client("ada").me().user == "ada"


def test_without_pam_no_password_is_taken(tmp_path):
    with serving(tmp_path) as api:
        answer = httpx.post(f"{api.url}/v1/session", json={"user": ME, "password": "x"})
        assert answer.status_code == 401
        assert "takes no passwords" in answer.text


def test_a_service_of_pam_is_a_name():
    with pytest.raises(ValueError, match="pattern"):
        ApiSettings(pam_service="../x")
