"""Commands for admins and operators."""

from __future__ import annotations

import json

import pytest

from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_an_admin_pauses_resumes_and_sets_the_policy(api, tmp_path):
    assert "Paused" in penstock(api, "pause").output
    assert api.changes["paused"]
    assert "Rounds are paused" in penstock(api, "queue").output
    penstock(api, "resume")
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
    assert "sia (debug: fifo) decides" in penstock(api, "policy", "set", str(file), 'fifo.fit="best"').output
    assert api.changes["policy"].settings["fifo"]["fit"] == "best"
    assert "give each key once" in str(penstock(api, "policy", "set", "sia", "gap=0.1", "gap=0.2").exception)
    assert "unknown policy ''" in str(penstock(api, "policy", "set", "").exception)


def test_an_operator_drains_and_ends_it(api):
    assert "Nothing is drained" in penstock(api, "drain").output
    assert penstock(api, "drain", "node", "t4-01", who="ada").exit_code != 0
    told = penstock(api, "drain", "node", "t4-01", "--why", "a fan", who="oz")
    assert "The node t4-01 is drained for adaptive jobs" in told.output
    assert "a fan" in penstock(api, "drain").output
    assert "drained by oz" in " ".join(penstock(api, "nodes").output.split())
    assert "4 are out of service" in penstock(api, "queue").output
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
