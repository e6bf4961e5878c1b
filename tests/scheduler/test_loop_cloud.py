"""The loop with a cloud behind the port `Burst`: an in-memory one that keeps a ledger, and forgets every third answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.families import Families
from penstock_scheduler.api.ports import ClusterParts, SiteRules
from penstock_scheduler.burst.deciding.ledger import Caps, CloudBudgets, Entry, Used
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import (
    Action,
    BudgetLine,
    BurstJob,
    CloudAction,
    CloudRun,
    CloudState,
    Hold,
    Job,
    JobSpec,
    Offer,
    Outcome,
    Progress,
    StopCode,
)
from penstock_scheduler.rounds.loop import BACK, RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from tests.scheduler.builders import table

RATES = {"t4": {1: 1.0}, "a10g": {1: 2.0}}
OFFER = Offer("g5.xlarge@b", "a10g", 1, 1, 1.0, count=8)
CAPS = CloudBudgets(site=Caps(usd_total=70.0), per_account=Caps(usd_per_month=1000.0))


class InMemoryCloud:
    """Orders are kept, and every third answer is lost: the loop has to ask again, and must not be charged twice."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self.ledger: list[Entry] = []
        self.runs: dict[str, CloudRun] = {}
        self._asked = 0

    def observe(self, jobs: Sequence[Job]) -> CloudState:
        now_s = self._clock.now_s()
        lines = Used(self.ledger).lines(CAPS, now_s, {job.account for job in jobs}, {})
        there = {job.id for job in jobs}
        runs = tuple(run for job, run in self.runs.items() if job in there)
        return CloudState((OFFER,), runs, lines, by_default=True, margin=0.0)

    def asks(self) -> Sequence[Action]:
        return ()

    def apply(self, actions: Sequence[CloudAction]) -> tuple[Outcome, ...]:
        outcomes = []
        for action in actions:
            self._asked += 1
            if isinstance(action, BurstJob) and self._asked % 3 == 0:
                outcomes.append(Outcome(action, Progress.UNDER_WAY, "no answer"))
            elif isinstance(action, BurstJob) and action.job not in self.runs:
                now_s = self._clock.now_s()
                self.ledger.append(Entry(f"{action.job}.1", "committed", action.usd, "", now_s))
                self.runs[action.job] = CloudRun(action.job, OFFER, now_s, action.usd)
                outcomes.append(Outcome(action, Progress.DONE))
        return tuple(outcomes)


def test_jobs_leave_once_within_the_cap_and_the_rest_runs_here():
    """The length is unknown: $24 are committed to each, and $70 are enough for two. The others share one GPU in turn."""
    clock = SimulatedClock()
    spec = JobSpec(goodput_table=RATES, adaptivity="rigid")  # type: ignore[arg-type]
    jobs = [SimulatedJob(str(i), f"j{i}", spec, EstimatedJob(table(**RATES), 600.0), 0.0) for i in range(6)]
    cluster = SimulatedCluster(nodes_from_spec("t4:1x1"), jobs, clock)
    cloud, store = InMemoryCloud(clock), MemoryStore()
    policy, choice = make_policy("fifo")
    loop = RoundLoop(
        ClusterParts(cluster),
        clock,
        store,
        RoundTiming(Period(60.0), 10.0),
        policy,
        SpecModels(Families(), 30.0),
        choice,
        RoundSurroundings(cloud=cloud),
    )
    here = {job.id for job in jobs}
    for _ in range(1000):
        loop.tick()
        here = {job.id for job in jobs} - set(cloud.runs)
        if all(cluster.jobs[job].finish_s is not None for job in here):
            break
        clock.sleep(10.0)
    assert len(cloud.ledger) == len(cloud.runs) == 2
    assert sum(entry.usd for entry in cloud.ledger) <= 70
    for job in cluster.jobs.values():
        assert bool(job.runs) != (job.id in cloud.runs), "either here or there"
    last = store.rounds[-1]
    assert set(last.plan.bursts) == set(cloud.runs)


def test_an_order_goes_by_the_budget_as_it_is_then_not_as_the_round_saw_it():
    """The round may send two for $24 each. The site's $30 pay for one; then 5 s later, without a round, for the other."""
    clock = SimulatedClock()
    spec = JobSpec(goodput_table=RATES, adaptivity="rigid")  # type: ignore[arg-type]
    jobs = [SimulatedJob(str(i), f"j{i}", spec, EstimatedJob(table(**RATES), 600.0), 0.0) for i in range(3)]
    cluster = SimulatedCluster(nodes_from_spec("t4:1x1"), jobs, clock)
    cloud, store, limit_usd = InMemoryCloud(clock), MemoryStore(), 30.0
    policy, choice = make_policy("fifo")

    class Budgeted(SiteRules):
        def dollars(self, account: str, now_s: float) -> list[BudgetLine]:
            return [BudgetLine("", "total", limit_usd, sum(entry.usd for entry in cloud.ledger))]

    loop = RoundLoop(
        ClusterParts(cluster),
        clock,
        store,
        RoundTiming(Period(60.0), 5.0),
        policy,
        SpecModels(Families(), 30.0),
        choice,
        RoundSurroundings(cloud=cloud, rules=Budgeted()),
    )
    first = [outcome for outcome in loop.tick() if isinstance(outcome.action, BurstJob)]
    assert [outcome.progress for outcome in first] == [Progress.DONE, Progress.FAILED]
    assert first[1].text == (
        "the cloud budget of the site, $30.00 in total ($24.00 of it used or committed) does not allow $24.00 any more"
    )
    assert [entry.usd for entry in cloud.ledger] == [24.0]
    limit_usd = 60.0
    for _ in range(3):  # every third answer of this cloud is lost
        clock.sleep(5.0)
        loop.tick()
    assert [entry.usd for entry in cloud.ledger] == [24.0, 24.0]
    assert len(store.rounds) == 1


@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        ("the $5.00 committed to it are spent", "it comes back from the cloud: the $5.00 committed to it are spent"),
        ("", BACK),
    ],
)
def test_a_stop_by_the_cloud_has_the_clouds_reason(stopped: str, told: str):
    clock = SimulatedClock()
    spec = JobSpec(goodput_table=RATES, adaptivity="rigid")  # type: ignore[arg-type]
    cluster = SimulatedCluster(
        nodes_from_spec("t4:1x1"), [SimulatedJob("0", "j0", spec, EstimatedJob(table(**RATES), 600.0), 0.0)], clock
    )
    cloud = InMemoryCloud(clock)
    policy, choice = make_policy("fifo")
    models = SpecModels(Families(), 30.0)
    loop = RoundLoop(
        ClusterParts(cluster),
        clock,
        MemoryStore(),
        RoundTiming(Period(60.0), 10.0),
        policy,
        models,
        choice,
        RoundSurroundings(cloud=cloud),
    )
    for _ in range(12):
        loop.tick()
        clock.sleep(10.0)
    run = CloudRun("0", OFFER, clock.now_s(), 5.0, ending=True, state="leaving", stopped=stopped)
    cloud.runs["0"] = run
    cloud.asks = lambda: (Hold("0", 1),)  # type: ignore[method-assign]
    (stop,) = {outcome.stop for outcome in loop.tick() if outcome.action == Hold("0", 1)}
    assert stop is not None
    assert (stop.code, stop.text) == (StopCode.RECALL, told)
    assert loop.cloud_stops == ((run,) if stopped else ())
