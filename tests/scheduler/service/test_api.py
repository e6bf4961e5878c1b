from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from contextlib import closing

import httpx
import pytest
from hypothesis import HealthCheck, settings

from penstock_profiles.wire import Checkpointed, Ended, Observation, Report, Started
from penstock_scheduler.client import ApiError, Client, DaemonAway
from penstock_scheduler.messages import Submission, TokenOrder
from penstock_scheduler.model import ClusterState, Phase, Refusal
from penstock_scheduler.ports import Fate
from penstock_scheduler.service.guard import Bucket, check_report
from penstock_scheduler.store import schema
from tests.scheduler.builders import job, on, with_facts
from tests.scheduler.service.api import BOBS, ME, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def report(sequence: int = 0, epoch: int = 1, body: object = None) -> Report:
    body = body or Checkpointed(progress=1.0, seconds=0.1)
    return Report(job_id="1", epoch=epoch, sequence=sequence, time_s=1.0, body=body)


OBSERVED = {
    "kind": "observation",
    "gpu_type": "t4",
    "nodes": 1,
    "gpus": 2,
    "atomic_batch": 8,
    "steps": 5,
    "step_time_s": 0.5,
    "progress": 10.0,
}


def test_on_the_socket_the_kernel_says_who_asks(api):
    with Client(api.socket) as me:
        assert (me.me().user, me.me().by, me.me().role) == (ME, "socket", "admin")
        assert me.me().uid == os.getuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_on_the_socket_another_user_is_that_user(api, tmp_path):
    """A real process of another uid, whatever it says of itself."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)
    import subprocess

    request = b"GET /v1/me HTTP/1.1\r\nHost: x\r\nX-User: root\r\nConnection: close\r\n\r\n"
    code = (
        f"import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect({api.socket[5:]!r}); s.sendall({request!r}); "
    )
    code += "sys.stdout.buffer.write(b''.join(iter(lambda: s.recv(4096), b'')))"
    done = subprocess.run(["/usr/bin/python3", "-c", code], user="nobody", capture_output=True, check=True, cwd="/")
    assert b'"user":"nobody"' in done.stdout
    assert b'"role":"user"' in done.stdout


def test_tokens_expire_and_are_revoked_at_once(api):
    with Client(api.socket) as me:
        made = me.create_token(TokenOrder(user="ada", expires_s=time.time() - 1))
        with pytest.raises(ApiError, match="expired"):
            Client(api.url, token=made.token).me()
        good = me.create_token(TokenOrder(user="ada"))
        with Client(api.url, token=good.token) as ada:
            assert ada.me().user == "ada"
            assert me.revoke_token(good.view.id).revoked
            with pytest.raises(ApiError, match="revoked") as error:
                ada.me()
            assert (error.value.status, error.value.code) == (401, "unauthenticated")
    assert good.token.split("_", 2)[2] not in str(list(api.board.store.export()))
    for wrong in ("", "x", "penstock__", good.token[:-1], "penstock_' or 1=1 --_x"):
        with pytest.raises(ApiError, match="token"):
            Client(api.url, token=wrong or "penstock").me()


def test_a_key_is_one_job(api):
    order = Submission(key="k", command=("train",), name="n")
    with api.client("me") as me:
        first = me.submit(order)
        again = me.submit(order)
        assert first.id == again.id
        assert (first.user, first.key, first.state) == (ME, "k", "queued")
        assert len(api.submitter.jobs) == 1
        with pytest.raises(ApiError) as error:
            me.submit(Submission(key="k", command=("other",)))
        assert error.value.code == "key-used"
        assert me.submit(Submission(key="l", command=("train",))).id != first.id
        assert [found.id for found in me.jobs(key="k")] == [first.id]


def test_a_submission_whose_daemon_died_in_between_is_found(api):
    """The key was noted and sbatch had run, but nobody noted the job."""
    order = Submission(key="k", command=("train",))
    lost = api.submitter.submit(order, ME, 0)
    import hashlib

    api.board.store.begin_submission(ME, "k", hashlib.sha256(order.model_dump_json().encode()).hexdigest())
    with api.client("me") as me:
        assert me.submit(order).id == lost
    assert len(api.submitter.jobs) == 1
    assert api.board.store.open_submissions() == []


def test_the_same_key_at_once_is_one_job(api):
    order = Submission(key="k", command=("train",))
    found: list[str] = []

    def submit() -> None:
        with api.client("me") as me:
            found.append(me.submit(order).id)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(api.submitter.jobs) == 1


def test_a_job_that_is_not_managed_is_told_why_to_its_user_alone(api):
    refused = Refusal("7", "train", "ada", "max_gpus must be at least min_gpus; raise --max-gpus")
    api.board.take_state(ClusterState((), (), (refused,)), time.time())
    with api.client("ada") as ada, api.client("bob") as bob:
        for ask in (ada.job, ada.explain, ada.cancel):
            with pytest.raises(ApiError, match="does not manage job 7: max_gpus must be at least") as error:
                ask("7")
            assert (error.value.status, error.value.code) == (404, "not-managed")
        with pytest.raises(ApiError, match="no job 7"):
            bob.explain("7")


def test_who_waits_is_told_of_a_change(api):
    answers: list[object] = []
    with api.client("ada") as ada, api.client("ada") as other:
        before = ada.job("1")
        thread = threading.Thread(target=lambda: answers.append(other.job("1", wait_s=30, since=before.version)))
        thread.start()
        while not api.board.awaited:
            time.sleep(0.01)
        assert not answers
        api.look(job("1", user="ada"), BOBS)
        thread.join(20)
        (after,) = answers
        assert (after.state, after.version) == ("queued", before.version + 1)
        assert ada.job("1", wait_s=0.05, since=after.version) == after, "no change: the job as it is, after the wait"
        api.look(BOBS, finished={"1": Fate("FAILED", 3, 77.0)})
        ended = ada.wait("1")
        assert (ended.state, ended.ended, ended.exit_code, ended.end_s) == ("ended", "FAILED", 3, 77.0)
        assert ada.explain("1").text == "it has ended: FAILED"


def test_a_job_that_ends_is_charged_once(api):
    import dataclasses

    record = api.board.record
    attained = {"1": {"t4": 120.0}}
    api.board.record = dataclasses.replace(record, snapshot=with_facts(record.snapshot, attained_gpu_s=attained))
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 77.0)})
    api.look(BOBS)
    with api.client("ada") as ada, api.client("bob") as bob:
        (line,) = ada.ledger().lines
        assert (line.job, line.text, line.amount, line.kind) == ("1", "t4", 120.0, "gpu-seconds")
        assert bob.ledger().lines == []


def test_reports_are_taken_once_and_of_the_present_epoch(api):
    api.submitter.given_epoch = 2
    with api.client("ada") as ada:
        receipt = ada.report("1", [report(0, 1), report(0, 2), report(1, 2), report(1, 2)])
        assert (receipt.accepted, receipt.duplicates) == (2, 1)
        (refused,) = receipt.refused
        assert refused.index == 0
        assert "present epoch is 2" in refused.message
        assert ada.report("1", [report(0, 2)]).duplicates == 1
        assert ada.report("1", [report(0, 3)]).accepted == 1, "a run that Slurm restarted by itself"
        assert ada.report("1", [report(2, 2)]).accepted == 0
    assert [(each.epoch, each.sequence) for each in api.board.store.reports("1")] == [(2, 0), (2, 1), (3, 0)]
    assert api.board.counters["reports refused"] == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"step_time_s": math.nan}, "finite"),
        ({"step_time_s": -1.0}, "greater than 0"),
        ({"step_time_s": 1e-8}, "samples/s are not plausible"),
        ({"goodput": 1e9}, "samples/s are not plausible"),
        ({"atomic_batch": 10**30}, "each count must be at most"),
        ({"sync_time_s": 0.6}, "must not be longer than step_time_s"),
        ({"nodes": 3}, "more nodes than GPUs"),
        ({"gpu_typ": "t4"}, "gpu_typ"),
    ],
)
def test_what_is_not_plausible_is_refused(wrong, words):
    given = {"job_id": "1", "epoch": 1, "sequence": 0, "time_s": 1.0, "body": OBSERVED}
    assert isinstance(check_report(given, "1", 100.0).body, Observation)
    with pytest.raises(ValueError, match=words):
        check_report(given | {"body": OBSERVED | wrong}, "1", 100.0)
    with pytest.raises(ValueError, match="not of 2"):
        check_report(given, "2", 100.0)
    with pytest.raises(ValueError, match="ahead"):
        check_report(given | {"time_s": 1e9}, "1", 100.0)


def test_a_bad_report_among_good_ones_is_refused_alone(api):
    bad = {"job_id": "1", "epoch": 1, "sequence": 5, "time_s": -1.0, "body": OBSERVED}
    good = report(0).model_dump(mode="json")
    answer = httpx.post(
        f"{api.url}/v1/jobs/1/reports",
        json={"reports": [good, bad]},
        headers={"Authorization": f"Bearer {api.tokens['ada']}"},
    ).json()
    assert (answer["accepted"], [each["index"] for each in answer["refused"]]) == (1, [1])


def test_a_job_that_ends_while_it_is_adopted_has_ended(api):
    """A submission is answered with a view that is a moment old; meanwhile a round sees the job's end."""
    with api.client("ada") as ada:
        before = api.board.job("1")
        api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 2.0)})
        api.board.adopt(before.model_copy(update={"key": "night"}))
        assert (ada.job("1").state, ada.job("1").key) == ("ended", "night")
        assert "1" not in {view.id for view in api.board.live()}


def test_progress_comes_from_reports(api):
    started = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=started), report(1, body=Observation.model_validate(OBSERVED))])
        api.look(job("1", user="ada", phase=Phase.RUNNING, allocation=on("t4", t4_00=4)), BOBS)
        assert (ada.job("1").progress, ada.job("1").total) == (10.0, 100.0)
        assert len(ada.history("1").observations) == 1


@pytest.mark.parametrize(
    ("last", "shown"),
    [(Ended(outcome="completed", progress=100.0), 100.0), (Ended(outcome="failed", progress=0.0), 10.0)],
)
def test_the_progress_of_a_job_that_has_ended_is_its_last_word(api, last: Ended, shown: float):
    """It is reported every 30 s, so that the newest observation lacks the end; a run that fails at its start knows of none."""
    started = Started(gpu_type="t4", gpu_ids={}, progress=5.0, total=100.0)
    with api.client("ada") as ada:
        ada.report("1", [report(0, body=started), report(1, body=Observation.model_validate(OBSERVED))])
        ada.report("1", [report(2, body=last)])
        api.look(BOBS, finished={"1": Fate("COMPLETED", 0, 2.0)})
        assert (ada.job("1").state, ada.job("1").progress, ada.job("1").total) == ("ended", shown, 100.0)


def test_a_log_is_read_in_parts_and_never_through_a_link(api, tmp_path):
    (tmp_path / "1.out").write_text("one\ntwo\n")
    with api.client("ada") as ada:
        assert ada.log("1").text == "one\ntwo\n"
        assert ada.log("1", 4).text == "two\n"
        assert (ada.log("1", -3).text, ada.log("1", -3).offset) == ("wo\n", 5)
        assert ada.log("1", 8).next == 8
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "1.out").unlink()
        (tmp_path / "1.out").symlink_to(tmp_path / "secret")
        assert ada.log("1").text == ""


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


def test_explain_tells_configurations_and_prices(api):
    with api.client("ada") as ada:
        told = ada.explain("1")
    assert told.round == 1
    assert told.text
    assert {(each.gpus, each.goodput) for each in told.configurations} >= {(1, 1.0), (2, 2.0), (4, 4.0)}
    assert told.lines


def test_events_reach_those_who_may_see_them(api):
    seen: list[tuple[str, str]] = []

    def listen() -> None:
        with api.client("bob") as bob:
            for event in bob.events():
                seen.append(event)
                return

    thread = threading.Thread(target=listen)
    thread.start()
    while not api.board.listeners:
        time.sleep(0.01)
    api.look(job("1", user="ada"), job("2", user="bob", phase=Phase.RUNNING, allocation=on("t4", t4_01=1)))
    thread.join(20)
    ((kind, text),) = seen
    assert kind == "job"
    assert '"user":"bob"' in text


def test_admins_change_policy_and_pause(api):
    with api.client("boss") as boss:
        assert boss.set_policy("fifo").name == "fifo"
        assert [each.name for each in boss.policies() if each.active] == ["fifo"]
        with pytest.raises(ApiError, match="the policies are"):
            boss.set_policy("sai")
        assert boss.pause(paused=True).paused
        assert boss.cluster().paused
        assert api.board.store.audit()[0].action == "PUT /v1/pause"


def test_too_much_is_refused(tmp_path):
    with serving(tmp_path, requests_per_s=0.01, burst=20, submissions_per_hour=1) as api:
        headers = {"Authorization": f"Bearer {api.tokens['me']}"}

        def post(body: bytes) -> httpx.Response:
            return httpx.post(
                f"{api.url}/v1/jobs", content=body, headers=headers | {"Content-Type": "application/json"}
            )

        assert post(b"x" * (3 * 1024 * 1024)).status_code == 413
        assert post(b'{"command": ["a"]}').status_code == 201
        late = post(b'{"command": ["b"]}')
        assert (late.status_code, late.json()["error"]["code"]) == (429, "too-many")
        for _ in range(20):
            late = post(b"{}")
        assert late.status_code == 429
        assert int(late.headers["Retry-After"]) > 1


def test_a_bucket_fills_again():
    """Two at once, then one every half second."""
    now_s = 0.0
    bucket = Bucket(2.0, 2, lambda: now_s)
    assert [bucket.take("ada") for _ in range(3)] == [0.0, 0.0, 0.5]
    assert bucket.take("bob") == 0.0
    now_s = 0.5
    assert [bucket.take("ada"), bucket.take("ada")] == [0.0, 0.5]


def test_a_store_that_is_away_is_a_503_and_nothing_is_acknowledged(api, monkeypatch):
    from penstock_scheduler.errors import StoreError

    def full(*arguments: object) -> None:
        raise StoreError("the disk is full")

    with api.client("ada") as ada, monkeypatch.context() as patch:
        patch.setattr("penstock_scheduler.client.RETRY_PAUSES_S", ())
        patch.setattr(api.board.store, "add_reports", full)
        with pytest.raises(ApiError, match="full") as error:
            ada.report("1", [report()])
        assert error.value.status == 503
    with api.client("ada") as ada:
        assert ada.report("1", [report()]).accepted == 1


def test_a_report_is_acknowledged_when_a_lock_on_the_store_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "BUSY_S", 0.1)
    monkeypatch.setattr("penstock_scheduler.client.RETRY_PAUSES_S", ())
    with serving(tmp_path) as api, api.client("ada") as ada:
        assert ada.report("1", [report(1)]).accepted == 1
        with closing(sqlite3.connect(tmp_path / "state" / schema.FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ApiError) as error:
                ada.report("1", [report(2)])
            assert error.value.code == "store-away"
            assert ada.job("1").state == "running", "what is in memory is answered"
            other.rollback()
        assert ada.report("1", [report(1), report(2)]).model_dump(exclude={"refused", "epoch"}) == {
            "accepted": 1,
            "duplicates": 1,
        }
        assert [each.sequence for each in api.board.store.reports("1")] == [1, 2]


def test_a_daemon_that_is_away_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock_scheduler.client.RETRY_PAUSES_S", (0.0,))
    with pytest.raises(DaemonAway, match="Running jobs keep running"):
        Client(f"unix:{tmp_path}/none").me()


def test_health_is_open_and_honest(api):
    assert httpx.get(f"{api.url}/v1/health").json()["status"] == "ok"
    with api.client("ada") as ada:
        assert ada.ready().status == "ok"
        api.board.observed_s = time.time() - 1000
        assert ada.ready().problems == ["the cluster was not observed in the last 120 s; see the daemon's log"]


def fuzz(api, examples: int) -> None:
    """No answer to any request of the document is a 500, and each is of the form that the document says."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{api.url}/v1/openapi.json")
    asked = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/events":
            continue  # it never ends

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @__import__("hypothesis").given(case=operation.as_strategy())
        def check(case):
            nonlocal asked
            asked += 1
            who = "ada" if case.path.endswith("/reports") else "boss"  # reports are their owner's alone to make
            case.headers = dict(case.headers or {}) | {"Authorization": f"Bearer {api.tokens[who]}"}
            case.query = {name: value for name, value in (case.query or {}).items() if name != "wait"}
            if asked % 2:  # no generator finds the job and the round that are there
                there = {"job": "1", "number": 1, "kind": "node", "name": "t4-01"}
                case.path_parameters = {
                    name: there.get(name, value) for name, value in (case.path_parameters or {}).items()
                }
            answer = case.call(base_url=api.url, timeout=30)
            assert answer.status_code < 500, (case.method, case.path, answer.text)

        check()
    return asked


def test_200_requests_that_nobody_thought_of(tmp_path):
    with serving(tmp_path, requests_per_s=1e6, burst=10**6) as api:
        assert fuzz(api, 12) >= 200


@pytest.mark.long
def test_10000_requests_that_nobody_thought_of(tmp_path):
    with serving(tmp_path, requests_per_s=1e6, burst=10**6) as api:
        assert fuzz(api, 800) >= 10_000
