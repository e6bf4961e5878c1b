"""`[budgets] hard_usd` holds for each month and year as the provider bills it, like the caps of the cloud."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock_scheduler.accounts.rules import Budget, BudgetSettings, SchedulingRules
from penstock_scheduler.burst.deciding.choices import CloudChoice, within
from penstock_scheduler.burst.manager.book import Book
from penstock_scheduler.burst.manager.runs import BurstRun, Slot
from penstock_scheduler.model import CloudState, Offer
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.scheduler.test_rules import job, rules, seen

FEB_S = datetime(2027, 2, 1, tzinfo=UTC).timestamp()
YEAR_S = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
HOUR_S = 3600.0
OFFER = Offer("g5.xlarge", "a10g", 1, 1, 1.0)


@pytest.fixture
def store(tmp_path: Path):
    store = open_store(tmp_path, writer=True)
    yield store
    store.close()


def launch(store: SqlStore, border_s: float) -> BurstRun:
    """A run for a dollar an hour that began four hours before a border, and may cost $9."""
    begin_s = border_s - 4 * HOUR_S
    run = BurstRun(
        id="9.1-a",
        job="9",
        region="us-east-1",
        user="ada",
        account="maths",
        offer=OFFER,
        instance_type="g5.xlarge",
        market="on-demand",
        usd_per_h=1.0,
        usd=9.0,
        round=1,
        ordered_s=begin_s,
        partition="burst",
        state="running",
        slots=(Slot(node="c-0", instance="i-1", launched_s=begin_s),),
    )
    Book(store).save(run, begin_s, run.committed())
    return run


def used(site: SchedulingRules, now_s: float) -> list[float]:
    lines = site.dollars("maths", now_s)
    cloud = site.on(dataclasses.replace(seen(job("1", account="maths")), time_s=now_s, cloud=CloudState())).cloud
    assert cloud is not None
    assert cloud.budgets == lines, "a round sees what the order is checked against"
    return [line.used_usd for line in lines]


def may_go(site: SchedulingRules, usd: float, now_s: float) -> list[str]:
    """The budgets that an order for at most `usd` would break."""
    to = CloudChoice(OFFER, 0.0, usd, usd)
    return [str(line) for line in within(site.dollars("maths", now_s), {"1": ("maths", to)})]


@pytest.mark.parametrize(("period", "border_s"), [("month", FEB_S), ("year", YEAR_S)])
def test_a_run_over_the_border_counts_in_both_periods_with_its_part(store, period, border_s):
    run = launch(store, border_s)
    site = rules(store, BudgetSettings(accounts={"maths": Budget(period=period, hard_usd=10.0)}))
    assert used(site, border_s - 4 * HOUR_S) == [4.0, 5.0]
    now_s = border_s - 2 * HOUR_S
    assert used(site, now_s) == [4.0, 5.0]
    assert may_go(site, 6.8, now_s) == [], "$2 of it this month, and at most $4.97 of the next one"
    (broken,) = may_go(site, 7.0, now_s)
    assert f"next {period}" in broken
    now_s = border_s + HOUR_S
    assert used(site, now_s) == [5.0, 0.0]
    Book(store).save(
        run.model_copy(update={"state": "over"}),
        now_s,
        *run.model_copy(update={"slots": (run.slots[0].model_copy(update={"ended_s": border_s + 2 * HOUR_S}),)}).spent(
            border_s + 2 * HOUR_S
        ),
    )
    assert used(site, border_s + 2 * HOUR_S) == [2.0, 0.0]


@pytest.mark.parametrize("period", ["day", "week", "total"])
def test_other_periods_count_the_whole_commitment_since_the_ledger_is_split_by_months_only(store, period):
    launch(store, FEB_S)
    site = rules(store, BudgetSettings(site=Budget(period=period, hard_usd=10.0)))
    for now_s in (FEB_S - HOUR_S, FEB_S + HOUR_S):
        assert used(site, now_s) == [9.0]
    assert may_go(site, 1.0, FEB_S - HOUR_S) == []
    assert len(may_go(site, 1.1, FEB_S - HOUR_S)) == 1


def test_a_run_whose_record_cannot_be_read_counts_fully_in_both_months(store):
    launch(store, FEB_S)
    (row,) = store.cloud_runs()
    store.save_cloud_run(dataclasses.replace(row, record="{}"))
    site = rules(store, BudgetSettings(site=Budget(hard_usd=10.0)))
    assert used(site, FEB_S - HOUR_S) == [9.0, 9.0]
