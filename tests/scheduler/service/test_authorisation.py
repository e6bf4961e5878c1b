"""Every endpoint x every role x own, other's or no job: allowed and refused."""

from __future__ import annotations

import time

import httpx
import pytest

from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.whatif_messages import WhatIfOrder
from tests.scheduler.service.api import ME, log_in, serving

SUBMISSION = {"command": ["true"]}
REPORT = {
    "job_id": "1",
    "epoch": 1,
    "sequence": 0,
    "time_s": 1.0,
    "body": {"kind": "checkpointed", "progress": 1.0, "seconds": 0.1},
}
PROFILE = {
    "job": "n",
    "gpu_type": "t4",
    "measured_s": 1.0,
    "versions": {},
    "ended": "",
    "observations": [
        {"gpu_type": "t4", "nodes": 1, "gpus": 1, "atomic_batch": 8, "steps": 1, "step_time_s": 1.0, "progress": 0}
    ],
}

TAUGHT = {
    "name": "train-#",
    "most_gpus": 1,
    "estimator": {
        "kind": "training",
        "models": {
            "t4": {
                "step": {
                    "alpha_c": 0.1,
                    "beta_c": 0.1,
                    "alpha_r": 0,
                    "beta_r": 0,
                    "alpha_n": 0,
                    "beta_n": 0,
                    "gamma": 1,
                },
                "max_atomic_batch": 8,
            }
        },
        "initial_batch": 8,
        "max_batch": 8,
        "grad_sqr": 1.0,
        "grad_var": 0.0,
    },
}

NOBODY, JOB, ADA, OPERATOR, ADMIN = "nobody", "job 1", "ada", "oz", "boss"
ROLES = (NOBODY, JOB, ADA, OPERATOR, ADMIN)
ANYONE = dict.fromkeys(ROLES, 200)
USERS = {NOBODY: 401, JOB: 403, ADA: 200, OPERATOR: 200, ADMIN: 200}
WITHOUT_SESSION = USERS | {ADA: 404, OPERATOR: 404, ADMIN: 404}
OPERATORS = USERS | {ADA: 403}
ADMINS = OPERATORS | {OPERATOR: 403}
# (own, other's, no job): ada's own is 1; to operators all are alike
OF_JOB = {NOBODY: (401, 401, 401), JOB: (403, 403, 403), ADA: (200, 404, 404)}
OF_JOB |= dict.fromkeys((OPERATOR, ADMIN), (200, 200, 404))
REPORTS = dict.fromkeys(ROLES, (404, 404, 404)) | {NOBODY: (401, 401, 401)}
REPORTS |= dict.fromkeys((JOB, ADA), (200, 404, 404))

TABLE: dict[tuple[str, str], tuple[dict, object]] = {
    ("GET", "/v1/health"): (ANYONE, None),
    ("GET", "/v1/ready"): (ANYONE, None),
    ("GET", "/v1/me"): (USERS, None),
    ("POST", "/v1/session"): (USERS, {}),
    ("GET", "/v1/session/ways"): (ANYONE, None),
    ("GET", "/v1/session/oidc"): (dict.fromkeys(ROLES, 404), None),  # there is no identity provider here
    ("GET", "/v1/session/oidc/callback"): (dict.fromkeys(ROLES, 404), None),
    ("GET", "/v1/session"): (WITHOUT_SESSION, None),
    ("DELETE", "/v1/session"): (WITHOUT_SESSION, None),
    ("POST", "/v1/jobs"): (USERS | {ADA: 403, OPERATOR: 403, ADMIN: 403}, SUBMISSION),  # they have no account here
    ("POST", "/v1/jobs/plan"): (USERS, SUBMISSION),
    ("GET", "/v1/owner"): (USERS | dict.fromkeys((ADA, OPERATOR, ADMIN), 422), None),  # this row asks without a name
    ("GET", "/v1/jobs"): (USERS, None),
    ("GET", "/v1/jobs/{job}"): (OF_JOB, None),
    ("POST", "/v1/jobs/{job}/cancel"): (OF_JOB, None),
    ("POST", "/v1/jobs/renew"): (USERS, {"jobs": ["1"]}),
    ("POST", "/v1/jobs/{job}/hold"): (OF_JOB, None),
    ("POST", "/v1/jobs/{job}/release"): (OF_JOB, None),
    ("GET", "/v1/jobs/{job}/explain"): (OF_JOB, None),
    ("GET", "/v1/jobs/{job}/history"): (OF_JOB, None),
    ("GET", "/v1/jobs/{job}/allocations"): (OF_JOB, None),
    ("GET", "/v1/allocations"): (USERS, None),
    ("GET", "/v1/jobs/{job}/series"): (OF_JOB, None),
    ("GET", "/v1/series"): (USERS, None),
    ("GET", "/v1/queue"): (USERS, None),
    ("GET", "/v1/jobs/{job}/log"): (OF_JOB, None),
    ("GET", "/v1/jobs/{job}/page"): (OF_JOB, None),
    ("POST", "/v1/jobs/{job}/reports"): (REPORTS, {"reports": [REPORT]}),
    ("GET", "/v1/rounds"): (USERS, None),
    ("GET", "/v1/rounds/{number}"): (USERS, None),
    ("GET", "/v1/rounds/{number}/record"): (OPERATORS, None),
    ("GET", "/v1/cluster"): (USERS, None),
    ("GET", "/v1/metrics"): (USERS, None),
    ("GET", "/v1/nodes"): (USERS, None),
    ("GET", "/v1/prices"): (USERS, None),
    ("GET", "/v1/policies"): (USERS, None),
    ("PUT", "/v1/policy"): (ADMINS, {"name": "sia"}),
    ("POST", "/v1/rounds/{number}/approval"): (ADMINS, None),
    ("PUT", "/v1/pause"): (ADMINS, {"paused": False}),
    ("POST", "/v1/leader/move"): (ADMINS, {}),
    ("POST", "/v1/cloud/resume"): (ADMINS, None),
    ("POST", "/v1/cloud/adopt"): (ADMINS, None),
    ("POST", "/v1/cloud/images"): (ADMINS, None),
    ("POST", "/v1/cloud/runs/{run}/forget"): (ADMINS | {ADMIN: 404}, None),
    ("GET", "/v1/models"): (OPERATORS, None),
    ("GET", "/v1/models/kind"): (OPERATORS | {OPERATOR: 422, ADMIN: 422}, None),  # this row asks without a name
    ("POST", "/v1/models/forget"): (ADMINS | {ADMIN: 404}, {"kind": "ada/none"}),
    ("POST", "/v1/models/import"): (ADMINS, {"kinds": [TAUGHT]}),
    ("GET", "/v1/drains"): (USERS, None),
    ("POST", "/v1/drains"): (OPERATORS, {"kind": "node", "name": "t4-01"}),
    ("DELETE", "/v1/drains/{kind}/{name}"): (OPERATORS | {OPERATOR: 404, ADMIN: 404}, None),
    ("POST", "/v1/whatif"): (OPERATORS, {}),
    ("GET", "/v1/whatif"): (OPERATORS, None),
    ("GET", "/v1/whatif/{task}"): (OPERATORS | {OPERATOR: 404, ADMIN: 404}, None),
    ("DELETE", "/v1/whatif/{task}"): (OPERATORS | {OPERATOR: 404, ADMIN: 404}, None),
    ("GET", "/v1/budgets"): (USERS, None),
    ("GET", "/v1/usage"): (USERS, None),
    ("GET", "/v1/refused"): (USERS, None),
    ("GET", "/v1/settings"): (ADMINS, None),
    ("GET", "/v1/profiles"): (USERS, None),
    ("PUT", "/v1/profiles"): (USERS, PROFILE),
    ("GET", "/v1/events"): (USERS, None),
    ("GET", "/v1/ledger"): (USERS, None),
    ("GET", "/v1/audit"): (OPERATORS, None),
    ("GET", "/v1/tokens"): (ADMINS, None),
    ("POST", "/v1/tokens"): (ADMINS, {"user": "zoe"}),
    ("DELETE", "/v1/tokens/{token}"): (ADMINS | {ADMIN: 404}, None),
}


HTTP = httpx.Client(timeout=60)
"""One for all: a new one reads the certificates of the system first."""


@pytest.fixture(scope="module", params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path_factory):
    """Both ways of serving the API give the same answers."""
    folder = tmp_path_factory.mktemp("api")
    with serving(folder, separate=request.param, requests_per_s=1e6, burst=10**6) as api:
        yield api


@pytest.fixture(scope="module", autouse=True)
def lines():
    yield
    HTTP.close()


def ask(api, who: str, method: str, path: str, body: object, session: dict[str, str] | None = None) -> int:
    headers = session or ({} if who == NOBODY else {"Authorization": f"Bearer {api.tokens[who]}"})
    HTTP.cookies.clear()
    with HTTP.stream(method, api.url + path, headers=headers, json=body) as answer:
        if answer.status_code >= 400:
            answer.read()
            assert set(answer.json()["error"]) == {"code", "message"}
        return answer.status_code


def test_every_endpoint_has_a_row(api):
    document = httpx.get(f"{api.url}/v1/openapi.json", timeout=60).json()
    there = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert there == set(TABLE)


def held(api, path, job):
    """Hold a job that is to be released: a release of another job is refused. End a replay, because there is one at a time."""
    if path == "/v1/whatif":
        api.app.state.api.whatif.close()
    if path.endswith("/release"):
        api.submitter.hold(job, "ada", admin=False)


@pytest.mark.parametrize("endpoint", TABLE, ids=" ".join)
@pytest.mark.parametrize("who", ROLES)
def test_each_role_may_call_what_the_table_says(api, endpoint, who):
    (method, path), (expected, body) = endpoint, TABLE[endpoint]
    api.board.observed_s = time.time()
    path = path.replace("{number}", "1").replace("{token}", "none").replace("{kind}/{name}", "node/none")
    wanted = expected[who]
    jobs = ("1", "2", "3") if "{job}" in path else ("",)
    codes = wanted if isinstance(wanted, tuple) else (wanted,)
    for job, code in zip(jobs, codes, strict=True):
        held(api, path, job)
        status = ask(api, who, method, path.replace("{job}", job), body)
        assert (200 if 200 <= status < 400 else status) == code, (who, job)


@pytest.fixture(scope="module")
def cookies(api) -> dict[str, dict[str, str]]:
    """Who -> the headers that a browser sends after the log-in."""
    return {who: log_in(api, api.tokens[who]) for who in (ADA, OPERATOR, ADMIN)}


@pytest.mark.parametrize("endpoint", [each for each in TABLE if "session" not in each[1]], ids=" ".join)
@pytest.mark.parametrize("who", [ADA, OPERATOR, ADMIN])
def test_a_browser_session_may_call_what_its_token_may(api, cookies, endpoint, who):
    (method, path), (expected, body) = endpoint, TABLE[endpoint]
    api.board.observed_s = time.time()
    path = path.replace("{number}", "1").replace("{token}", "none").replace("{kind}/{name}", "node/none")
    wanted = expected[who]
    for job, code in zip(("1", "2", "3"), wanted if isinstance(wanted, tuple) else (wanted,), strict=False):
        held(api, path, job)
        status = ask(api, who, method, path.replace("{job}", job), body, cookies[who])
        assert (200 if 200 <= status < 400 else status) == code, (who, job)


@pytest.mark.parametrize("endpoint", [each for each in TABLE if each[0] != "GET"], ids=" ".join)
def test_every_change_of_state_is_audited(api, endpoint):
    """Reports are data; a forecast or a renewed lease changes nothing; the rest leaves a line that says who did what."""
    (method, path), (_, body) = endpoint, TABLE[endpoint]
    if endpoint == ("DELETE", "/v1/drains/{kind}/{name}"):
        assert ask(api, "oz", *("POST", "/v1/drains"), TABLE["POST", "/v1/drains"][1]) == 200
    if endpoint == ("DELETE", "/v1/tokens/{token}"):
        with api.client("boss") as boss:
            token = boss.create_token(TokenOrder(user="zoe")).view.id
        path = path.replace("{token}", token)
    if endpoint == ("DELETE", "/v1/whatif/{task}"):
        held(api, "/v1/whatif", "")
        with api.client("oz") as oz:
            path = path.replace("{task}", oz.whatif(WhatIfOrder()).id)
    if endpoint == ("POST", "/v1/models/forget"):
        assert ask(api, "boss", *("POST", "/v1/models/import"), TABLE["POST", "/v1/models/import"][1]) == 200
        body = {"kind": "/train-#"}
    who = "me" if path == "/v1/jobs" else "ada" if "{job}" in path else "boss"
    held(api, path, "1")
    session = log_in(api, api.tokens[who]) if endpoint == ("DELETE", "/v1/session") else None
    before = len(api.board.store.audit(limit=500))
    asked = path.replace("{job}", "1").replace("{number}", "1").replace("{kind}/{name}", "node/t4-01")
    asked = asked.replace("{run}", "7.1")
    assert 200 <= ask(api, who, method, asked, body, session) < 300
    lines = api.board.store.audit(limit=500)
    if path in ("/v1/jobs/plan", "/v1/jobs/renew", "/v1/jobs/{job}/reports"):
        assert len(lines) == before
    else:
        assert len(lines) == before + 1
        assert lines[0].address == "127.0.0.1"
        assert lines[0].token == api.tokens[who].split("_")[1]
        assert (lines[0].action, lines[0].user) == (" ".join(endpoint), ME if who == "me" else who)


def test_a_handover_is_audited_before_it_begins(api):
    """Nothing can be written afterwards."""
    assert 200 <= ask(api, "boss", "POST", "/v1/leader/move", {}) < 300
    assert api.changes["moved_after"] == "POST /v1/leader/move"


def test_users_submit_as_themselves_and_lists_hide_the_jobs_of_others(api):
    assert ask(api, "me", "POST", "/v1/jobs", SUBMISSION) == 201
    assert api.board.store.audit()[0].target == f"jobs/{list(api.submitter.jobs)[-1]}", "the audit log names the job"
    with api.client("ada") as ada, api.client("oz") as oz:
        assert {job.user for job in ada.jobs()} == {"ada"}
        assert list(ada.jobs(user="bob")) == []
        assert {"ada", "bob"} <= {job.user for job in oz.jobs()}
        assert {line.job for line in ada.round(1).decisions} == {"1"}
        assert {line.job for line in oz.round(1).decisions} == {"1", "2"}


def test_reports_for_a_job_of_another_user_are_refused_and_audited(api):
    before = len(api.board.store.audit(limit=500))
    assert ask(api, "bob", "POST", "/v1/jobs/1/reports", {"reports": [REPORT]}) == 404
    first, *others = api.board.store.audit(limit=500)
    assert len(others) == before
    assert (first.user, first.action, first.target) == ("bob", "POST /v1/jobs/{job}/reports", "jobs/1/reports")
    assert not first.allowed
    assert not [each for each in api.board.store.reports("1") if each.job_id != "1"]
