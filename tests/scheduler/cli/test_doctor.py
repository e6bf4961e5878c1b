"""`penstock doctor`."""

from __future__ import annotations

import dataclasses
import json
import time

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.agent_messages import NodeStatus, status_file
from penstock_scheduler.model import Outcome, Phase, Progress, Start, UnknownValue
from penstock_scheduler.rounds.plan_check import PlanCheck, StartCheck
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import ADAS, BOBS, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_doctor_says_what_is_missing(api, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    told = penstock(api, "doctor", "--json")
    found = {line["check"]: line["ok"] for line in json.loads(told.stdout)}
    assert (told.exit_code, found["sbatch"], found["penstockd"]) == (1, False, True)


def test_doctor_shows_what_slurm_says_in_unknown_words(api):
    state = dataclasses.replace(api.board.state, unknown=(UnknownValue("node", "State", "State=IDLE+TIRED", ("n0",)),))
    api.board.observed(state, time.time())
    told = penstock(api, "doctor", "--json")
    found = {line["check"]: line for line in json.loads(told.stdout)}
    assert told.exit_code == 1
    assert found["penstockd"]["ok"]
    assert "State=IDLE+TIRED of node n0" in found["Slurm's answers"]["text"]


def test_doctor_names_the_nodes_without_an_answering_agent(api, monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_SPOOL", str(tmp_path))
    for node, late_s in (("n0", 0), ("n1", 60)):
        status_file(tmp_path, node).parent.mkdir(parents=True)
        status = NodeStatus(node=node, order=0, time_s=time.time() - late_s, history="h")
        status_file(tmp_path, node).write_text(status.model_dump_json())
    found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert not found["agents"]["ok"]
    assert "from n1;" in found["agents"]["text"]


def test_doctor_says_what_nodes_lack_for_sharing(api, monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_SPOOL", str(tmp_path))
    for node, lacks in (("n0", ("no-limiter",)), ("n1", ("no-limiter",)), ("n2", ())):
        status_file(tmp_path, node).parent.mkdir(parents=True)
        status = NodeStatus(node=node, order=0, time_s=time.time(), history="h", lacks=lacks)
        status_file(tmp_path, node).write_text(status.model_dump_json())
    told = penstock(api, "doctor", "--json")
    first, second = [line for line in json.loads(told.stdout) if line["check"] == "agents"]
    assert told.exit_code == 1
    assert (first["ok"], first["text"].partition(":")[0]) == (False, "no-limiter on n0, n1")
    assert (second["ok"], second["text"]) == (True, "the agents of all 3 nodes answer")


def test_doctor_warns_of_a_low_limit_on_open_files(api, monkeypatch):
    found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert found["open files"]["ok"]
    monkeypatch.setattr("penstock_scheduler.safety.open_files.limit", lambda: 1024)
    found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert not found["open files"]["ok"]
    assert "only 1,024 files" in found["open files"]["text"]
    assert "LimitNOFILE=65536" in found["open files"]["text"]
    assert found["penstockd"]["ok"], "it works"
    assert "penstock-api's files" not in found, "penstockd serves the API itself"


def test_doctor_warns_of_a_low_limit_of_penstock_api(tmp_path):
    """Also while penstockd does not answer."""
    with serving(tmp_path, separate=True) as api:
        api.process.stop()
        api.process.files = 256, 1024
        api.process.start()
        found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
        assert (found["open files"]["ok"], found["penstock-api's files"]["ok"]) == (True, False)
        assert "penstock-api may open only 1,024 files" in found["penstock-api's files"]["text"]
        assert sum("1,024 files" in line["text"] for line in found.values()) == 1
        api.service.stop()
        with api.client("ada") as ada:
            wait_for(lambda: ada.ready().status == "not-ready", 120, "penstockd to be missed")
            assert ada.ready().api_files.limit == 1024


def test_doctor_fails_and_names_the_jobs_for_which_plan_and_cluster_differ(api):
    """The round gave GPUs to job 2, which the cluster never shows as started, and more to job 1, which keeps its 2."""
    found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert "GPUs" not in found
    nodes, now_s = api.board.state.nodes, time.time()
    record = api.board.record
    assert record is not None
    planned = {job: each.placement.gpus for job, each in record.plan.assignments.items()}
    assert planned["2"] > 0
    api.board.plan_check = PlanCheck()
    for at_s in (now_s - 100_000, now_s):
        api.board.observed(type(api.board.state)(nodes, (ADAS, dataclasses.replace(BOBS, name="evil\x1b[2J"))), at_s)
    for who, names in ((None, True), ("bob", True), ("ada", False)):
        told = penstock(api, "doctor", "--json", who=who)
        found = {line["check"]: line for line in json.loads(told.stdout)}
        assert (told.exit_code, found["GPUs"]["ok"], found["penstockd"]["ok"]) == (1, False, True)
        assert found["GPUs"]["text"].startswith("the plan and the cluster differ for 27.8 h: the plan gives ")
        named = f"job 2 (evil\x1b[2J): {planned['2']} in the plan, 0 held"
        assert (named in found["GPUs"]["text"]) is names
    assert not any("evil" in each for each in httpx.get(f"{api.url}/v1/ready").json()["warnings"]), (
        "anybody may read it"
    )
    running = dataclasses.replace(BOBS, phase=Phase.RUNNING, allocation=record.plan.assignments["2"].placement)
    api.look(dataclasses.replace(ADAS, allocation=record.plan.assignments["1"].placement), running)
    found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert "GPUs" not in found


def test_doctor_fails_and_names_the_jobs_that_slurm_does_not_start(api):
    """The round sends job 2 to free GPUs. Three more rounds do the same, and Slurm starts it in none."""
    record, now_s = api.board.record, time.time()
    assert record is not None
    start = Start("2", record.snapshot.round, record.plan.assignments["2"].placement)
    answer = "Slurm did not start it in 60 s: AssocGrpGRES"
    api.board.store.add_outcomes(now_s, [Outcome(start, Progress.UNDER_WAY), Outcome(start, Progress.FAILED, answer)])
    api.look(ADAS, dataclasses.replace(BOBS, allocation=None, phase=Phase.QUEUED))
    api.board.start_check = StartCheck()
    for number in range(4):
        later = dataclasses.replace(record, snapshot=dataclasses.replace(record.snapshot, round=number))
        api.board.start_check.take(later, api.board.state, now_s - 300 + 60 * number)
    for who, named in ((None, True), ("bob", True), ("ada", False)):
        told = penstock(api, "doctor", "--json", who=who)
        found = {line["check"]: line for line in json.loads(told.stdout)}
        assert (told.exit_code, found["starts"]["ok"], found["penstockd"]["ok"]) == (1, False, True)
        assert found["starts"]["text"].startswith("no job starts: in 3 rounds and ")
        assert (f"job 2 ({BOBS.name}): {answer}" in found["starts"]["text"]) is named
    assert not any(answer in each for each in httpx.get(f"{api.url}/v1/ready").json()["warnings"]), (
        "anybody may read it"
    )
