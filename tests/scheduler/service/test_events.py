"""Server-sent events: a snapshot, then changes, without a gap and without a double also over a restart of the API."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.client import Client, DaemonAway
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.daemon.service import stream
from penstock_scheduler.model import Phase
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ADAS, BOBS, serving


@pytest.fixture(params=[False, True], ids=["embedded", "separate"])
def api(request, tmp_path):
    with serving(tmp_path, separate=request.param, requests_per_s=1e6, burst=10**6) as api:
        yield api


@dataclass
class Listener:
    """A client that goes on after its last event whenever the stream ends."""

    url: str
    token: str
    seen: list[tuple[str, str, float]] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    done: bool = False

    def __enter__(self) -> Listener:
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        wait_for(lambda: self.seen, 120, "the snapshot")
        return self

    def __exit__(self, *_: object) -> None:
        self.done = True

    def _listen(self) -> None:
        after = None
        while not self.done:
            with Client(self.url, token=self.token) as line:
                try:
                    for kind, text in line.events(after):
                        self.seen.append((kind, text, time.monotonic()))
                        after = line.last_event
                        self.ids.append(after)
                        if self.done:
                            return
                except DaemonAway:
                    time.sleep(0.1)

    def jobs(self, name: str) -> list[JobView]:
        views = [JobView.model_validate_json(text) for kind, text, _ in self.seen if kind == "job"]
        return [view for view in views if view.id == name]


def running(gpus: int):
    return job("2", user="bob", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_01=gpus))


def test_a_snapshot_comes_first_and_an_operator_sees_all(api):
    with Listener(api.url, api.tokens["oz"]) as oz, Listener(api.url, api.tokens["ada"]) as ada:
        for listener, ids in ((oz, {"1", "2"}), (ada, {"1"})):
            kind, text, _ = listener.seen[0]
            assert kind == "snapshot"
            assert {each["id"] for each in json.loads(text)["jobs"]} == ids
            assert json.loads(text)["last"] is True
        api.look(ADAS, running(1))
        wait_for(lambda: oz.jobs("2"), 120, "the change")
        assert not ada.jobs("2")


def test_a_large_snapshot_comes_in_parts(api, monkeypatch):
    monkeypatch.setattr(stream, "PAGE", 10)
    api.look(ADAS, BOBS, *(job(str(number), user="bob") for number in range(100, 135)))
    with Listener(api.url, api.tokens["bob"]) as bob:
        wait_for(lambda: bob.ids[-1:] not in ([], [None]), 120, "the whole snapshot")
        parts = [json.loads(text) for kind, text, _ in bob.seen if kind == "snapshot"]
        assert sorted(each["id"] for part in parts for each in part["jobs"]) == sorted(
            ["2", *(str(number) for number in range(100, 135))]
        )
        assert [part["last"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_job_has_at_most_one_event_a_second_and_its_newest_state_in_the_end(api):
    with Listener(api.url, api.tokens["bob"]) as bob:
        begun_s = time.monotonic()
        for step in range(12):
            api.board.observed(type(api.board.state)(api.board.state.nodes, (ADAS, running(1 + step % 2))), time.time())
            api.publisher.publish()
            time.sleep(0.1)
        last = api.board.live_job("2").version
        wait_for(lambda: [each.version for each in bob.jobs("2")][-1:] == [last], 120, "the newest version")
        times = [at for kind, text, at in bob.seen if kind == "job"]
        assert all(at - begun_s >= 0.8 * number * stream.EACH_S for number, at in enumerate(times))
        versions = [each.version for each in bob.jobs("2")]
        assert versions == sorted(set(versions)), "no double"


def test_a_client_goes_on_after_its_last_event(api):
    with Listener(api.url, api.tokens["bob"]) as bob:
        api.look(ADAS, running(1))
        wait_for(lambda: bob.jobs("2"), 120, "the change")
        after = bob.ids[-1]
    api.look(ADAS, running(2))
    api.look(ADAS, running(3))
    api.look(ADAS, finished={"2": Fate("COMPLETED", 0, 5.0)})
    with api.client("bob") as line:
        kind, text = next(line.events(after))
        assert (kind, JobView.model_validate_json(text).ended) == ("job", "COMPLETED"), (
            "missed jobs come once, as they are"
        )
        again, resumed = line.last_event, line.events(line.last_event)
        api.look(ADAS, job("5", user="bob"))
        kind, text = next(resumed)
        assert (kind, JobView.model_validate_json(text).id) == ("job", "5"), "and not again"
        assert again != line.last_event


@pytest.mark.parametrize("given", ["x", "1", "99999999.0", "-1.-1", "1.2.3", "\u0661.\u0661".encode().decode("latin1")])
def test_an_id_of_somewhere_else_gives_a_snapshot(api, given):
    headers = {"Authorization": f"Bearer {api.tokens['bob']}", "Last-Event-ID": given.encode("latin1")}
    with httpx.stream("GET", f"{api.url}/v1/events", headers=headers, timeout=30) as answer:
        lines = answer.iter_lines()
        assert "event: snapshot" in [next(lines) for _ in range(5)]


def test_events_survive_a_restart_of_the_api(tmp_path):
    """No gap and no double, although the API is killed between two changes."""
    with serving(tmp_path, separate=True, requests_per_s=1e6, burst=10**6) as api:
        with Listener(api.url, api.tokens["bob"]) as bob:
            for step in range(4):
                api.board.observed(type(api.board.state)(api.board.state.nodes, (ADAS, running(step + 1))), time.time())
                api.publisher.publish()
                if step % 2:
                    api.process.kill()
                    api.process.start()
                last = api.board.live_job("2").version
                wait_for(lambda last=last: last in [each.version for each in bob.jobs("2")], 120, "the change")
            versions = [each.version for each in bob.jobs("2")]
            assert versions == sorted(set(versions))
            assert len(versions) == 4
            assert [kind for kind, _, _ in bob.seen].count("snapshot") == 1
        api.look(ADAS, BOBS)
