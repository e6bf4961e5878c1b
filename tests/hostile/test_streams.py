"""An answer that goes on ends with the right that opened it: a token, a browser session, a role, an account.

Each answer is opened, its right ends, and then another user's job changes: the answer ends, and nobody hears of that job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.access_messages import TokenOrder, TokenView
from penstock_scheduler.api.client import Client
from penstock_scheduler.daemon.service import identity as identity_module
from penstock_scheduler.daemon.service import rights
from penstock_scheduler.model import Phase
from penstock_scheduler.people.errors import StoreError
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ADAS, Api, log_in, serving

JOIN_S = 60.0
LATER = "of another user, after the right has ended"


class Stream(threading.Thread):
    """A client that reads an answer to its end."""

    def __init__(self, url: str, headers: dict[str, str], socket: str | None = None) -> None:
        super().__init__(daemon=True)
        self._url, self._headers, self._socket = url, headers, socket
        self.text, self.status, self.error = "", 0, ""
        self.start()

    def run(self) -> None:
        transport = None if self._socket is None else httpx.HTTPTransport(uds=self._socket)
        try:
            with (
                httpx.Client(transport=transport) as client,
                client.stream("GET", self._url, headers=self._headers, timeout=None) as answer,
            ):
                self.status = answer.status_code
                for text in answer.iter_text():
                    self.text += text
        except httpx.HTTPError as error:
            self.error = repr(error)

    def opened(self) -> Stream:
        wait_for(lambda: "event: " in self.text, 120, "the first event", details=lambda: f"{self.status} {self.text}")
        return self

    def ends(self) -> None:
        self.join(JOIN_S)
        assert not self.is_alive(), "the answer goes on"
        assert self.error == "", "it ends as an answer ends, not with a broken connection"
        assert LATER not in self.text


@contextmanager
def site(folder, **settings: object) -> Iterator[Api]:
    with serving(folder, requests_per_s=1e6, burst=10**6, **settings) as api:
        yield api


@pytest.fixture(params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path):
    with site(tmp_path, separate=request.param) as api:
        yield api


def change(api: Api) -> None:
    """Another user's job changes."""
    changed = job("2", user="bob", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_01=1), account=LATER)
    api.look(ADAS, changed)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def revoke(api: Api, token: str) -> None:
    with Client(api.socket) as root:
        root.revoke_token(token.split("_")[1])


PATHS = ("/v1/events", "/cluster/live", "/queue/live?state=running", "/jobs/2/live", "/site/live")


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_ends_when_its_token_is_revoked(api, path):
    token = api.tokens["oz"]
    kept = Stream(f"{api.url}/v1/events", bearer(api.tokens["boss"])).opened()
    stream = Stream(f"{api.url}{path}", bearer(token)).opened()
    revoke(api, token)
    change(api)
    stream.ends()
    wait_for(lambda: LATER in kept.text, 120, "the change, for somebody who may see it")
    assert kept.is_alive()
    assert httpx.get(f"{api.url}{path}", headers=bearer(token)).status_code == 401


def test_a_stream_ends_when_its_token_expires(api):
    with Client(api.socket) as root:
        token = root.create_token(TokenOrder(user="oz", role="operator", expires_s=time.time() + 8)).token
    stream = Stream(f"{api.url}/v1/events", bearer(token)).opened()
    stream.join(JOIN_S)
    change(api)
    stream.ends()


@pytest.mark.parametrize("how", ["log out", "revoke its token"])
def test_a_stream_ends_with_its_session(api, how):
    page = log_in(api, api.tokens["oz"])
    stream = Stream(f"{api.url}/v1/events", page).opened()
    if how == "log out":
        assert httpx.delete(f"{api.url}/v1/session", headers=page).status_code == 204
    else:
        revoke(api, api.tokens["oz"])
    change(api)
    stream.ends()


def test_a_stream_ends_when_another_daemon_revokes_its_token(api):
    """The process that serves the stream is not told; it reads the store."""
    stream = Stream(f"{api.url}/v1/events", bearer(api.tokens["oz"])).opened()
    api.board.store.revoke_token(api.tokens["oz"].split("_")[1])
    stream.join(JOIN_S)
    change(api)
    stream.ends()


@pytest.mark.parametrize("path", ["/v1/jobs/1/log?wait=60&offset=100", "/v1/jobs/1?wait=60&since=1000000"])
def test_a_request_that_waits_ends_with_its_token(api, path, tmp_path):
    (tmp_path / "1.out").write_text("x" * 100)
    stream = Stream(f"{api.url}{path}", bearer(api.tokens["ada"]))
    time.sleep(2 * rights.CHECK_S)
    assert stream.is_alive()
    revoke(api, api.tokens["ada"])
    begun_s = time.monotonic()
    stream.ends()
    assert stream.status == 401
    assert time.monotonic() - begun_s < 50, "it did not wait for a change"


def test_a_stream_ends_when_the_role_of_its_user_changes(tmp_path):
    with site(tmp_path, operators=["root"]) as api:
        gatekeeper = api.app.state.api.gatekeeper
        gatekeeper.daemon_uid = -1
        row, secret = _session(api, "root")
        stream = Stream(f"{api.url}/v1/events", {"Cookie": f"{gatekeeper.cookies.name}={row}.{secret}"}).opened()
        gatekeeper._settings = gatekeeper._settings.model_copy(update={"operators": ()})
        change(api)
        stream.ends()


def test_a_stream_ends_with_the_account_of_its_user(tmp_path, monkeypatch):
    monkeypatch.setattr(identity_module, "ACCOUNT_CACHED_S", 0.0)
    with site(tmp_path) as api:
        stream = Stream("http://penstock/v1/events", {}, api.socket.removeprefix("unix:")).opened()
        monkeypatch.setattr(identity_module, "_look_up_account", lambda user: None)
        change(api)
        stream.ends()


def test_a_stream_goes_on_for_a_while_when_the_store_is_away_and_then_ends(tmp_path, monkeypatch):
    """A right that nobody can confirm is not one for ever, and a short outage cuts nobody off."""
    monkeypatch.setattr(rights, "UNCONFIRMED_S", 6.0)
    with site(tmp_path) as api:
        stream = Stream(f"{api.url}/v1/events", bearer(api.tokens["oz"])).opened()

        def away() -> list[tuple[TokenView, str]]:
            raise StoreError("the store is away")

        tokens = api.app.state.api.gatekeeper._tokens
        reading, tokens._read = tokens._read, away
        tokens.forget()
        time.sleep(3 * rights.CHECK_S)
        assert stream.is_alive()
        tokens._read = reading
        time.sleep(3 * rights.CHECK_S)
        assert stream.is_alive()
        tokens._read = away
        tokens.forget()
        stream.ends()


def test_an_order_is_carried_out_whole_though_its_token_is_revoked_meanwhile(tmp_path, monkeypatch):
    """What changes something is never cut off in the middle."""
    with site(tmp_path) as api:
        begun, going_on = threading.Event(), threading.Event()

        def cancel(name: str, *by: object) -> None:
            begun.set()
            assert going_on.wait(60)
            api.submitter.cancelled.append(name)

        monkeypatch.setattr(api.submitter, "cancel", cancel)
        answers: list[int] = []

        def order() -> None:
            answer = httpx.post(f"{api.url}/v1/jobs/1/cancel", headers=bearer(api.tokens["ada"]), timeout=60)
            answers.append(answer.status_code)

        thread = threading.Thread(target=order)
        thread.start()
        assert begun.wait(60)
        revoke(api, api.tokens["ada"])
        time.sleep(3 * rights.CHECK_S)
        going_on.set()
        thread.join(60)
        assert (answers, api.submitter.cancelled) == ([200], ["1"])


def _session(api: Api, user: str) -> tuple[str, str]:
    """A session of somebody who logged in with a password."""
    from penstock_scheduler.api.access_messages import Identity
    from penstock_scheduler.daemon.service import sessions

    found = Identity(user=user, uid=0, role="operator", by="password")
    row, secret = sessions.begin(api.board.store, found, time.time() + 3600)
    return row.id, secret
