"""The cloud has a thread of its own: the round loop never waits for an answer of EC2."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.model import BurstJob, Phase, Progress, Recall
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
