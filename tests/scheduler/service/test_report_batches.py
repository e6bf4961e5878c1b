"""Reports that penstock-api hands to penstockd in batches."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from penstock_scheduler.api.access_messages import Identity
from penstock_scheduler.api.messages import ReportBatch
from penstock_scheduler.daemon.service import report_batches
from tests.scheduler.service.api import OBSERVED, serving

OBSERVED_REPORT = {"job_id": "1", "epoch": 1, "time_s": 1.0, "body": OBSERVED}


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path, separate=True) as api:
        yield api


def post(api, who: str, job: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    headers = {"Authorization": f"Bearer {api.tokens[who]}", "Content-Type": kind}
    return httpx.post(f"{api.url}/v1/jobs/{job}/reports", content=body, headers=headers, timeout=60)


def batch(sequence: int) -> bytes:
    """One report of job 1."""
    return ReportBatch(reports=[OBSERVED_REPORT | {"sequence": sequence}]).model_dump_json().encode()


def test_reports_that_come_together_go_to_penstockd_together(api, monkeypatch):
    """Each has its own answer: the good, the wrong, and those of others' jobs. The good are on disk by then."""
    sizes, read = [], report_batches.read

    def counted(model, text):
        found = read(model, text)
        sizes.append(len(found.requests))
        time.sleep(0.2)  # so that more come meanwhile
        return found

    monkeypatch.setattr(report_batches, "read", counted)  # in this process, which is penstockd
    wrong = [("ada", "1", b'{"reports": []}'), ("ada", "1", b"{"), ("ada", "1", b"\xff")]
    wrong += [("bob", "1", batch(99)), ("job 2", "1", batch(99))]
    good = [("ada" if n % 2 else "job 1", "1", batch(n)) for n in range(40)]
    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(lambda each: post(api, *each), [*good[:20], *wrong, *good[20:]]))
    assert [each.status_code for each in told] == [200] * 20 + [422, 422, 400, 404, 404] + [200] * 20
    assert told[20].json()["error"]["message"].startswith("body.reports: List should have at least 1 item")
    assert {each.json()["accepted"] for each in told if each.status_code == 200} == {1}
    assert sorted(each.sequence for each in api.board.store.reports("1")) == list(range(40))
    assert max(sizes) > 1
    assert sum(sizes) == 44, "and the one that is no text goes alone"
    assert "HTTP" not in api.process.log, "what clients send makes no lines"
    line = api.board.store.audit()[0]
    assert (line.action, line.target, line.allowed) == ("POST /v1/jobs/{job}/reports", "jobs/1/reports", False)
    assert (line.user, line.address) == ("bob", "127.0.0.1")
    requests = api.app.state.api.known.counters["requests"]
    assert post(api, "ada", "1", batch(50), "text/plain").status_code == 422, "as it has been"
    assert post(api, "ada", "1", batch(41)).json()["accepted"] == 1
    assert api.app.state.api.known.counters["requests"] == requests + 2


def test_a_penstockd_of_the_release_before_gets_reports_one_by_one(api, monkeypatch):
    monkeypatch.setattr(report_batches, "PATH", "/v1/not-there")  # of this process, which is penstockd
    assert post(api, "ada", "1", batch(1)).json()["accepted"] == 1
    assert post(api, "bob", "1", batch(2)).status_code == 404


def test_batches_are_taken_on_the_private_socket_alone(api, tmp_path):
    """There, a caller comes with each request; so nobody else may send one."""
    ada = Identity(user="ada", uid=1, role="user", by="token")
    one = report_batches.Forwarded(identity=ada, job="1", body=batch(1).decode())
    forged = report_batches.Batch(requests=(one,)).model_dump_json()
    with serving(tmp_path / "embedded") as embedded:
        for each in (api, embedded):
            headers = {"Authorization": f"Bearer {each.tokens['boss']}", "Content-Type": "application/json"}
            told = httpx.post(f"{each.url}{report_batches.PATH}", content=forged, headers=headers, timeout=60)
            assert told.status_code == 404
            assert not list(each.board.store.reports("1"))
