"""The API through its client: jobs, events, admins, health."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time

import httpx
import pytest

from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.accounts.rules import BudgetSettings
from penstock_scheduler.api.client import ApiError, Client, DaemonAway
from penstock_scheduler.api.messages import PlanOrder, Submission
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.model import ClusterState, Phase, Refusal
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.safety.health import HealthSettings, StepName
from tests.constants import with_constants
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def test_only_its_user_learns_why_a_job_is_not_managed(api):
    refused = Refusal("7", "train", "ada", "max_gpus must be at least min_gpus; raise --max-gpus")
    api.board.observed(ClusterState((), (), (refused,)), time.time())
    with api.client("ada") as ada, api.client("bob") as bob:
        for ask in (ada.job, ada.explain, ada.cancel):
            with pytest.raises(ApiError, match="does not manage job 7: max_gpus must be at least") as error:
                ask("7")
            assert (error.value.status, error.value.code) == (404, "not-managed")
        with pytest.raises(ApiError, match="no job 7"):
            bob.explain("7")


def test_a_log_is_read_in_parts_and_never_through_a_link(api, tmp_path):
    (tmp_path / "1.out").write_text("one\ntwo\n")
    with api.client("ada") as ada:
        assert ada.log("1").text == "one\ntwo\n"
        assert ada.log("1", 4).text == "two\n"
        assert (ada.log("1", -3).text, ada.log("1", -3).offset) == ("wo\n", 5)
        assert ada.log("1", 8).next == 8
        assert [ada.log("1", start).whole for start in (0, 4, 8)] == [8, 8, 8]
        for content, whole in ((b"\xfc\xe4\nhalf \xf6", 3), (b"\xe4 1%\r 2%\r", 5), (b"half\r", 0), (b"", 0)):
            (tmp_path / "1.out").write_bytes(content)
            assert ada.log("1").whole == whole, "in bytes of the file, not of the text"
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "1.out").unlink()
        (tmp_path / "1.out").symlink_to(tmp_path / "secret")
        assert (ada.log("1").text, "1.out, cannot be read" in ada.log("1").note) == ("", True)


def test_a_log_is_there_as_long_as_its_file_even_if_the_cluster_has_forgotten_the_job(api, tmp_path):
    """A file that is missing is an error that names it: nothing with status 0 would look like a job that printed nothing."""
    (tmp_path / "1.out").write_text("one\n")
    (tmp_path / "1.err").write_text("oh\n")
    with api.client("ada") as ada, api.client("bob") as bob:
        assert (bob.log("2").text, bob.log("2").note) == ("", "job 2 has not started, so it has no output")
        api.submitter.forgotten |= {"1", "2"}
        api.look(finished={"1": Fate("COMPLETED", 0, 77.0), "2": Fate("CANCELLED", 0, 77.0)})
        assert ada.log("1").text == "one\n"
        assert ada.log("1", stream="stderr").text == "oh\n"
        (tmp_path / "1.out").unlink()
        with pytest.raises(
            ApiError, match=f"{tmp_path}/1.out, cannot be read on the host of penstockd: No such file"
        ) as e:
            ada.log("1")
        assert (e.value.status, e.value.code) == (404, "no-output")
        with pytest.raises(ApiError, match="job 2 has not started"):
            bob.log("2")


def test_a_forecast_submits_nothing(api):
    with api.client("ada") as ada:
        told = ada.forecast(Submission(command=("x",), spec={"max_gpus": 2}))
        assert told.would == "start"
        assert told.allocation.gpu_type == "t4"
        never = ada.forecast(Submission(command=("x",), spec={"max_gpus": 1, "gpu_types": ["h100"]}))
        assert never.would == "never"
        with pytest.raises(ApiError, match="nosuch") as error:
            ada.forecast(Submission(command=("x",), spec={"model_family": "nosuch"}))
        assert error.value.code == "bad-spec"
    assert api.submitter.jobs == {}


def test_a_job_is_not_told_that_it_never_starts_while_all_nodes_are_silent(api):
    """As for a moment after a start of slurmctld, in which two tasks of a storm failed for good."""
    record = api.board.record
    nodes = tuple(dataclasses.replace(node, may_start=False) for node in record.snapshot.nodes)
    api.board.record = dataclasses.replace(record, snapshot=dataclasses.replace(record.snapshot, nodes=nodes))
    with api.client("ada") as ada:
        told = ada.forecast(PlanOrder(spec={"max_gpus": 2}))
        assert ("takes new jobs now" in told.text, told.would) == (True, "wait")
        assert ada.forecast(PlanOrder(spec={"max_gpus": 1, "gpu_types": ["h100"]})).would == "never"


def test_a_forecast_knows_what_sbatch_options_say(api):
    """Of a job that has no program yet: its partition, its nodes, and the limits of its user."""
    api.app.state.api.controls.rules.use(BudgetSettings(), LimitSettings(users={"oz": 1}))
    with api.client("ada") as ada, api.client("oz") as oz:
        told = ada.forecast(PlanOrder(spec={"max_gpus": 2}, partition="all"))
        assert told.would == "start"
        assert ada.forecast(PlanOrder(spec={"max_gpus": 2}, reservation="of-other-nodes")).would == "wait"
        assert "by the policy sia on round 1, " in told.lines[-1]
        on = {"nodes": {"exclude": ["t4-00", "t4-01"]}}
        assert ada.forecast(PlanOrder(spec={"max_gpus": 1}, **on)).would == "never"
        pair = PlanOrder(spec={"min_gpus": 2, "max_gpus": 2})
        assert ada.forecast(pair).would == "start"
        assert oz.forecast(pair).would != "start", "oz may have one GPU"
        with pytest.raises(ApiError, match="does not manage partition rtx; it manages all") as error:
            ada.forecast(PlanOrder(spec={"max_gpus": 1}, partition="all,rtx"))
        assert error.value.code == "bad-spec"
    assert api.submitter.jobs == {}


def test_explain_tells_configurations_and_prices(api):
    with api.client("ada") as ada:
        told = ada.explain("1")
    assert told.round == 1
    assert told.text
    assert {(each.gpus, each.goodput) for each in told.configurations} >= {(1, 1.0), (2, 2.0), (4, 4.0)}
    assert told.lines


def test_events_reach_only_users_who_may_see_them(api):
    seen: list[tuple[str, str]] = []

    def listen() -> None:
        with api.client("bob") as bob:
            for event in bob.events():
                seen.append(event)
                if len(seen) == 2:
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    while not seen:
        time.sleep(0.01)
    api.look(job("1", user="ada"), job("2", user="bob", phase=Phase.RUNNING, allocation=on("t4", t4_01=1)))
    thread.join(20)
    (first, jobs), (kind, text) = seen
    assert (first, [each["user"] for each in json.loads(jobs)["jobs"]]) == ("snapshot", ["bob"])
    assert kind == "job"
    assert '"user":"bob"' in text


def test_admins_change_policy_and_pause(api):
    with api.client("boss") as boss:
        assert boss.set_policy(PolicyChoice(name="fifo")).name == "fifo"
        assert [each.name for each in boss.policies() if each.active] == ["fifo"]
        with pytest.raises(ApiError, match="the policies are"):
            boss.set_policy(PolicyChoice(name="sai"))
        assert boss.pause(paused=True).paused
        assert boss.cluster().paused
        assert api.board.store.audit()[0].action == "PUT /v1/pause"


def test_the_client_says_that_the_daemon_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock_scheduler.api.client.RETRY_PAUSES_S", (0.0,))
    with pytest.raises(DaemonAway, match="Running jobs keep running"):
        Client(f"unix:{tmp_path}/none").me()


def test_health_is_open_and_honest(api):
    assert httpx.get(f"{api.url}/v1/health").json()["status"] == "ok"
    with api.client("ada") as ada:
        ready = ada.ready()
        assert (ready.status, ready.problems) == ("ok", [])
        assert {step.step: step.round for step in ready.steps}["decide"] == 1
        (store,) = ready.disks
        assert store.writable
        assert store.used_bytes
        with contextlib.suppress(ClusterAway), api.vitals.loop.health.step(StepName.OBSERVE):
            raise ClusterAway("no answer")
        assert ada.ready().status == "ok", "one failure is not the end"
        api.vitals.settings = with_constants(HealthSettings, {"late_s": 1e-6})
        ready = ada.ready()
        assert ready.status == "not-ready"
        assert ": no answer. Running jobs continue" in ready.problems[0]
