"""Commands about jobs, against a real service over its socket."""

from __future__ import annotations

import dataclasses
import json
import re

import httpx
import pytest

from penstock_profiles.wire import SaveFailed, Started
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.model import Outcome, Phase, Progress, Resize, Suspension
from tests.scheduler.builders import job, on
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import ADAS, BOBS, report, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_users_see_only_their_own_jobs(api):
    assert "bob" not in penstock(api, "list", who="ada").output
    assert penstock(api, "show", "2", who="ada").exit_code != 0
    refused = penstock(api, "rounds", "pause", who="ada")
    assert refused.exit_code != 0
    assert not api.changes["paused"]


@pytest.mark.parametrize(("state", "status"), [("COMPLETED", 0), ("FAILED", 4)])
def test_the_exit_status_of_wait_tells_how_the_job_ended(api, state, status):
    api.look(BOBS, finished={"1": Fate(state, 0, None)})
    told = penstock(api, "wait", "1")
    assert (told.exit_code, told.output.split()[-1]) == (status, state)
    assert penstock(api, "wait", "2", "--timeout", "0").exit_code == 5


@pytest.mark.parametrize(("state", "still"), [("suspended", 1.0), ("frozen", 1.0), ("driven", 0.0)])
def test_a_job_that_is_suspended_frozen_or_driven_is_shown_as_that_everywhere(api, state, still):
    why = "the agent of n01 holds it to its share"
    api.look(dataclasses.replace(ADAS, suspension=Suspension(None, why, state)), BOBS)
    assert re.search(rf"^1 .* {state} ", penstock(api, "list").output, re.MULTILINE)
    shown = penstock(api, "show", "1").output
    assert re.search(rf"^state +{state}$", shown, re.MULTILINE)
    assert re.search(rf"^{state} +{why}$", shown, re.MULTILINE)
    assert f"Job 1 is {state}: {why}." in penstock(api, "explain", "1").output
    told = httpx.get(f"{api.url}/v1/metrics", headers={"Authorization": f"Bearer {api.tokens['oz']}"}).text
    assert f"penstock_jobs_suspended {still}\n" in told


def test_a_job_that_cannot_save_is_shown_as_that(api):
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=SaveFailed(text="the disk is full"))])
    assert re.search(r"^1 .* running, cannot save ", penstock(api, "list").output, re.MULTILINE)
    assert re.search(r"^cannot save +the disk is full$", penstock(api, "show", "1").output, re.MULTILINE)


def test_a_run_that_says_its_total_is_shown_as_a_share_of_it(api):
    """As `run.epochs(40)` reports it; without a total there are only samples."""
    for epoch, total, shown in ((1, None, "30 samples"), (2, 120.0, "25%")):
        started = Started(gpu_type="t4", gpu_ids={}, progress=30.0, total=total)
        with api.client("ada") as ada:
            ada.report("1", [report(0, epoch=epoch, body=started)])
        assert re.search(rf"^1 .* {shown} ", penstock(api, "list").output, re.MULTILINE)
        assert re.search(rf"^progress +{shown}$", penstock(api, "show", "1").output, re.MULTILINE)


def test_logs_follow_to_the_end(api, tmp_path):
    (tmp_path / "1.out").write_text("a line\nanother\n")
    assert penstock(api, "logs", "1").output == "a line\nanother\n"
    assert penstock(api, "logs", "1", "--tail", "8").output == "another\n"
    assert penstock(api, "logs", "1", "--tail", "0").output == ""
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, None)})
    assert penstock(api, "logs", "-f", "1").output == "a line\nanother\n"


def test_history_and_plan_tell_when_and_why_a_job_was_resized(api):
    """Job 1 was resized in round 1. Since then round 2 has kept it, so `explain` says nothing about it any more."""
    first = api.board.record
    api.board.store.add_outcomes(
        1000.0, [Outcome(Resize("1", 1, on("t4", t4_00=4)), Progress.UNDER_WAY, "was asked to save")]
    )
    second = dataclasses.replace(first.snapshot, round=2)
    later = dataclasses.replace(first, snapshot=second, plan=dataclasses.replace(first.plan, round=2))
    api.board.store.save_round(later)
    api.board.record = later
    told = penstock(api, "history", "1", who="ada").output
    assert re.search(r"\b1 +resize +4 t4 +under-way +was asked to save", told)
    plan = penstock(api, "plan", "--round", "1", who="ada").output
    assert "Round 1, decided at" in plan
    assert first.plan.assignments["1"].reason.text in plan
    assert "Round 2, decided at" in penstock(api, "plan", who="ada").output
    assert penstock(api, "history", "2", who="bob").output == "Penstock has done nothing with job 2 yet.\n"
    refused = {
        ("history", "2"): "there is no job 2",
        ("plan", "--round", "99"): "no round 99",
        ("plan", "--round", "1", "--dry-run"): "leave one of them out",
    }
    for words, message in refused.items():
        assert message in str(penstock(api, *words, who="ada").exception)


def test_cancel_tries_all_and_says_what_was_refused(api):
    told = penstock(api, "cancel", "9", "1")
    assert told.exit_code == 1
    assert api.submitter.cancelled == ["1"]
    assert "no job 9" in told.stderr


def test_the_ledger_has_what_an_ended_job_used(api):
    used = job("1", user="ada", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
    api.look(used, BOBS, gpu_seconds={"1": {"t4": 7200.0}})
    api.look(BOBS, finished={used.id: Fate("COMPLETED", 0, None)})
    assert "2.00 GPU-hours of t4" in penstock(api, "usage", "--ledger").output


def test_the_remedy_for_a_job_that_ran_out_of_memory_is_shown_everywhere(api):
    told = "ended because it outgrew the 100 MB on a node; measure it again"
    api.look(BOBS, finished={"1": Fate("OUT_OF_MEMORY", 137, None, text=told)})
    for command in ("show", "explain", "wait"):
        assert told in penstock(api, command, "1").output
    assert json.loads(penstock(api, "show", "1", "--json").stdout)["ended_text"] == told
    with httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {api.tokens['ada']}"}) as http:
        assert told in http.get("/v1/jobs/1/page", follow_redirects=True).text
