"""The cloud has a thread of its own: the round loop never waits for an answer of EC2."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from penstock_cloud import open_cloud
from penstock_cloud.settings import CloudSettings
from penstock_loopback import wait_for
from penstock_scheduler.burst.manager.manager import BurstManager
from penstock_scheduler.burst.manager.worker import Rate, Yielding
from penstock_scheduler.model import BurstJob, CloudAction, CloudState, Phase, Progress, Recall
from penstock_scheduler.rounds.settings import DaemonSettings, Settings
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite, there

THERE = "eu-west-1"


@pytest.fixture
def settings(cloud_settings: Callable[..., CloudSettings]) -> Callable[..., CloudSettings]:
    """With an identity of its own for each test: a pass that a test has left behind must not touch the next one's instances."""
    return lambda **other: cloud_settings(site=uuid4(), **other)


@pytest.fixture
def site(settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2, site: CloudSite) -> CloudSite:
    return CloudSite(settings(), store, ec2, ec2.through, background=True)


@pytest.fixture(autouse=True)
def quiet(ec2: Ec2) -> Iterator[None]:
    """The next test begins when no pass is in progress any more: threads of clouds outlive their tests."""
    yield
    ec2.slow = None
    for gate in ec2.gates.values():
        gate.set()
    since_s, calls = time.monotonic(), len(ec2.calls)
    while time.monotonic() - since_s < 0.5:
        if len(ec2.calls) != calls:
            since_s, calls = time.monotonic(), len(ec2.calls)
        time.sleep(0.05)


def asked(ec2: Ec2, action: str) -> int:
    return sum(each == action for each, _ in ec2.calls)


def test_the_loop_ticks_orders_and_recalls_while_ec2_does_not_answer(site: CloudSite, ec2: Ec2) -> None:
    """CreateFleet of a job on two nodes hangs. All the while, another order is in the ledger at once."""
    go = threading.Event()
    for job in ("7", "8"):
        site.submit(job, max_gpus=2)
    site.really_until(lambda: len(site.state.offers) > 2, "there are offers")
    ec2.gates["CreateFleet"] = go
    site.tick(BurstJob("7", 1, "2x g5.xlarge", 10.0))
    site.really_until(lambda: asked(ec2, "CreateFleet"), "EC2 is asked")
    site.ticks(10)
    site.tick(BurstJob("8", 2, "g4dn.xlarge", 5.0), Recall("7", 2))
    assert [outcome.progress for outcome in site.outcomes] == [Progress.UNDER_WAY, Progress.UNDER_WAY]
    assert [line.amount for line in site.store.cloud_ledger()] == [10.0, 5.0]
    site.tick()
    assert site.away == ["7", "8"]
    assert not ec2.running(), "EC2 has not answered yet"
    assert asked(ec2, "CreateFleet") <= 2, "each is asked for once"
    go.set()
    site.really_until(lambda: site.jobs["8"].phase is Phase.RUNNING and site.away == ["8"], "one runs, one is back")
    assert site.jobs["7"].phase is Phase.QUEUED
    site.finish("8")
    site.really_until(lambda: not site.state.runs, "all is over")
    assert not ec2.running()
    assert ec2.double_launches == 0
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_no_tick_waits_for_a_call_however_long_each_of_them_takes(site: CloudSite, ec2: Ec2) -> None:
    """Each call to EC2 is answered only after 5 more ticks of the loop, over the whole life of a job."""
    ticks, waited, late = [0], [0], list[str]()
    tick = site.tick

    def counted(*actions: CloudAction) -> CloudState:
        ticks[0] += 1
        return tick(*actions)

    def slow(action: str) -> None:
        since, until_s = ticks[0], time.monotonic() + 60
        waited[0] += 1
        while ticks[0] < since + 5:
            if time.monotonic() > until_s:
                late.append(action)
                return
            time.sleep(0.002)

    site.tick = counted  # type: ignore[method-assign]
    ec2.slow = slow
    site.submit("7")
    site.really_until(lambda: site.state.offers, "there are offers")
    site.tick(BurstJob("7", 1, "g5.xlarge", 5.0))
    site.really_until(lambda: site.jobs["7"].phase is Phase.RUNNING, "it runs")
    site.finish("7")
    site.tick()
    site.really_until(lambda: not site.state.runs, "all is over")
    assert late == [], "a tick waited for a call, and the call for a tick"
    assert waited[0] > 10
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_a_job_that_is_submitted_and_ordered_while_ec2_lists_its_instances_leaves(site: CloudSite, ec2: Ec2) -> None:
    """The pass that lists has begun before the job was there, and must not take it for one that has ended."""
    site.really_until(lambda: site.state.offers, "there are offers")
    go = ec2.gates["DescribeInstances"] = threading.Event()
    ec2.calls.clear()
    site.sleep(120)
    site.really_until(lambda: asked(ec2, "DescribeInstances"), "EC2 is asked")
    site.submit("7")
    site.tick()
    site.tick(BurstJob("7", 1, "g5.xlarge", 5.0))
    assert site.outcomes[0].progress is Progress.UNDER_WAY
    go.set()
    site.really_until(lambda: site.jobs["7"].phase is Phase.RUNNING or not site.state.runs, "it runs")
    assert site.away == ["7"]
    assert len(ec2.running()) == 1


class Wired(CloudSite):
    """A site whose cloud is put together as penstockd does it, over two regions."""

    def open(self) -> BurstManager:
        self.watch = None
        sections = {"cloud": self.settings, "daemon": DaemonSettings(state_dir=self.settings.share.parent)}
        nothing: Any = None
        return open_cloud(Settings(sections, nothing, {}, "the test"), self, self.store, self)


def test_what_is_offered_stays_while_new_prices_are_fetched(
    settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    ec2.on_demand = {"g5.xlarge": 1.0, "g4dn.xlarge": 0.5}
    site = Wired(settings(refresh_h=1 / 60), store, ec2, object())
    site.really_until(lambda: len(site.state.offers) > 2, "there are offers")
    go, waits = threading.Event(), threading.Event()

    def slow(action: str) -> None:
        if action == "GetProducts":
            waits.set()
            go.wait(60)

    ec2.slow = slow
    site.sleep(700)
    site.really_until(waits.is_set, "prices are fetched")
    site.submit("7")
    site.tick()
    site.tick(BurstJob("7", 1, "g5.xlarge", 5.0))
    assert [each.progress for each in site.outcomes] == [Progress.UNDER_WAY]
    go.set()
    site.really_until(lambda: site.jobs["7"].phase is Phase.RUNNING, "it runs")


@pytest.mark.long
def test_no_tick_takes_a_second_while_every_call_takes_five(
    settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    """A job in each of two regions, one of them on two nodes, from their orders to a recall, an end and a crash."""
    ec2.on_demand = {"g5.xlarge": 1.0, "g4dn.xlarge": 0.5}
    regions = {THERE: there(ec2, THERE)}
    site = Wired(settings(regions=regions), store, ec2, object())
    slowest_s, waited_s = 0.0, 0.0

    def slow(action: str) -> None:
        nonlocal waited_s
        time.sleep(5.0)
        waited_s += 5.0

    def until(condition: Callable[[], object], what: str) -> None:
        def now() -> object:
            nonlocal slowest_s
            since_s = time.monotonic()
            site.tick()
            slowest_s = max(slowest_s, time.monotonic() - since_s)
            site.ahead_s -= 2.0
            time.sleep(0.1)
            return condition()

        wait_for(now, 600, what, details=lambda: f"{site.state.runs} {site.state.words} {site.state.closed}")

    ec2.slow = slow
    until(lambda: len({offer.id.split("@")[1] for offer in site.state.offers}) == 2, "both regions offer")
    for job, offer in (("7", f"2x g5.xlarge@{THERE}"), ("8", "g4dn.xlarge@us-east-1")):
        site.submit(job, max_gpus=2)
        site.tick(BurstJob(job, 1, offer, 10.0))
    until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()), "both run")
    assert {region for region, _ in site.running_in()} == {THERE, "us-east-1"}
    site.crash()
    site.recall("7")
    site.finish("8")
    until(lambda: not site.state.runs, "one is back and one has ended")
    assert not site.running_in()
    assert slowest_s < 1.0
    assert waited_s > 60.0
    print(f"slowest tick: {slowest_s:.3f} s; calls to EC2 took {waited_s:.0f} s together")
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_a_thread_that_fails_says_so_and_goes_on(site: CloudSite, ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    site.really_until(lambda: site.state.offers, "there are offers")
    with monkeypatch.context() as patched:
        patched.setattr("penstock_scheduler.burst.manager.instances.Instances.sweep", lambda *_: 1 / 0)
        site.really_until(lambda: "division by zero" in " ".join(site.state.closed), "it is told")
    site.really_until(lambda: not site.state.closed, "it goes on")
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "lost-after"))
    site.tick(BurstJob("7", 1, "g5.xlarge", 5.0))
    site.really_until(lambda: site.jobs["7"].phase is Phase.RUNNING, "it runs")
    assert len(ec2.instances()) == 1


def test_each_kind_of_call_has_a_token_bucket() -> None:
    rate = Rate(size=3.0, per_s=2.0)
    assert [rate.wait_s("create_fleet", 100.0) for _ in range(6)] == [0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
    assert rate.wait_s("terminate_instances", 100.0) == 0.0, "an end does not wait for orders"
    assert rate.wait_s("create_fleet", 101.0) == 1.0, "two tokens have come, and three calls wait for theirs"
    assert [rate.wait_s("create_fleet", 900.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], "no more than it holds"


def test_only_calls_that_change_something_take_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    test, sleep = threading.get_ident(), time.sleep

    def slept(wait_s: float) -> None:
        waits.append(wait_s) if threading.get_ident() == test else sleep(wait_s)  # other threads sleep on

    monkeypatch.setattr(time, "sleep", slept)
    lock = threading.Lock()

    def describe() -> dict[str, object]:
        elsewhere = threading.Thread(target=time.sleep, args=(0.001,))
        elsewhere.start()
        elsewhere.join()
        return {}

    client = Yielding(
        SimpleNamespace(describe_instances=describe, create_fleet=dict), lock, rate=Rate(size=1.0, per_s=0.5)
    )
    with lock:
        for _ in range(3):
            client.describe_instances()
            client.create_fleet()
    assert waits == pytest.approx([0.0, 2.0, 4.0], abs=0.1)
