"""The page of the site: its figures, and who may see it and press its buttons."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock_scheduler.api.ledger_messages import BudgetView
from penstock_scheduler.daemon.service.web.render import block
from penstock_scheduler.daemon.service.web.site import DAY_S, budget_row, columns
from penstock_scheduler.model import Stop, StopCode
from penstock_scheduler.model.records import GateRecord
from tests.scheduler.web.site import Site, made_up
from tests.scheduler.web.test_pages import first_events, get, parts


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made_up(tmp_path_factory.mktemp("site"), "t4:3x4,a100:2x8", running=12, waiting=6) as site:
        yield site


def test_only_operators_have_the_page_and_only_admins_its_buttons(site):
    assert get(site, "ada", "/site").status_code == 403
    assert get(site, None, "/site").status_code in (303, 401)
    for who in ({"Authorization": f"Bearer {site.api.tokens['ada']}"}, {}):
        with httpx.stream("GET", f"{site.api.url}/site/live", headers=who, timeout=60) as answer:  # it would not end
            assert answer.status_code == (403 if who else 401)
    assert 'href="/site"' not in get(site, "ada", "/queue").text
    operator, admin = get(site, "oz", "/site").text, get(site, "boss", "/site").text
    for order in ("PUT /v1/pause", "PUT /v1/policy"):
        assert order not in operator
        assert order in admin
    assert "POST /v1/drains" in operator  # operators may drain
    sent = {who: parts(first_events(site, who, "/site/live")[0]) for who in ("oz", "boss")}
    assert set(sent["boss"]) - set(sent["oz"]) == {"pause"}


def test_a_refused_plan_says_what_it_would_have_stopped_and_admins_may_approve_it(tmp_path: Path):
    with made_up(tmp_path, "t4:3x4", running=4, waiting=2) as site:
        stop = Stop(StopCode.DRAIN, "its node <b>is drained</b>")
        gate = GateRecord(refused=("it would stop 4 of 4 jobs",), stops={site.running[0].id: stop})
        site.api.board.record = dataclasses.replace(site.api.board.record, gate=gate)
        text = get(site, "boss", "/site").text
        assert "it would stop 4 of 4 jobs" in text
        assert "its node &lt;b&gt;is drained&lt;/b&gt;" in text
        assert "POST /v1/rounds/2/approval" in text
        assert "/approval" not in get(site, "oz", "/site").text


def test_small_amounts_of_dollars_are_not_shown_as_zero():
    text = block("site.html", "cloud", spans=[], spent_usd=0.0034, committed_usd=12.5)
    assert "$0.0034 spent" in text
    assert "up to $12.50." in text


def test_the_stream_sends_what_an_operator_changes(site):
    (event,) = first_events(site, "oz", "/site/live")
    assert "Nothing is drained by Penstock" in parts(event)["drains"]
    assert re.search(r"<strong>28</strong>GPUs", parts(event)["now"])


def test_free_gpus_count_as_waste_only_while_jobs_wait():
    found = columns(
        {
            "gpus.t4.all": [(0.0, 8.0), (60.0, 8.0), (120.0, 8.0)],
            "gpus.t4.allocated": [(0.0, 5.0), (60.0, 5.0), (120.0, 8.0)],
            "gpus.t4.unusable": [(0.0, 1.0), (60.0, 0.0), (120.0, 4.0)],
            "gpus.a100.all": [(60.0, 2.0)],
            "jobs.queued": [(0.0, 0.0), (60.0, 3.0)],
        }
    )
    assert found["time"] == [0.0, 60.0, 120.0]
    assert found["free"] == [2.0, 5.0, 0.0]  # never below 0: jobs may run on nodes where nothing starts
    assert found["waste"] == [0.0, 5.0, 0.0]
    assert found["gap"] == [None, None, None]
    assert columns({})["time"] == []


def test_figures_whose_first_sample_of_a_step_differs_stay_one_line():
    """Steps of 300 s: 0 to 299 and 300 to 599. Jobs report only from 250 s on, so `as expected` has its point there."""
    found = columns(
        {"jobs.running": [(4.0, 1.0), (304.0, 2.0)], "as-expected": [(250.0, 0.9), (304.0, 1.0)]}, step_s=300
    )
    assert found["time"] == [4.0, 304.0]
    assert found["running"] == [1.0, 2.0]
    assert found["as expected"] == [90.0, 100.0]


def test_a_budget_says_when_it_is_used_up_at_its_present_speed():
    def of(used: float, ends_s: float | None = 30 * DAY_S, since_s: float = 0.0, hard: float | None = 100.0):
        budget = BudgetView(
            account="vision", period="month", since_s=since_s, ends_s=ends_s, soft_gpu_hours=50.0, hard_gpu_hours=hard,
            used_gpu_hours=used, used_usd=0.0,
        )  # fmt: skip
        (line,) = budget_row(budget, 10 * DAY_S).lines
        return line

    assert (of(50.0).a_day, of(50.0).ends_s) == (5.0, 20 * DAY_S)
    assert of(20.0).ends_s is None  # lasts beyond the period
    assert of(20.0, ends_s=None).ends_s == 50 * DAY_S
    assert of(0.0).ends_s is None
    assert of(120.0).ends_s == 10 * DAY_S
    assert (of(50.0, hard=None).most, of(50.0, hard=None).hard) == (50.0, False)
    assert of(50.0, since_s=10 * DAY_S - 60).a_day is None  # a minute says nothing of a day
