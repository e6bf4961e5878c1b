"""The API of a penstockd that stands by: what people, Prometheus and browsers get from it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.daemon.service.server import Service
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.daemon.standing_by import _Knows, standby_app
from penstock_scheduler.store.leadership.terms import Leader, Standby, Term

BROWSER = {"Accept": "text/html"}


class Asked:
    def __init__(self, waiting) -> None:
        self._app = standby_app(waiting)

    def ask(self, method: str, path: str, **headers: str) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://head2") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(asked())


@pytest.fixture
def standby():
    term = Term(4, 100, "head1")
    waiting = SimpleNamespace(
        leader=Leader(term, "0.1.0", "https://head1:7373", 300.0, 0.4),
        standbys=(Standby("head2", "0.1.0", 1.0, 60.0, 7),),
        newest_round=9,
        round=7,
        lease_s=10.0,
        trouble="",
    )
    return waiting, Asked(waiting)


def test_it_says_who_leads_since_when_and_which_stand_by(standby):
    _, client = standby
    for path, status in (("/v1/health", 200), ("/v1/ready", 503)):
        answer = client.ask("GET", path)
        assert answer.status_code == status
        leader = Health.model_validate_json(answer.content).leader
        assert leader is not None
        assert (leader.here, leader.name, leader.number, leader.address) == (False, "head1", 4, "https://head1:7373")
        assert (leader.since_age_s, leader.lease_age_s) == (300.0, 0.4)
        assert [(each.name, each.lag) for each in leader.standbys] == [("head2", 2)]


def test_prometheus_can_scrape_it_without_a_token(standby):
    """Otherwise each standby would be an instance that is down, which alerts."""
    _, client = standby
    answer = client.ask("GET", "/v1/metrics")
    assert answer.status_code == 200
    lines = answer.text.splitlines()
    assert "penstock_leader 0.0" in lines
    assert 'penstock_standby_lag_rounds{standby="head2"} 2.0' in lines
    assert not any(line.startswith("penstock_ready") for line in lines), "a standby is not expected to do the work"


def test_a_browser_is_sent_to_the_leader(standby):
    waiting, client = standby
    answer = client.ask("GET", "/queue", **BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (307, "https://head1:7373/queue")
    waiting.leader = Leader(Term(4, 100, "head1"), "0.1.0", "unix:/run/penstock/api.sock", 300.0, 0.4)
    answer = client.ask("GET", "/queue", **BROWSER)
    assert answer.status_code == 503
    assert "head1 leads" in answer.text


def test_programs_are_refused_with_the_leaders_address(standby):
    _, client = standby
    answer = client.ask("POST", "/v1/jobs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not-leader")
    assert answer.headers["penstock-leader"] == "https://head1:7373"


def test_its_api_ends_without_an_error(standby, tmp_path, monkeypatch):
    """As at each takeover."""
    waiting, _ = standby
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    service = Service(ApiSettings(socket=tmp_path / "api.sock"), standby_app(waiting), _Knows(), private=False)
    service.start()
    wait_for(lambda: (tmp_path / "api.sock").exists(), 10, "the API to serve")
    service.stop()
    assert errors == []
