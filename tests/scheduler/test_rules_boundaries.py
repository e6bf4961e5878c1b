"""The site's rules at their boundaries: the moment at which a limit is reached, the end of a period, one drain among several."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.accounts.rules import Budget, BudgetSettings, SchedulingRules, period_bounds
from penstock_scheduler.api.messages import Drain
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import snapshot
from tests.scheduler.test_rules import NOW_S, rules, running, seen, used


@pytest.fixture
def store(tmp_path: Path):
    store = open_store(tmp_path, writer=True)
    yield store
    store.close()


def utc(*date: int) -> float:
    return datetime(*date, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("period", "now", "begin", "end"),
    [
        ("month", (2026, 1, 31, 23, 59, 59), (2026, 1, 1), (2026, 2, 1)),
        ("month", (2026, 12, 31, 12), (2026, 12, 1), (2027, 1, 1)),
        ("month", (2028, 2, 29), (2028, 2, 1), (2028, 3, 1)),
        ("week", (2026, 11, 22, 23, 59, 59), (2026, 11, 16), (2026, 11, 23)),
        ("day", (2026, 12, 31, 23), (2026, 12, 31), (2027, 1, 1)),
        ("year", (2028, 12, 31, 23), (2028, 1, 1), (2029, 1, 1)),
    ],
)
def test_the_last_moment_of_a_period_belongs_to_it(period, now, begin, end):
    assert period_bounds(period, utc(*now)) == (utc(*begin), utc(*end))


@pytest.mark.parametrize(
    ("hours", "reached"),
    [(1.99, []), (2.0, ["soft"]), (2.99, ["soft"]), (3.0, ["soft", "hard"]), (3.01, ["soft", "hard"])],
)
def test_a_limit_is_reached_when_exactly_that_much_is_used(store, hours, reached):
    told: list[tuple[str, str]] = []
    settings = BudgetSettings(accounts={"maths": Budget(soft_gpu_hours=2.0, hard_gpu_hours=3.0)})
    used(store, hours)
    (line,) = rules(store, settings, told).on(seen(running("1", account="maths"))).budgets
    assert [limit for _, limit in told] == reached
    assert (line.over_soft, line.over_hard) == ("soft" in reached, "hard" in reached)


@pytest.mark.parametrize(("usd", "allowed"), [(40.0, True), (40.01, False)])
def test_an_order_may_use_a_budget_up_and_not_a_cent_more(store, usd, allowed):
    used(store, 60.0, kind="usd")
    settings = BudgetSettings(accounts={"maths": Budget(hard_usd=100.0)})
    lines = rules(store, settings).dollars("maths", NOW_S)
    assert (max(line.used_usd for line in lines) + usd <= 100.0) is allowed
    assert rules(store, settings).dollars("arts", NOW_S) == (), "another account"


def test_budgets_come_in_the_order_of_their_accounts_the_site_first(store):
    budget = Budget(hard_gpu_hours=9.0)
    settings = BudgetSettings(site=budget, per_account=budget, accounts={"zoo": budget})
    jobs = [running(str(n), account=account) for n, account in enumerate(("maths", "arts", "physics"))]
    lines = rules(store, settings).on(seen(*jobs, nodes="t4:1x8")).budgets
    assert [line.account for line in lines] == ["", "arts", "maths", "physics", "zoo"]


def drain(kind: str, name: str) -> Drain:
    return Drain(kind=kind, name=name, why="a fan", by="root", since_s=NOW_S)


def test_ending_one_drain_leaves_the_others(store):
    site = rules(store, BudgetSettings())
    for name in ("b", "a", "c"):
        site.drain(drain("node", name))
    assert site.end_drain(("node", "a"))
    assert [each.name for each in site.drains] == ["b", "c"]
    assert not site.end_drain(("node", "a")), "it has ended"
    assert not site.end_drain(("partition", "b")), "another kind of the same name"
    site.drain(drain("node", "b"))
    assert [each.name for each in site.drains] == ["c", "b"], "a second one of a node replaces the first"
    again = SchedulingRules(BudgetSettings(), LimitSettings(), store, lambda view, limit: None)
    assert [each.name for each in again.drains] == ["c", "b"], "after a restart"


def test_a_drain_covers_what_it_names_and_nothing_else(store):
    site = rules(store, BudgetSettings())
    state = snapshot("t4:2x4,a100:1x4", [], time_s=NOW_S)
    site.drain(drain("node", "t4-01"))
    assert [node.may_start for node in site.on(state).nodes] == [True, False, True]
    site.drain(drain("gpu-type", "a100"))
    assert [node.may_start for node in site.on(state).nodes] == [True, False, False]
    site.drain(drain("partition", "all"))
    assert [node.may_start for node in site.on(state).nodes] == [False, False, False]


def test_a_budget_of_dollars_alone_says_nothing_about_gpus(store):
    for budget, lines in ((Budget(hard_usd=9.0), 0), (Budget(soft_gpu_hours=9.0), 1), (Budget(hard_gpu_hours=9.0), 1)):
        settings = BudgetSettings(accounts={"maths": budget})
        assert len(rules(store, settings).on(seen(running("1", account="maths"))).budgets) == lines


@pytest.mark.parametrize(("later_s", "stops"), [(0, False), (599, False), (600, True), (6000, True)])
def test_jobs_stop_once_the_grace_is_over_and_from_then_on(store, later_s, stops):
    used(store, 4.0)
    settings = BudgetSettings(accounts={"maths": Budget(hard_gpu_hours=3.0)}, at_hard="stop", grace_s=600.0)
    site = rules(store, settings)
    first = site.on(seen(running("1", account="maths")))
    (line,) = site.on(dataclasses.replace(first, time_s=NOW_S + later_s, budgets=())).budgets
    assert line.stops is stops
