"""The cloud has a thread of its own: the round loop never waits for an answer of EC2."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.model import BurstJob, CloudAction, CloudState, Phase, Progress, Recall
from penstock_scheduler.store import SqlStore
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


@pytest.fixture
def site(cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2, site: CloudSite) -> CloudSite:
    return CloudSite(cloud_settings(), store, ec2, ec2.through, background=True)


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
    assert asked(ec2, "CreateFleet") == 1
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


def test_a_thread_that_fails_says_so_and_goes_on(site: CloudSite, ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    site.really_until(lambda: site.state.offers, "there are offers")
    with monkeypatch.context() as patched:
        patched.setattr("penstock_scheduler.burst_manager.instances.Instances.sweep", lambda *_: 1 / 0)
        site.really_until(lambda: "division by zero" in " ".join(site.state.closed), "it is told")
    site.really_until(lambda: not site.state.closed, "it goes on")
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "lost-after"))
    site.tick(BurstJob("7", 1, "g5.xlarge", 5.0))
    site.really_until(lambda: site.jobs["7"].phase is Phase.RUNNING, "it runs")
    assert len(ec2.instances()) == 1
