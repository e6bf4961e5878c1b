"""Commands for admins and operators."""

from __future__ import annotations

import json

import pytest

from penstock_scheduler.store import tables
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_an_admin_pauses_resumes_and_sets_the_policy(api, tmp_path):
    assert "Paused" in penstock(api, "rounds", "pause").output
    assert api.changes["paused"]
    assert "Rounds are paused" in penstock(api, "list", "--waiting").output
    penstock(api, "rounds", "resume")
    assert not api.changes["paused"]
    assert penstock(api, "policy", "set", "sia", "fairness_p=-1.0").exit_code == 0
    assert api.changes["policy"].settings["sia"]["fairness_p"] == -1.0
    assert penstock(api, "policy", "set", "sia", "fairness_p").exception is not None
    both = penstock(api, "policy", "set", "sia", "sia.fairness_p=-0.5", "gap=0.02", "--stage", "synergy-tune")
    assert both.exit_code == 0
    assert "The policy sia+synergy-tune decides from the next round on" in both.output
    assert api.changes["policy"].settings["sia"].items() >= {"fairness_p": -0.5, "gap": 0.02}.items()
    assert "* sia+synergy-tune" in " ".join(penstock(api, "policy", "list").output.split())
    file = tmp_path / "mine.toml"
    file.write_text('[policy]\nname = "sia"\n[policy.partitions.debug]\nname = "fifo"\n')
    assert "sia (debug: fifo) decides" in penstock(api, "policy", "set", str(file), 'fifo.backfill="easy"').output
    assert api.changes["policy"].settings["fifo"]["backfill"] == "easy"
    assert "give each key once" in str(penstock(api, "policy", "set", "sia", "gap=0.1", "gap=0.2").exception)
    assert "unknown policy ''" in str(penstock(api, "policy", "set", "").exception)


def test_an_admin_resumes_the_cloud_and_closes_a_run_while_penstockd_runs(api):
    assert "it was on because no permission" in penstock(api, "cloud", "resume").output
    assert "protected mode was off" in penstock(api, "cloud", "resume").output
    assert penstock(api, "cloud", "adopt").exit_code == 1, "it asks first"
    assert "it belonged to cluster c1 of head1" in penstock(api, "cloud", "adopt", "--yes").output
    assert "was its own already" in penstock(api, "cloud", "adopt", "--yes").output
    assert "new instances launch from ami-2 in us-east-1" in penstock(api, "cloud", "accept-image").output
    assert "parameters have not changed" in penstock(api, "cloud", "accept-image").output
    assert "run 7.1 of job 7 is closed" in penstock(api, "cloud", "forget", "7.1").output
    assert "7.1 is no open run" in str(penstock(api, "cloud", "forget", "7.1").exception)
    assert penstock(api, "cloud", "resume", who="oz").exit_code != 0
    lines = [
        (line.user, line.action, line.allowed, line.text) for line in api.board.store.audit() if "cloud" in line.action
    ]
    assert [line[1:] for line in lines[::-1] if line[2]] == [
        ("POST /v1/cloud/resume", True, "no permission"),
        ("POST /v1/cloud/resume", True, ""),
        ("POST /v1/cloud/adopt", True, "cluster c1 of head1"),
        ("POST /v1/cloud/adopt", True, ""),
        ("POST /v1/cloud/images", True, "ami-2 in us-east-1"),
        ("POST /v1/cloud/images", True, ""),
        ("POST /v1/cloud/runs/{run}/forget", True, "job 7"),
    ]
    assert lines[0][:3] == ("oz", "POST /v1/cloud/resume", False)


def test_an_operator_drains_and_ends_it(api):
    assert "Nothing is drained" in penstock(api, "drain").output
    assert penstock(api, "drain", "node", "t4-01", who="ada").exit_code != 0
    told = penstock(api, "drain", "node", "t4-01", "--why", "a fan", who="oz")
    assert "The node t4-01 is drained for adaptive jobs" in told.output
    assert "a fan" in penstock(api, "drain").output
    assert "drained by oz" in " ".join(penstock(api, "nodes").output.split())
    assert "4 are out of service" in penstock(api, "list", "--waiting").output
    for words in ("node nosuch", "rack 7", "node"):
        assert penstock(api, "drain", *words.split()).exit_code != 0
    penstock(api, "drain", "node", "t4-01", "--end")
    assert json.loads(penstock(api, "drain", "--json").stdout) == []
    lines = [(line.user, line.action, line.allowed) for line in api.board.store.audit() if "drains" in line.action]
    assert lines[1:] == [("oz", "POST /v1/drains", True), ("ada", "POST /v1/drains", False)]
    assert lines[0][1] == "DELETE /v1/drains/{kind}/{name}"


def test_a_token_is_made_used_and_revoked(api):
    made = json.loads(penstock(api, "token", "create", "--user", "ada", "--json").stdout)
    api.tokens["new"] = made["token"]
    assert penstock(api, "list", who="new").exit_code == 0
    penstock(api, "token", "revoke", made["view"]["id"])
    assert penstock(api, "list", who="new").exit_code != 0


def test_an_operator_asks_who_did_what(api):
    """By time, user, action and job; `1` is no part of the id of job 10."""
    told = penstock(api, "cancel", "1", who="ada")
    assert told.exit_code == 0, told.output
    penstock(api, "hold", "2", who="oz")
    penstock(api, "drain", "node", "t4-01", who="ada")
    api.board.store.note("bob", "user", "POST /v1/jobs/{job}/cancel", "jobs/10/cancel", allowed=True)
    api.board.store.note("ada", "user", "lease", "jobs/1", allowed=True, text="was cancelled")
    api.board.store.note("", "admin", "stop", "jobs/1", allowed=True, text="without a round: gain")

    def lines(*words: str) -> list[tuple[str, str]]:
        found = penstock(api, "audit", "--json", *words, who="oz")
        assert found.exit_code == 0, found.output
        return [(line["user"], line["target"]) for line in json.loads(found.stdout)]

    assert lines("--job", "1") == [("", "jobs/1"), ("ada", "jobs/1"), ("ada", "jobs/1/cancel")]
    assert lines("--job", "_") == lines("--job", "%") == lines("--job", "a\x00") == []
    assert lines("--user", "oz") == [("oz", "jobs/2/hold")]
    assert lines("--action", "CANCEL") == [("bob", "jobs/10/cancel"), ("ada", "jobs/1/cancel")]
    assert lines("--refused") == [("ada", "drains")]
    assert lines("--from", "2001-01-01", "--user", "oz") == lines("--user", "oz")
    assert lines("--to", "2001-01-01") == lines("--from", "2999-01-01") == []
    assert lines("--limit", "2") == [("", "jobs/1"), ("ada", "jobs/1")]
    with api.client("oz") as oz:
        everything = list(oz.audit())
        assert list(oz.audit(limit=501)) == everything
        assert [line.id for line in everything] == sorted((line.id for line in everything), reverse=True)
    table = " ".join(penstock(api, "audit", "--job", "1", who="oz").output.split())
    assert "penstockd - stop jobs/1: without a round: gain" in table
    assert f"ada (user) 127.0.0.1 POST jobs/1/cancel (token {api.tokens['ada'].split('_')[1]})" in table
    assert "REFUSED: POST drains" in " ".join(penstock(api, "audit", "--refused").output.split())
    refused = penstock(api, "audit", who="ada")
    assert refused.exit_code != 0
    assert "needs the role operator" in str(refused.exception)


def test_the_audit_log_is_read_page_by_page(api):
    line = {"time_s": 1.0, "user_name": "ada", "role": "user", "action": "lease", "allowed": True, "text": ""}
    with api.board.store.write() as db:
        db.execute(tables.audit.insert(), [line | {"target": f"jobs/{number}"} for number in range(1100)])
    with api.client("oz") as oz:
        assert [line.target for line in oz.audit(action="lease")] == [f"jobs/{n}" for n in range(1099, -1, -1)]
        assert len(list(oz.audit(limit=700))) == 700
