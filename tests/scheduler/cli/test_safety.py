"""What users and admins see of stops and of the plan gate: show, explain, history, plan, doctor, metrics."""

from __future__ import annotations

import dataclasses
import json
import time

import httpx
import pytest

from penstock_scheduler.model import Migrate, Outcome, Progress, Stop, StopCode
from penstock_scheduler.model.records import GateRecord
from tests.scheduler.builders import on
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import serving

STOP = Stop(StopCode.PREEMPTED, "makes room for job 2 on node t4-00", 1.8, 0.9, "2")
REFUSED = "it stops 9 running jobs on 36 GPUs: together 36 of the 40 GPUs that jobs run on"


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def decide(api, *, stops=None, gate=None, no_gain=""):
    """A second round like the first one, which stops jobs, or whose first plan was refused."""
    first = api.board.record
    plan = dataclasses.replace(first.plan, round=2, stops=stops or {})
    snapshot = dataclasses.replace(first.snapshot, round=2, time_s=time.time(), no_gain=no_gain)
    record = dataclasses.replace(first, snapshot=snapshot, plan=plan, gate=gate or GateRecord())
    api.board.store.save_round(record)
    api.board.decided(record)
    return record


def test_a_user_reads_why_the_job_is_stopped(api):
    decide(api, stops={"1": STOP})
    state = api.board.state
    jobs = tuple(dataclasses.replace(job, restarts=job.restarts + 1) for job in state.jobs)
    api.board.observed(dataclasses.replace(state, jobs=jobs), time.time())
    action = Migrate("1", 2, on("t4", t4_01=2))
    api.board.store.add_outcomes(1000.0, [Outcome(action, Progress.UNDER_WAY, "was asked to save", STOP)])
    sentence = "preempted: makes room for job 2 on node t4-00"
    assert sentence in penstock(api, "show", "1", who="ada").output
    assert "Round 2 stops its run (preempted): makes room for job 2" in penstock(api, "explain", "1", who="ada").output
    assert sentence in penstock(api, "history", "1", who="ada").output
    decide(api)
    api.board.observed(state, time.time())
    assert sentence in penstock(api, "show", "1", who="ada").output, "the last stop stays"


def test_an_admin_sees_that_no_job_is_moved_for_a_gain(api):
    decide(api, no_gain="2 jobs that were moved hold no GPUs")
    checks = {each["check"]: each for each in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert not checks["moves"]["ok"]
    assert "2 jobs that were moved hold no GPUs" in checks["moves"]["text"]


def test_an_admin_sees_a_refused_plan_and_lets_it_pass(api):
    decide(api, gate=GateRecord(refused=(REFUSED,), stops={"1": STOP}))
    told = penstock(api, "plan", who="ada").output
    assert f"The plan gate refused the first plan of this round: {REFUSED}." in told
    assert "makes room for job 2" in told
    assert "penstock plan --approve 2" in told
    checks = {each["check"]: each for each in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert not checks["plan gate"]["ok"]
    assert "round 2" in checks["plan gate"]["text"]
    headers = {"Authorization": f"Bearer {api.tokens['ada']}"}
    assert "penstock_plan_refused 1.0" in httpx.get(f"{api.url}/v1/metrics", headers=headers).text
    assert penstock(api, "plan", "--approve", "2", who="ada").exit_code != 0, "only admins"
    approved = penstock(api, "plan", "--approve", "2", who="boss")
    assert approved.exit_code == 0
    assert "plans may stop 1 job: 1." in approved.output
    assert api.board.store.audit()[0].action == "POST /v1/rounds/{number}/approval"
