"""The monthly cap holds for each calendar month (UTC), as the provider bills it, also where runs last over the month's end."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock_scheduler.burst.deciding.ledger import CloudBudgets
from penstock_scheduler.burst.manager.provider import Order
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import Phase, Progress
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.faulty import Faulty
from tests.cloud.other_cloud import OtherSite
from tests.cloud.test_generations import A10G

FEB_S = datetime(2027, 2, 1, tzinfo=UTC).timestamp()
HOUR_S = 3600.0
CAP_USD = 10.0


class Later(OtherSite):
    """A site whose clock is set. Its instances cost $1 an hour."""

    at_s = FEB_S - 4 * HOUR_S

    def now_s(self) -> float:
        return self.at_s + self.ahead_s


def settings(share: Path, **caps: float) -> Any:
    budget = CloudBudgets.model_validate({"site": caps, "accounts": {"physics": caps}})
    return BurstSettings(
        site=UUID(SITE), name="penstock", share=share, by_default=True, wait="no-wait", budget=budget
    ).model_copy(update={"reconcile_s": 1.0})


@pytest.fixture
def site(tmp_path: Path, store: SqlStore) -> Later:
    cloud = Faulty(SITE, [A10G], lambda: FEB_S)
    site = Later(settings(tmp_path / "share", usd_per_month=CAP_USD), store, cloud)
    site.names |= {f"a10g-{number}": "a10g" for number in range(2, 6)}
    cloud._now_s = site.now_s
    return site


def go_to(site: Later, time_s: float) -> None:
    site.ahead_s = time_s - site.at_s
    site.ticks(10)


def orders(site: Later, job: str, usd: float) -> bool:
    """Whether the job may leave for at most `usd`. If so, it then runs there."""
    site.submit(job, runtime_s=30 * HOUR_S)
    site.tick()
    site.round += 1
    site.tick(site.order(job, usd=usd))
    (outcome,) = site.outcomes
    if outcome.progress is Progress.FAILED:
        del site.jobs[job]
        return False
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    return True


def end_all(site: Later) -> None:
    for job in [*site.jobs]:
        site.finish(job)
    site.until(lambda: not site.state.runs)


def invoices(site: Later) -> list[float]:
    """What the provider bills before February, and from then on, US dollars."""
    (cloud,) = site.providers
    assert isinstance(cloud, Faulty)
    cloud._note_ended()
    times = cloud._ended.values()
    before_s = sum(max(min(end_s, FEB_S) - begin_s, 0.0) for begin_s, end_s in times)
    after_s = sum(max(end_s - max(begin_s, FEB_S), 0.0) for begin_s, end_s in times)
    return [before_s / HOUR_S, after_s / HOUR_S]


def test_a_run_over_the_border_counts_in_both_months_with_its_part(site: Later) -> None:
    assert orders(site, "7", 9.0)
    assert not orders(site, "8", 9.5), "5 of the 9 dollars may be spent in February, and 5.5 of these"
    go_to(site, FEB_S + 60)
    assert not orders(site, "8", 9.0), "5 of the 9 dollars may still be spent in February"
    assert orders(site, "8", 4.9)
    go_to(site, FEB_S + 5 * HOUR_S)
    end_all(site)
    january, february = invoices(site)
    assert (january, february) == pytest.approx((4.0, 9.9), abs=0.2)
    assert max(january, february) <= CAP_USD
    totals = [site.store.ledger_totals("usd", since_s=since_s)["physics"] for since_s in (0.0, FEB_S)]
    assert totals == pytest.approx([january + february, february], abs=1e-6)
    used = site.store.used("account", FEB_S - 31 * 86400, FEB_S)
    assert {row.kind: row.amount for row in used} == pytest.approx(
        {"usd": january, "cloud-gpu-seconds": january * HOUR_S}, abs=1e-6
    )


def test_orders_share_both_months_while_the_first_one_lasts(site: Later) -> None:
    """Four hours of January are left, in which a run costs $4 at most. Its instances come within ten minutes."""
    assert orders(site, "7", 9.0)
    assert not orders(site, "8", 9.0), "both together may cost $10.33 in February"
    assert "next month" in site.outcomes[0].text
    assert orders(site, "8", 8.5)
    assert not orders(site, "9", 2.5), "$8 of January are committed"
    assert "this month" in site.outcomes[0].text
    assert orders(site, "9", 1.7)
    site.crash()
    assert not orders(site, "10", 0.4)
    go_to(site, FEB_S - 2.3 * HOUR_S)  # the run of job 9 is over
    go_to(site, FEB_S - 60)
    assert not orders(site, "10", 1.0)
    for hours in (4.5, 5.0):
        go_to(site, FEB_S + hours * HOUR_S)
    end_all(site)
    assert invoices(site) == pytest.approx([9.7, 9.5], abs=0.2)


def test_several_runs_over_the_border_stay_within_both_caps(site: Later) -> None:
    ordered = [orders(site, f"j{number}", 3.0) for number in range(4)]
    assert ordered == [True, True, True, False]
    go_to(site, FEB_S - 1.2 * HOUR_S)
    end_all(site)  # 3 x 2.8 hours of January
    assert orders(site, "k", 9.0)
    assert not orders(site, "l", 1.0), "$1.20 of January may go to the run of k, whatever it lasts"
    go_to(site, FEB_S + 10)
    assert [orders(site, f"k{number}", 1.0) for number in range(3)] == [True, True, False]
    site.crash()
    site.tick()
    assert not orders(site, "l", 0.5)
    go_to(site, FEB_S + 0.9 * HOUR_S)
    end_all(site)
    january, february = invoices(site)
    assert max(january, february) <= CAP_USD
    of_site = [line.used_usd for line in site.tick().budgets if not line.account]
    assert of_site == pytest.approx([february, 0.0], abs=1e-6)


def test_a_cap_that_is_lowered_within_the_month_ends_nothing_and_lets_nothing_more_start(
    site: Later, tmp_path: Path
) -> None:
    assert orders(site, "7", 9.0)
    site.settings = settings(tmp_path / "share", usd_per_month=6.0)
    site.crash()
    assert not orders(site, "8", 2.5)
    go_to(site, FEB_S + 60)
    assert site.jobs["7"].phase is Phase.RUNNING
    assert not orders(site, "8", 1.5)
    assert orders(site, "8", 0.9)


def test_an_instance_without_a_run_is_charged_to_the_months_in_which_it_ran(site: Later) -> None:
    site.tick()
    (cloud,) = site.providers
    tags = {
        "run": "9.1-a",
        "job": "9",
        "account": "physics",
        "usd_per_h": "1.0",
        "owner": site.store.control("cloud.owner"),
    }
    cloud.launch_gang(Order("9.1-a", "token", "g5.xlarge", "on-demand", ("a10g-0",), tags, 1.0))
    go_to(site, FEB_S + HOUR_S)
    site.ticks(10)
    totals = [site.store.ledger_totals("usd", since_s=since_s)["physics"] for since_s in (0.0, FEB_S)]
    january, february = invoices(site)
    assert totals == pytest.approx([january + february, february], abs=1e-6)
    assert (january, february) == pytest.approx((4.0, 1.0), abs=0.1)
