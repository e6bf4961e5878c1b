"""A daemon that takes up its settings again: a real process, on a simulated cluster."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.client import Client
from penstock_scheduler.daemon.penstockd import WallClock, make_site
from penstock_scheduler.people.errors import ConfigError, StoreError
from penstock_scheduler.rounds.settings import load_settings
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import staged

SETTINGS = """
[daemon]
cluster = "simulated"
round_s = 0.2
tick_s = 0.1
state_dir = "{folder}/state"
[simulated]
nodes = "t4:2x4"
[api]
socket = "{folder}/state/api.sock"
"""


@pytest.fixture
def daemon(tmp_path):
    """(process, settings file, log)."""
    path, log = tmp_path / "penstock.toml", tmp_path / "log"
    path.write_text(SETTINGS.format(folder=tmp_path))
    with log.open("ab") as out:
        command = [sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", str(path)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    wait_for(lambda: "event=started" in log.read_text(), 120, "penstockd to start", details=log.read_text)
    yield process, path, log
    process.terminate()
    assert process.wait(120) == 0, log.read_text()


def test_good_settings_are_taken_up_and_wrong_ones_refused_without_losing_a_round(daemon, tmp_path):
    process, path, log = daemon

    def take_up(more: str, says: str) -> str:
        path.write_text(SETTINGS.format(folder=tmp_path) + more)
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: says in log.read_text(), 120, f"the daemon to say {says!r}", details=log.read_text)
        return log.read_text()

    with Client(f"unix:{tmp_path}/state/api.sock") as penstock:
        wait_for(lambda: penstock.cluster().round is not None, 120, "a round")
        for wrong in ('name = "sai"', 'stages = ["fifo"]', "name = 3"):
            path.write_text(SETTINGS.format(folder=tmp_path) + f"[policy]\n{wrong}\n")
            before = log.read_text().count("settings refused")
            process.send_signal(signal.SIGHUP)
            wait_for(
                lambda n=before: log.read_text().count("settings refused") > n, 120, "a refusal", details=log.read_text
            )
            assert process.poll() is None
        refused = take_up("[budgets.accounts.maths]\nhard = 3\n", "unknown key")
        assert "unknown key 'accounts.maths.hard'" in refused
        assert "hard_gpu_hours" in refused, "the keys that there are"
        assert "(line 12)" in refused
        assert "budgets" not in penstock.settings()
        good = "requests_per_s = 7\n[budgets.accounts.maths]\nhard_gpu_hours = 3\n[policy.sia]\nfairness_p = -1.0\n"
        said = take_up(good, "wait for a restart")
        assert "changed=budgets.accounts,policy.sia" in said
        wait_for(lambda: "api.requests_per_s" in log.read_text(), 120, "the daemon to say which", details=log.read_text)
        assert penstock.settings()["budgets"]["accounts"]["maths"]["hard_gpu_hours"] == 3
        before = penstock.cluster().round or 0
        wait_for(lambda: (penstock.cluster().round or 0) > before + 1, 120, "rounds to go on")
        assert [budget.account for budget in penstock.budgets()] == ["maths"]
        assert next(each.settings for each in penstock.policies() if each.active)["sia"]["fairness_p"] == -1.0
        rounds = [each.round for each in penstock.rounds(limit=500).rounds]
        assert rounds == list(range(rounds[0], 0, -1)), "none is missing"
        first, second = penstock.audit(limit=2)
        assert (first.action, first.allowed, second.allowed) == ("reload settings", True, False)
        assert "line 12" in second.text


def test_a_store_that_is_away_refuses_settings_and_what_an_admin_sets_is_laid_over_the_file(tmp_path, monkeypatch):
    path = tmp_path / "penstock.toml"
    text = SETTINGS.format(folder=tmp_path) + "[policy.sia]\ngap = 0.01\n"
    path.write_text(text)
    store = open_store(tmp_path / "state", writer=True)
    site = make_site(path, load_settings(path), WallClock(), store)
    with pytest.raises(ConfigError, match="policy gandiva-share needs agents"):
        site.set_policy(staged("sia", "gandiva-share"))
    full = site.set_policy(staged("sia", partitions={"debug": "fifo"}, sia={"fairness_p": -1.0}))
    assert (full.settings["sia"]["gap"], full.settings["sia"]["fairness_p"]) == (0.01, -1.0)
    path.write_text(text.replace("0.01", "0.02"))

    def away(name: str, value: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "set_control", away)
        site.reload()
        assert site.chosen == full
        assert site.settings.policies["sia"] == {"gap": 0.01}
    assert "the disk is full" in store.audit()[0].text
    site.reload()
    assert site.chosen.settings["sia"]["gap"] == 0.02
    site.watcher.notifier.stop()
    store.close()


def test_a_policy_that_an_admin_had_set_and_that_is_gone_gives_way_to_the_files_and_this_is_said(tmp_path, caplog):
    """As after an upgrade: penstockd starts, decides by what the file says, and keeps what was set for whoever looks."""
    path = tmp_path / "penstock.toml"
    path.write_text(SETTINGS.format(folder=tmp_path) + "[policy.sia]\nfairness_p = -1.0\n")
    store = open_store(tmp_path / "state", writer=True)
    gone = {"name": "sia", "settings": {"sia": {"fairness_p": -0.25, "was_there_once": 1}}}
    for kept in (gone, {"name": "nosuch", "settings": {}}):
        store.set_control("policy", kept)
        site = make_site(path, load_settings(path), WallClock(), store)
        assert site.chosen.name == "sia"
        assert site.chosen.settings["sia"]["fairness_p"] == -1.0
        site.loop.tick()
        last = store.last_round()
        assert last is not None
        assert (last.policy.name, last.policy.settings["sia"]["fairness_p"]) == ("sia", -1.0)
        assert store.control("policy") == kept
        (newest, *_) = store.audit(limit=1)
        assert (newest.action, newest.allowed) == ("restore policy", False)
        assert "cannot be made any more" in newest.text
        assert "penstock policy set" in newest.text
        assert "policy not restored" in caplog.text
        site.watcher.notifier.stop()
    store.close()


def test_a_cluster_without_agents_is_given_no_policy_that_shares(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text(SETTINGS.format(folder=tmp_path) + '[policy]\nname = "gandiva"\n')
    store = open_store(tmp_path / "state", writer=True)
    with pytest.raises(ConfigError, match="policy gandiva needs agents"):
        make_site(path, load_settings(path), WallClock(), store)
    store.close()
