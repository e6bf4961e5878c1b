"""Browser sessions: what the cookie allows, what another site cannot do with it, and how it ends."""

from __future__ import annotations

import time
from http.cookies import SimpleCookie

import httpx
import pytest

from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.daemon.service.sessions import MAX_SESSIONS
from tests.scheduler.service.api import log_in, serving


@pytest.fixture(scope="module", params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("api"), separate=request.param) as api:
        yield api


def ask(api, headers: dict[str, str], method: str = "GET", path: str = "/v1/me") -> httpx.Response:
    return httpx.request(method, api.url + path, headers=headers)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_page_logs_in_acts_and_logs_out(api):
    page = log_in(api, api.tokens["ada"])
    me = ask(api, page).json()
    assert (me["user"], me["role"], me["by"]) == ("ada", "user", "session")
    shown = ask(api, page, path="/v1/session")
    assert shown.json()["csrf"] == page["X-CSRF-Token"]
    assert shown.headers["cache-control"] == "no-store"
    api.submitter.cancelled.clear()
    assert ask(api, page, "POST", "/v1/jobs/1/cancel").status_code == 200
    assert api.submitter.cancelled == ["1"]
    gone = ask(api, page, "DELETE", "/v1/session")
    assert gone.status_code == 204
    assert "Max-Age=0" in gone.headers["set-cookie"]
    assert code(ask(api, page)) == (401, "unauthenticated")


def test_no_script_and_no_other_site_gets_the_cookie(api):
    answer = httpx.post(f"{api.url}/v1/session", json={"token": api.tokens["ada"]})
    cookie = SimpleCookie(answer.headers["set-cookie"])["penstock-session"]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "lax", "/")
    assert not cookie["secure"], "a browser would not send it without TLS"
    assert cookie.value not in answer.text
    secret = cookie.value.partition(".")[2]
    assert secret not in str(list(api.board.store.export()))
    assert answer.headers["cache-control"] == "no-store"


def test_behind_tls_the_cookie_is_for_tls_and_this_host_alone(tmp_path):
    with serving(tmp_path, behind_tls=True) as api:
        given = httpx.post(f"{api.url}/v1/session", json={"token": api.tokens["ada"]}).headers["set-cookie"]
        assert given.startswith("__Host-penstock-session=")
        assert "Secure" in given
        assert "Domain" not in given


@pytest.mark.parametrize(
    ("without", "extra"),
    [
        ("X-CSRF-Token", {}),
        (None, {"X-CSRF-Token": "0" * 64}),
        (None, {"Origin": "https://evil.example"}),
        (None, {"Origin": "null"}),
        (None, {"Sec-Fetch-Site": "cross-site"}),
        (None, {"Sec-Fetch-Site": "same-site"}),
    ],
)
def test_another_site_cannot_change_anything(api, without, extra):
    page = log_in(api, api.tokens["ada"])
    headers = {name: value for name, value in page.items() if name != without} | extra
    api.submitter.cancelled.clear()
    assert code(ask(api, headers, "POST", "/v1/jobs/1/cancel")) == (403, "csrf")
    assert api.submitter.cancelled == []
    assert ask(api, page | {"Origin": api.url}, "POST", "/v1/jobs/1/cancel").status_code == 200


def test_another_site_cannot_log_a_browser_in(api):
    """Else its user would work, without noticing, in the attacker's name."""
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = httpx.post(f"{api.url}/v1/session", json={"token": api.tokens["bob"]}, headers=headers)
        assert code(answer) == (403, "csrf")
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("separate", [False, True], ids=["embedded", "separate"])
def test_wrong_log_ins_are_refused_and_slowed_down_but_a_right_one_is_let_in(tmp_path, separate):
    with serving(tmp_path, separate=separate) as api, httpx.Client(base_url=api.url) as http:
        answers = [http.post("/v1/session", json={"token": "penstock_x_y"}) for _ in range(70)]
        assert {each.status_code for each in answers[:50]} == {401}
        assert 429 in {each.status_code for each in answers[50:]}
        assert not any("set-cookie" in each.headers for each in answers)
        assert log_in(api, api.tokens["ada"])


@pytest.mark.parametrize("body", [{}, {"token": ""}, {"token": None}, {"word": "x"}, {"token": "x" * 2000}, [], "x"])
def test_a_log_in_without_a_token_is_none(api, body):
    answer = httpx.post(f"{api.url}/v1/session", json=body)
    assert answer.status_code in (401, 422)
    assert "set-cookie" not in answer.headers


def test_a_session_has_the_role_of_its_token_and_ends_with_it(api):
    with api.client("boss") as boss:
        made = boss.create_token(TokenOrder(user="zoe", role="operator", expires_s=time.time() + 60))
        page = log_in(api, made.token)
        assert ask(api, page).json()["role"] == "operator"
        assert ask(api, page, path="/v1/session").json()["expires_s"] <= made.view.expires_s
        boss.revoke_token(made.view.id)
        assert code(ask(api, page)) == (401, "unauthenticated")


def test_sessions_expire(tmp_path):
    with serving(tmp_path, session_hours=8 / 3600) as api:
        page = log_in(api, api.tokens["ada"])
        assert ask(api, page).status_code == 200
        time.sleep(8.1)
        assert code(ask(api, page)) == (401, "unauthenticated")
        log_in(api, api.tokens["ada"])
        assert len(api.board.store.sessions()) == 1, "what has expired is deleted"


def test_a_user_has_some_sessions_and_others_keep_theirs(api):
    other = log_in(api, api.tokens["bob"])
    pages = [log_in(api, api.tokens["oz"]) for _ in range(MAX_SESSIONS + 1)]
    assert ask(api, pages[0]).status_code == 401
    assert {ask(api, each).status_code for each in (pages[1], pages[-1], other)} == {200}


def test_the_token_of_a_job_does_not_log_in(api):
    answer = httpx.post(f"{api.url}/v1/session", json={"token": api.tokens["job 1"]})
    assert code(answer) == (403, "not-allowed")


@pytest.mark.parametrize("cookie", ["", "x", ".", "a.b", "é.é", "' or 1=1 --.x"])
def test_forged_cookies_are_refused(api, cookie):
    headers = {b"Cookie": f"penstock-session={cookie}".encode()}
    answer = httpx.get(f"{api.url}/v1/me", headers=headers)
    assert code(answer) == (401, "unauthenticated")
