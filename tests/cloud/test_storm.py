"""Invariants under any fault: no instance runs without a job, none is launched twice, and the ledger equals EC2's bill."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_cloud.ec2 import connect
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite, there


class Killed(BaseException):
    """kill -9: the daemon cannot catch it, and loses its memory."""


def settled(site: CloudSite, ec2: Ec2, strangers: int = 0) -> None:
    """End everything of a site, and check the invariants. `strangers`: instances that belong to others and run on."""
    for job in tuple(site.jobs):
        site.finish(job)
    site.tick()
    site.until(lambda: not site.state.runs and len(ec2.running()) == strangers, most=100)
    site.ticks(3)
    tags_of = {
        each["InstanceId"]: {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])} for each in ec2.instances()
    }
    launched = Counter((tags["penstock:run"], tags["penstock:node"]) for tags in tags_of.values() if site.owns(tags))
    assert len(ec2.running()) == strangers
    assert set(launched.values()) <= {1}, "launched twice"
    assert ec2.double_launches == 0
    assert all(site.owns(tags_of[each]) for each in site.ended), "a stranger's instance was ended"
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


class Storm:
    """Random faults of EC2 and of the daemons, on jobs of one or more sites in one account."""

    def __init__(self, sites: list[CloudSite], ec2: Ec2, seed: int) -> None:
        self.sites, self.ec2, self.rng = sites, ec2, random.Random(seed)
        self.site = sites[0]
        self.kinds: list[Callable[[], None]] = [
            lambda: self.refused("InsufficientInstanceCapacity"),
            lambda: self.refused("RequestLimitExceeded"),
            lambda: self.refused("VcpuLimitExceeded"),
            lambda: self.refused("RequestExpired"),
            lambda: self.lost("CreateFleet"),
            lambda: self.lost("TerminateInstances"),
            lambda: self.lost("DescribeInstances"),
            lambda: self.fault("DescribeInstances", "hide", times=self.rng.randint(1, 6)),
            lambda: self.fault("TerminateInstances", "error", "UnauthorizedOperation", times=self.rng.randint(1, 3)),
            self.taken_back,
            self.stripped,
            self.recalled,
            self.killed,
            self.killed,
        ]

    def fault(self, action: str, kind: str, code: str = "", times: int = 1) -> None:
        self.ec2.faults.append(Fault(action, kind, code, times=times))

    def refused(self, code: str) -> None:
        self.fault("CreateFleet", self.rng.choice(["error", "fleet"]), code)

    def lost(self, action: str) -> None:
        self.fault(action, self.rng.choice(["lost-before", "lost-after"]), times=self.rng.randint(1, 3))

    def mine(self) -> list[str]:
        """Instances of the present site's open runs that run."""
        rows = [BurstRun.model_validate_json(row.record) for row in self.site.store.cloud_runs()]
        known = {slot.instance for run in rows for slot in run.slots}
        return [each for each in self.ec2.running() if each in known]

    def taken_back(self) -> None:
        if mine := self.mine():
            one = self.rng.choice(mine)
            self.ec2.client_of(one).terminate_instances(InstanceIds=[one])

    def stripped(self) -> None:
        if mine := self.mine():
            one = self.rng.choice(mine)
            self.ec2.client_of(one).delete_tags(Resources=[one], Tags=[{"Key": "penstock:site"}])

    def recalled(self) -> None:
        if self.site.away:
            self.site.recall(self.rng.choice(self.site.away))

    def killed(self) -> None:
        mortal(self.site, self.rng.randint(0, 3), before=self.rng.random() < 0.5)

    def rage(self, faults: range) -> None:
        """Faults of these numbers, one after another, on jobs that come, leave, run, are recalled and end."""
        rng = self.rng
        for number in faults:
            self.site = site = rng.choice(self.sites)
            job = str(number)
            site.submit(job)
            try:
                rng.choice(self.kinds)()
                offers = [offer for offer in site.state.offers if offer.nodes == 1]
                site.send(job, rng.choice(offers).id if offers else "g5.xlarge", usd=5.0)
                site.ticks(rng.randint(0, 6))
            except Killed:
                site.crash()
            for each in tuple(site.jobs):
                if rng.random() < 0.4:
                    site.finish(each)
            if rng.random() < 0.3:
                for other in self.sites:
                    other.sleep(3700)
            if rng.random() < 0.5:
                site.watch = None
                site.cloud.end_protection()  # an admin has read the notice
        self.ec2.faults.clear()
        for site in self.sites:
            site.crash()


def mortal(site: CloudSite, steps: int, *, before: bool) -> list[str]:
    """Kill the daemon before or after its `steps`-th lasting step from now on (0: the first). Returns the names of its steps."""
    taken: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            mine = len(taken) == steps
            taken.append(name)
            if mine and before:
                raise Killed(name)
            try:
                return real(*arguments, **named)
            finally:
                if mine:
                    raise Killed(name)

        return step

    site.watch = watched
    return taken


def life(site: CloudSite, job: str, offer: str) -> None:
    """A job bursts, runs, and ends."""
    site.submit(job)
    site.send(job, offer, 10.0)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    site.ticks(2)
    site.finish(job)
    site.tick()
    site.until(lambda: not site.state.runs)


def die_at_every_step(site: CloudSite, ec2: Ec2, offer: str, nodes: int, *, twice: bool) -> set[str]:
    """Kill the daemon at every lasting step: each write to the store, each order to EC2 and to Slurm.

    `twice`: both before and after each step. The state before a step equals that after the previous one, so only the first step
    needs it. Returns the names of the steps.
    """
    deaths: Counter[str] = Counter()
    for steps in range(100):
        for before in (True, False) if twice or steps == 0 else (False,):
            site.crash()
            ec2.forget()
            job = f"{steps}{before}"
            taken = mortal(site, steps, before=before)
            try:
                life(site, job, offer)
            except Killed as step:
                deaths[str(step)] += 1
                site.crash()
                if job in site.jobs:
                    run_before = {line.key for line in site.store.cloud_ledger()}
                    site.tick()
                    if not site.state.runs and not any(key.startswith(f"cloud:{job}.1-") for key in run_before):
                        site.send(job, offer, 10.0)  # it died before anything was written: the next round orders
                    site.until(lambda job=job: job not in site.jobs or site.jobs[job].phase is Phase.RUNNING)
                    site.ticks(2)
                    site.finish(job)
                site.tick()
                site.until(lambda: not site.state.runs)
            else:
                assert steps > 7, "a run has more steps than that"
                assert len(taken) <= steps
                settled(site, ec2)
                assert len(ec2.instances()) == nodes * (sum(deaths.values()) + 1), "one instance for each node of a run"
                return set(deaths)
    raise AssertionError("a run never ended")


STEPS = {"save_cloud_run", "create_fleet", "terminate_instances", "power_down"}


@pytest.mark.parametrize(
    ("offer", "nodes", "twice"),
    [
        ("g5.xlarge", 1, False),
        pytest.param("g5.xlarge", 1, True, marks=pytest.mark.long),
        pytest.param("2x g5.xlarge", 2, True, marks=pytest.mark.long),
    ],
)
def test_kill_9_at_every_step_of_a_run_and_after_restart_the_same_result(
    site: CloudSite, ec2: Ec2, offer: str, nodes: int, twice: bool
) -> None:
    assert die_at_every_step(site, ec2, offer, nodes, twice=twice) >= STEPS


@pytest.fixture
def sites(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2, tmp_path: Path
) -> Iterator[list[CloudSite]]:
    """Two sites of one name in one account, each in two regions."""
    regions = {"eu-west-1": there(ec2, "eu-west-1")}
    mine = cloud_settings(regions=regions)
    others = cloud_settings(
        site="5e1f0000-0000-4000-8000-000000000002", share=tmp_path / "other-share", regions=regions
    )
    ec2.through = ec2.through or connect(mine)
    other = open_store(tmp_path / "other", writer=True)
    yield [CloudSite(mine, store, ec2, ec2.through), CloudSite(others, other, ec2, ec2.through)]
    other.close()


def told(sites: list[CloudSite], ec2: Ec2, number: int) -> None:
    bills = ", ".join("{:.4f} of {:.4f}".format(*site.bill()) for site in sites)
    seen = f"{len(ec2.instances()) - 1} instances, {len(ec2.calls)} calls to EC2, US dollars in the ledgers: {bills}"
    print(f"{time.strftime('%H:%M:%S')} settled after the faults from {number}: {seen}", flush=True)


def storm_over(sites: list[CloudSite], ec2: Ec2, seed: int, faults: int, least: int) -> None:
    """A storm over these sites, beside an instance of nobody's. Each site has ended what it launched, and only that.

    The storm calms down after each hundred faults, and that is checked: a storm that is stopped has shown something, too.

    Args:
        least: more instances than that were launched and ended.
    """
    ec2.direct().run_instances(ImageId=sites[0].settings.image, MinCount=1, MaxCount=1)
    storm = Storm(sites, ec2, seed)
    for number in range(0, faults, 100):
        storm.rage(range(number, min(number + 100, faults)))
        for site in sites:
            for job in tuple(site.jobs):
                site.finish(job)
            site.tick()
            site.until(lambda site=site: not site.state.runs, most=100)
        for site in sites:
            settled(site, ec2, strangers=1)
        told(sites, ec2, number)
    assert sum(len(site.ended) for site in sites) > least, "instances were launched and ended"
    assert len({each["Placement"]["AvailabilityZone"][:-1] for each in ec2.instances()}) == 2, "in both regions"


@pytest.mark.long
def test_a_storm_of_50_faults_over_two_sites_in_two_regions_of_one_account(
    sites: list[CloudSite], ec2: Ec2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_scheduler.burst.manager.places.APPEARS_S", 10.0)
    storm_over(sites, ec2, seed=20, faults=50, least=1)


@pytest.mark.long
def test_a_storm_of_1000_faults(sites: list[CloudSite], ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_scheduler.burst.manager.places.APPEARS_S", 10.0)
    storm_over(sites, ec2, seed=25, faults=1000, least=100)
