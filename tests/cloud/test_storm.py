"""Invariants under any fault: no instance runs without a job, none is launched twice, and the ledger equals EC2's bill."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


class Killed(BaseException):
    """kill -9: the daemon cannot catch it, and loses its memory."""


def settled(site: CloudSite, ec2: Ec2) -> None:
    """End everything, and check the three invariants."""
    for job in tuple(site.jobs):
        site.finish(job)
    site.tick()
    site.until(lambda: not site.state.runs and not ec2.running(), most=100)
    site.ticks(3)
    launched = Counter(
        (tags["penstock:run"], tags["penstock:node"])
        for each in ec2.instances()
        for tags in [{tag["Key"]: tag["Value"] for tag in each["Tags"]}]
    )
    assert not ec2.running()
    assert set(launched.values()) <= {1}, "launched twice"
    assert ec2.double_launches == 0
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def storm(site: CloudSite, ec2: Ec2, seed: int, faults: int) -> None:
    """`faults` faults, one after another, on jobs that come, leave, run, are recalled and end."""
    rng = random.Random(seed)

    def refused(code: str) -> Callable[[], None]:
        return lambda: ec2.faults.append(Fault("CreateFleet", rng.choice(["error", "fleet"]), code))

    def lost(action: str) -> Callable[[], None]:
        return lambda: ec2.faults.append(
            Fault(action, rng.choice(["lost-before", "lost-after"]), times=rng.randint(1, 3))
        )

    def taken_back() -> None:
        if running := ec2.running():
            ec2.direct().terminate_instances(InstanceIds=[rng.choice(running)])

    def recalled() -> None:
        if site.away:
            site.recall(rng.choice(site.away))

    def killed() -> None:
        mortal(site, rng.randint(0, 3), before=rng.random() < 0.5)

    kinds: list[Callable[[], None]] = [
        refused("InsufficientInstanceCapacity"),
        refused("RequestLimitExceeded"),
        refused("VcpuLimitExceeded"),
        lost("CreateFleet"),
        lost("TerminateInstances"),
        lost("DescribeInstances"),
        lambda: ec2.faults.append(Fault("DescribeInstances", "hide", times=rng.randint(1, 6))),
        taken_back,
        recalled,
        killed,
        killed,
    ]
    for number in range(faults):
        job = str(number)
        site.submit(job)
        rng.choice(kinds)()
        offers = [offer for offer in site.state.offers if offer.nodes == 1]
        try:
            site.send(job, rng.choice(offers).id if offers else "g5.xlarge", usd=5.0)
            site.ticks(rng.randint(0, 6))
        except Killed:
            site.crash()
        for each in tuple(site.jobs):
            if rng.random() < 0.4:
                site.finish(each)
        if rng.random() < 0.3:
            site.sleep(3700)
    ec2.faults.clear()
    site.crash()
    settled(site, ec2)


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


def test_a_storm_of_12_faults(site: CloudSite, ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_cloud.regions.APPEARS_S", 10.0)
    storm(site, ec2, seed=20, faults=12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_storms_of_200_faults(site: CloudSite, ec2: Ec2, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_cloud.regions.APPEARS_S", 10.0)
    storm(site, ec2, seed=seed, faults=200)
