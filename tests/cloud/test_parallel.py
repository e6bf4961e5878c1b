"""Orders, ends and notices do not wait for one another, and no deadline begins before its instance exists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from uuid import UUID

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.deciding.ledger import CloudBudgets
from penstock_scheduler.burst.manager.provider import Kind, Machine, Order
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.faulty import Faulty, SimulatedFault
from tests.cloud.other_cloud import OtherSite
from tests.cloud.slow_cloud import Slow, SlowSite

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # killed threads
A10G = Machine("g5.xlarge", "on-demand", "a10g", 1, 4, 16000, 1.0)


@pytest.fixture
def burst_settings(tmp_path: Path) -> BurstSettings:
    """Settings that name no provider."""
    budget = CloudBudgets.model_validate({"site": {"usd_total": 10_000.0}})
    found = BurstSettings(
        site=UUID(SITE), name="penstock", share=tmp_path / "share", by_default=True, wait="no-wait", budget=budget
    )
    return found.model_copy(update={"reconcile_s": 1.0})


@pytest.fixture
def site(burst_settings: CloudSettings, store: SqlStore) -> Iterator[SlowSite]:
    cloud = Slow(SITE, [A10G], time.time)
    site = SlowSite(burst_settings, store, cloud)
    yield site
    cloud.kill()


def hold(cloud: Slow, *methods: str) -> None:
    """Let calls of these methods hang."""
    cloud.gates |= {method: threading.Event() for method in methods}


def run_jobs(site: SlowSite, count: int) -> None:
    site.order_jobs(count)
    site.really_until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()), "they run")
    site.ticks(2)


def test_orders_do_not_wait_for_one_another(site: SlowSite) -> None:
    hold(site.cloud_of, "launch_gang")
    site.order_jobs(12)
    site.soon(lambda: site.cloud_of.under_way["launch_gang"] == 12, "all are asked for at once")
    assert sum(line.amount for line in site.store.cloud_ledger()) == 60.0, "their money is reserved"
    site.cloud_of.gates["launch_gang"].set()
    site.really_until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()), "they run")
    assert len(site.cloud_of.running()) == 12


def test_a_notice_is_acted_on_and_an_instance_ends_while_other_calls_hang(site: SlowSite) -> None:
    run_jobs(site, 3)
    hold(site.cloud_of, "launch_gang", "list", "tidy")
    site.names |= {f"a10g-{number}": "a10g" for number in range(3, 40)}
    for number in range(3, 40):
        site.submit(str(number))
    site.tick(*(site.order(str(number)) for number in range(3, 40)))
    site.soon(lambda: site.cloud_of.under_way["list"], "a listing hangs")
    site.take_back("0")
    site.finish("1")
    site.ticks(3)
    assert site.jobs["0"].phase is Phase.QUEUED, "it was asked to leave, and has left"
    site.soon(lambda: len(site.cloud_of.running()) <= 1 + 37, "what is not needed any more has ended")
    assert site.jobs["2"].phase is Phase.RUNNING


def test_a_run_that_is_tidied_up_holds_up_no_other(site: SlowSite) -> None:
    run_jobs(site, 4)
    hold(site.cloud_of, "tidy")
    for job in tuple(site.jobs):
        site.finish(job)
    site.really_until(lambda: site.cloud_of.under_way["tidy"] == 4, "all are tidied up at once")
    site.cloud_of.gates["tidy"].set()
    site.really_until(lambda: not site.state.runs, "all are over")
    assert site.spent_usd() == pytest.approx(site.cloud_of.bill_usd(), abs=1e-6)


def test_a_daemon_that_is_killed_with_many_orders_under_way_launches_none_twice(site: SlowSite) -> None:
    hold(site.cloud_of, "launch_gang")
    site.order_jobs(6)
    site.soon(lambda: site.cloud_of.under_way["launch_gang"] == 6, "all are asked for")
    site.soon(lambda: len(site.cloud_of.running()) == 6, "and launched, and the answers are on their way")
    site.cloud_of.kill()
    site.crash()
    site.really_until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()), "they run")
    assert len(site.cloud_of.world) == 6
    for job in tuple(site.jobs):
        site.finish(job)
    site.really_until(lambda: not site.state.runs, "all are over")
    assert site.spent_usd() == pytest.approx(site.cloud_of.bill_usd(), abs=1e-6)


def test_a_cap_holds_with_orders_side_by_side(burst_settings: BurstSettings, store: SqlStore) -> None:
    budget = CloudBudgets.model_validate({"site": {"usd_total": 23.0}})
    site = SlowSite(burst_settings.model_copy(update={"budget": budget}), store, Slow(SITE, [A10G], time.time))
    site.order_jobs(12)
    site.really_until(lambda: len(site.on) == 4, "four run")
    site.ticks(3)
    assert len(site.cloud_of.world) == 4


class Queued(Faulty):
    """A provider for whose every launch the clock goes on by this many seconds."""

    takes_s = 0.0
    site: OtherSite

    def launch_gang(self, order: Order) -> Mapping[str, str]:
        self.site.sleep(self.takes_s)
        return super().launch_gang(order)


@pytest.fixture
def queued(burst_settings: BurstSettings, store: SqlStore) -> OtherSite:
    cloud = Queued(SITE, [A10G], time.time)
    site = cloud.site = OtherSite(burst_settings, store, cloud)
    cloud._now_s = site.now_s
    return site


def test_a_boot_is_timed_from_the_launch_and_not_from_the_order(queued: OtherSite) -> None:
    (cloud,) = queued.providers
    assert isinstance(cloud, Queued)
    cloud.takes_s = queued.settings.boot_timeout_s + 100
    queued.submit("7")
    queued.send("7")
    queued.until(lambda: queued.jobs["7"].phase is Phase.RUNNING, most=5)
    assert queued.state.words == {}


def test_a_throttled_order_that_waited_for_others_is_repeated(queued: OtherSite) -> None:
    (cloud,) = queued.providers
    assert isinstance(cloud, Queued)
    for job in ("7", "8"):
        queued.submit(job)
    queued.tick()
    cloud.takes_s = 400.0
    queued.round += 1
    queued.tick(queued.order("7"), queued.order("8"))
    cloud.faults.append(SimulatedFault("launch_gang", Kind.CAPACITY))
    cloud.faults.append(SimulatedFault("launch_gang", Kind.THROTTLED))
    queued.tick()
    cloud.takes_s = 0.0
    queued.sleep(60)
    queued.until(lambda: queued.jobs["8"].phase is Phase.RUNNING, most=5)


@pytest.mark.long
def test_200_nodes_where_a_call_takes_four_seconds(site: SlowSite) -> None:
    """Ordered in a minute, ended in half of one, and a notice is acted on within five seconds meanwhile. Prints the figures."""
    cloud, count = site.cloud_of, 200

    def seconds(condition: Callable[[], object]) -> float:
        since_s = time.monotonic()
        while not condition():
            assert time.monotonic() - since_s < 1500
            site.tick()
            site.ahead_s -= 2.0
            time.sleep(0.5)
        return time.monotonic() - since_s

    site.names = {f"a10g-{number}": "a10g" for number in range(count + 1)}
    run_jobs(site, 1)
    site.names = {f"a10g-{number}": "a10g" for number in range(count + 1)}
    seconds(lambda: sum(offer.count for offer in site.state.offers) >= count)
    cloud.call_s = 4.0
    jobs = [f"j{number}" for number in range(count)]
    for job in jobs:
        site.submit(job)
    site.round += 1
    site.tick(*(site.order(job) for job in jobs))
    ordered_s = -time.monotonic()
    seconds(lambda: cloud.under_way["launch_gang"])
    site.take_back("0")
    notice_s = seconds(lambda: site.jobs["0"].phase is Phase.QUEUED)
    launched = seconds(lambda: len(cloud.running()) >= count)
    ordered_s += time.monotonic()
    runs_s = seconds(lambda: all(site.jobs[job].phase is Phase.RUNNING for job in jobs))
    told = site.state.words
    for job in jobs:
        site.finish(job)
    ended_s = seconds(lambda: not cloud.running())
    over_s = ended_s + seconds(lambda: not site.state.runs)
    print(
        f"notice {notice_s:.1f} s; {count} launched after {ordered_s:.1f} s, all run {runs_s:.1f} s later ({launched:.0f})"
    )
    print(f"{count} ended after {ended_s:.1f} s, over after {over_s:.1f} s; told: {set(told.values())}")
    assert len(cloud.world) == count + 1
    assert not told or set(told) == {"0"}
    assert ordered_s <= 60.0
    assert ended_s <= 30.0
    assert notice_s <= 5.0
