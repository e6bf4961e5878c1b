"""The queue in the store: who waits since when and why, and what the API shows of it."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator

import pytest

from penstock_scheduler.api.estimate_messages import Estimates, NewJobs, TimeRange
from penstock_scheduler.daemon.service.waits import WaitLog, numbered
from penstock_scheduler.model import ClusterState, Phase, PlainJob, Plan, Reason, ReasonCode, Refusal, WaitingJob
from penstock_scheduler.model.plan import Assignment
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import serving

NODES = snapshot("t4:2x4", []).nodes
TWO = on("t4", t4_00=2)
FULL = Reason(ReasonCode.WAITING_CAPACITY, "others have the GPUs", "2 GPUs", 5000.0)
RUNS = job("1", phase=Phase.RUNNING, allocation=TWO)


@pytest.fixture
def store(tmp_path) -> Iterator[SqlStore]:
    opened = open_store(tmp_path / "state", writer=True)
    yield opened
    opened.close()


def decided(log: WaitLog, waiting: dict[str, Reason], starting: tuple[str, ...] = ()) -> None:
    given = {name: Assignment(TWO, Reason(ReasonCode.CHOSEN, "it fits"), 1.0) for name in starting}
    log.decided(RoundRecord(snapshot(NODES, []), make_policy("fifo")[1], Plan(1, given, waiting)))


def look(log: WaitLog, now_s: float, *jobs, waiting=(), refused=()) -> None:
    log.observed(ClusterState(NODES, jobs, tuple(refused), waiting=tuple(waiting)), now_s)


def queue(store: SqlStore) -> list[tuple[str, str, float]]:
    return [(each.job, each.code, each.since_s) for each in store.waits()]


def past(store: SqlStore, name: str) -> list[tuple[str, float, float | None]]:
    from penstock_scheduler.store import tables as t

    with store.read() as db:
        rows = db.execute(t.waits.select().where(t.waits.c.job == name).order_by(t.waits.c.since_s))
        return [(row.code, row.since_s, row.to_s) for row in rows]


def test_each_reason_has_its_time(store):
    log = WaitLog(store)
    look(log, 10.0, job("1"))
    decided(log, {"1": FULL})
    look(log, 20.0, job("1"))
    look(log, 30.0, job("1"))
    assert queue(store) == [("1", "waiting-capacity", 20.0)]
    (entry,) = store.waits()
    assert (entry.text, entry.needs, entry.estimated_start_s) == ("others have the GPUs", "2 GPUs", 5000.0)
    decided(log, {}, ("1",))
    look(log, 40.0, dataclasses.replace(job("1"), phase=Phase.STARTING, allocation=TWO))
    look(log, 50.0, RUNS)
    assert queue(store) == []
    assert past(store, "1") == [("new", 10.0, 20.0), ("waiting-capacity", 20.0, 40.0), ("chosen", 40.0, 50.0)]


def test_another_sentence_for_the_same_reason_is_no_new_time(store):
    log = WaitLog(store)
    decided(log, {"1": FULL})
    look(log, 10.0, job("1"))
    decided(log, {"1": dataclasses.replace(FULL, text="3 GPUs are missing", estimated_start_s=None)})
    look(log, 20.0, job("1"))
    (entry,) = store.waits()
    assert (entry.since_s, entry.text, entry.estimated_start_s) == (10.0, "3 GPUs are missing", None)


def test_penstockd_starts_again_without_double_or_open_entries(store):
    decided(log := WaitLog(store), {"1": FULL, "2": FULL})
    look(log, 10.0, job("1"), job("2"))
    log = WaitLog(store)
    decided(log, {"1": FULL})
    look(log, 99.0, job("1"), job("2", phase=Phase.RUNNING, allocation=TWO))
    assert queue(store) == [("1", "waiting-capacity", 10.0)]
    assert past(store, "2") == [("waiting-capacity", 10.0, 99.0)]


def test_held_and_refused_jobs_are_in_the_queue(store):
    log = WaitLog(store)
    held = WaitingJob(job("2"), "held", "is held by ada; release it")
    look(log, 10.0, job("1"), waiting=[held], refused=[Refusal("3", "name", "bob", "its job spec is wrong")])
    look(log, 20.0, job("1"), waiting=[held], refused=[Refusal("3", "name", "bob", "its job spec is wrong")])
    assert {(each.job, each.user, each.code, each.since_s) for each in store.waits()} == {
        ("1", "ada", "new", 10.0),
        ("2", "ada", "held", 10.0),
        ("3", "bob", "refused", 10.0),
    }
    look(log, 30.0, job("2"))
    assert queue(store) == [("2", "new", 30.0)]


PLAIN = PlainJob(
    "5", "prep", "eve", "lab", ("gpu",), 5.0, "2 GPUs", "Penstock makes room for it from 14:05:00 on", 99.0
)


def test_plain_jobs_that_wait_are_in_the_queue_until_they_start(store):
    log = WaitLog(store)
    decided(log, {"1": FULL})
    log.observed(ClusterState(NODES, (job("1"),), plain=(PLAIN,)), 10.0)
    plain = next(each for each in numbered(store.waits()) if each.job == "5")
    assert (plain.position, plain.name, plain.user, plain.account, plain.partition) == (2, "prep", "eve", "lab", "gpu")
    assert (plain.submit_s, plain.since_s, plain.code, plain.needs) == (5.0, 10.0, "plain", "2 GPUs")
    assert (plain.text, plain.estimated_start_s) == (PLAIN.text, 99.0)
    log.observed(ClusterState(NODES, (job("1"),)), 20.0)
    assert [each.job for each in store.waits()] == ["1"]
    assert past(store, "5") == [("plain", 10.0, 20.0)]


def test_the_command_lists_plain_jobs_that_wait(tmp_path):
    with serving(tmp_path) as api:
        WaitLog(api.board.store).observed(ClusterState(NODES, (), plain=(PLAIN,)), time.time())
        shown = penstock(api, "list", "--waiting").output
        assert "No jobs are waiting" not in shown
        assert re.search(r"^1 +5 +prep +eve .* Penstock makes room for it", shown, re.MULTILINE)


def test_nothing_is_written_while_nothing_changes(store, monkeypatch):
    log = WaitLog(store)
    decided(log, {"1": FULL})
    look(log, 10.0, job("1"))
    written: list[object] = []
    monkeypatch.setattr(store, "save_waits", lambda entries, over: written.append([*entries, *over]))
    look(log, 11.0, job("1"))
    assert written == [[]]


# --- the API


@pytest.fixture
def api(tmp_path) -> Iterator:
    with serving(tmp_path) as api:
        fill(api)
        yield api


def fill(api) -> None:
    log = WaitLog(api.board.store)
    decided(log, dict.fromkeys(("10", "11", "12"), FULL))
    users = {"10": "bob", "11": "ada", "12": "bob"}
    jobs = [job(name, user=user, submit_s=100.0 - int(name), partitions=("night",)) for name, user in users.items()]
    held = WaitingJob(job("13", user="ada", submit_s=1.0), "held", "is held")
    look(log, 200.0, *jobs, waiting=[held])


def test_the_queue_in_the_order_of_submission(api):
    with api.client("ada") as ada:
        found = list(ada.queue())
        assert [(each.position, each.job, each.user) for each in found] == [
            (1, "12", "bob"),
            (2, "11", "ada"),
            (3, "10", "bob"),
            (None, "13", "ada"),
        ]
        assert [each.text for each in found] == ["", "others have the GPUs", "", "is held"], "of own jobs"
        assert {each.code for each in found} == {"waiting-capacity", "held"}
        assert [each.position for each in ada.queue(user="bob")] == [1, 3]
        assert [each.job for each in ada.queue(code="held")] == ["13"]
        assert [each.job for each in ada.queue(partition="night", account="")] == ["12", "11", "10"]
        assert list(ada.queue(account="none")) == []
    with api.client("oz") as oz:
        assert next(each.text for each in oz.queue()) == "others have the GPUs"


def test_the_command_shows_a_users_place_among_all(api):
    """As squeue does: bob's jobs are before ada's. Why they wait is his to know."""
    now_s = time.time()
    new = [NewJobs(gpus=8, at_s=now_s, start=TimeRange(from_s=now_s + 700, to_s=now_s + 2300))]
    api.board.estimates = Estimates(round=1, at_s=now_s, seconds=0.1, jobs={}, new=new)
    told = penstock(api, "list", "--waiting", who="ada")
    lines = [line.split() for line in told.output.splitlines()]
    assert [line[:2] for line in lines if line[:1] and line[0] in "123"] == [["1", "12"], ["2", "11"], ["3", "10"]]
    assert told.output.count("others have the GPUs") == 1, told.output
    assert "waiting-capacity" in told.output
    assert any(line[:1] == ["13"] and "held" in line for line in lines), told.output
    assert "A job of 8 GPUs that is submitted now is expected to start in 10 to 40 minutes (80 %)." in told.output
    shown = json.loads(penstock(api, "list", "--waiting", "--json", who="ada").stdout)
    assert [each["position"] for each in shown["waiting"]] == [1, 2, 3, None]


def test_pages_of_the_queue(api):
    with api.client("ada") as ada:
        from penstock_scheduler.api.history_messages import Queue

        first = ada._ask(Queue, "GET", "/v1/queue", query={"limit": 3})
        last = ada._ask(Queue, "GET", "/v1/queue", query={"limit": 3, "after": first.next})
        assert [[each.job for each in page.entries] for page in (first, last)] == [["12", "11", "10"], ["13"]]
        assert (first.waiting, last.next) == (4, None)


def test_a_site_may_keep_the_queue_of_others_private(tmp_path):
    with serving(tmp_path, private_data=["jobs"]) as api:
        fill(api)
        with api.client("ada") as ada:
            assert [(each.position, each.job) for each in ada.queue()] == [(2, "11"), (None, "13")]
