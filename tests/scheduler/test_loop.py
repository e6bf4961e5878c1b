"""The loop on the simulated cluster, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.families import Families
from penstock_scheduler.accounts.limits import LimitSettings, site_limits
from penstock_scheduler.api.ports import ClusterParts
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import (
    Action,
    ClusterState,
    Outcome,
    Progress,
)
from penstock_scheduler.people.errors import ClusterAway, RoundFailed
from penstock_scheduler.rounds.loop import RoundLoop, RoundTiming
from penstock_scheduler.rounds.plan_gate import PlanGate, SafetySettings
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.triggers import OnEvent, Period
from penstock_scheduler.simulator import SimulatedClock, SimulatedCluster, nodes_from_spec
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job
from tests.scheduler.loops import Told, observing, simulated


@pytest.mark.parametrize("policy_name", sorted(REGISTRY))
def test_every_job_ends_and_its_work_is_done_once(policy_name):
    loop, cluster, store = simulated(5, policy_name)
    loop.run(lambda: cluster.finished)
    for each in cluster.jobs.values():
        assert each.progress == each.work
    assert [record.snapshot.round for record in store.rounds] == list(range(1, len(store.rounds) + 1))
    assert any(outcome.progress is Progress.DONE for _, outcome in store.outcomes)


def test_the_sites_limits_hold_on_every_cluster():
    """All simulated jobs are one user's; with 3 GPUs for each user no round gives out more, and every job ends."""
    loop, cluster, store = simulated(3, limits=LimitSettings(gpus_per_user=3))
    loop.run(lambda: cluster.finished)
    given = [sum(a.placement.gpus for a in record.plan.assignments.values()) for record in store.rounds]
    assert max(given) == 3


def test_a_limit_of_ones_own_takes_the_place_of_that_for_all():
    settings = LimitSettings(gpus_per_user=4, users={"bob": 0}, accounts={"maths": 2})
    jobs = [job("1", account="maths"), job("2", user="bob", account="physics"), job("3")]
    assert [str(limit) for limit in site_limits(settings, jobs)] == [
        "the limit of 4 GPUs for user ada",
        "the limit of 0 GPUs for user bob",
        "the limit of 2 GPUs for account maths",
    ]


def test_rounds_come_by_period_or_by_event():
    loop, cluster, by_period = simulated(3, trigger=Period(60.0))
    loop.run(lambda: cluster.finished)
    gaps = {b.snapshot.time_s - a.snapshot.time_s for a, b in zip(by_period.rounds, by_period.rounds[1:], strict=False)}
    assert gaps == {60.0}
    loop, cluster, by_event = simulated(3, "fifo", trigger=OnEvent())
    loop.run(lambda: cluster.finished)
    assert {
        b.snapshot.time_s - a.snapshot.time_s for a, b in zip(by_event.rounds, by_event.rounds[1:], strict=False)
    } != {60.0}
    trigger, nothing = OnEvent(100.0), ClusterState((), ())
    trigger.decided(1000.0, nothing)
    assert [trigger.due(now_s, nothing) for now_s in (1000.0, 1099.0, 1100.0, 900.0)] == [False, False, True, True]
    arrivals = {job.submit_s for job in cluster.jobs.values()}
    assert arrivals <= {record.snapshot.time_s for record in by_event.rounds}


def test_a_round_that_would_see_nothing_new_is_passed_over():
    """A job that has all it wants: rounds while it comes and grows, and then every 300 s."""
    loop, cluster, all_rounds = simulated(1, work=20_000.0)
    loop.run(lambda: cluster.finished)
    loop, resting, fewer = simulated(1, work=20_000.0, rest_s=300.0)
    loop.run(lambda: resting.finished)
    assert resting.jobs["0"].finish_s == cluster.jobs["0"].finish_s
    assert len(fewer.rounds) < len(all_rounds.rounds)
    plain, rested = ({r.snapshot.time_s for r in store.rounds} for store in (all_rounds, fewer))
    assert rested <= plain


def test_after_a_restore_the_old_plan_is_not_carried_out(monkeypatch):
    """The store has the first round alone. For 100 s nothing is decided or done; then a new round begins from what runs."""
    clock = SimulatedClock()
    loop, cluster, store = simulated(3, clock=clock, work=50_000.0)
    loop.run(lambda: len(store.rounds) == 8)
    del store.rounds[1:]
    done, apply = [], cluster.apply
    monkeypatch.setattr(cluster, "apply", lambda todo: done.append((clock.now_s(), todo)) or apply(todo))
    before_s = clock.now_s()
    loop, _, _ = simulated(3, clock=clock, cluster=cluster, store=store, settle_s=100.0)
    loop.run(lambda: clock.now_s() >= before_s + 100)
    assert not done
    assert len(store.rounds) == 1
    loop.run(lambda: len(store.rounds) == 2)
    assert loop.settling == ""
    assert {action.kind for _, todo in done for action in todo} <= {"start"}
    assert {each.id for each in store.rounds[1].snapshot.jobs} == {"0", "1", "2"}


def test_a_store_that_lacks_a_round_of_which_jobs_were_told_is_only_looked_with():
    """The jobs are of round 98, and the store is empty. For 300 s nothing is decided; the next round is 99."""
    clock, began_s = SimulatedClock(), SimulatedClock().now_s()
    state = ClusterState((), (), told_round=98)
    loop, _, store = simulated(1, clock=clock, cluster=Told([state] * 400))
    loop.gate = PlanGate(SafetySettings(grace_s=300.0))
    loop.run(lambda: clock.now_s() >= began_s + 290.0)
    assert "the store has no round" in loop.settling
    assert "round 98" in loop.settling
    assert loop.at_rest
    assert not store.rounds
    loop.run(lambda: bool(store.rounds))
    assert (loop.settling, store.rounds[0].snapshot.round) == ("", 99)
    again, _, _ = simulated(1, clock=clock, cluster=Told([state]), store=store)
    again.tick()
    assert again.settling == ""


def test_rounds_go_on_when_the_clock_is_set_back():
    """To before the daemon's start, too."""
    clock = SimulatedClock(1000.0)
    loop, _, store = simulated(1, clock=clock, cluster=Told([ClusterState((), ())] * 2))
    loop.tick()
    clock.sleep(-300.0)
    loop.tick()
    assert [each.snapshot.time_s for each in store.rounds] == [1000.0, 700.0]


def test_a_round_that_fails_changes_nothing_and_the_next_one_tries_again():
    class Flaky:
        name = "flaky"
        calls = 0

        def decide(self, snapshot):
            self.calls += 1
            if self.calls % 2:
                raise RoundFailed("the solver has no answer")
            return make_policy("sia")[0].decide(snapshot)

    for trigger in (Period(60.0), OnEvent()):
        flaky = Flaky()
        loop, cluster, store = simulated(2, policy=flaky, trigger=trigger)
        with pytest.raises(RoundFailed):
            loop.tick()
        assert not store.rounds
        assert not any(each.allocation for each in cluster.jobs.values())
        loop.run(lambda cluster=cluster: cluster.finished)
        assert flaky.calls > len(store.rounds)


def test_an_error_that_should_not_be_does_not_end_the_daemon():
    class Broken:
        name = "broken"

        def decide(self, snapshot):
            raise ZeroDivisionError

    loop, _, _ = simulated(1, policy=Broken())
    ticks = []
    loop.run(lambda: len(ticks) >= 3, lambda: ticks.append(1))
    assert len(ticks) == 3


def test_a_cluster_that_is_away_is_waited_for():
    class Away:
        def __init__(self, cluster: SimulatedCluster) -> None:
            self.cluster, self.calls = cluster, 0

        def observe(self) -> ClusterState:
            self.calls += 1
            if self.calls in (3, 4, 9):
                raise ClusterAway("nobody answers")
            return self.cluster.observe()

        def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
            return self.cluster.apply(todo)

        def reports(self):
            return ()

    clock = SimulatedClock()
    _, cluster, _ = simulated(2, clock=clock)
    policy, choice = make_policy("sia")
    store = MemoryStore()
    away = Away(cluster)
    models = SpecModels(Families(), 30.0)
    loop = RoundLoop(ClusterParts(away), clock, store, RoundTiming(Period(60.0), 10.0), policy, models, choice)
    loop.run(lambda: cluster.finished)
    assert cluster.finished


def test_a_loop_that_starts_again_takes_up_the_plan_and_the_count(tmp_path):
    store = open_store(tmp_path, writer=True)
    clock = SimulatedClock()
    loop, _, _ = simulated(3, clock=clock, store=store)
    for _ in range(5):
        loop.tick()
        clock.sleep(30.0)
    last = store.last_round()
    again, _, _ = simulated(3, store=store)
    again.tick()
    newest = store.last_round()
    assert last is not None
    assert newest is not None
    assert newest.snapshot.round == last.snapshot.round + 1


class Shown(Told):
    """A cluster that shows `state` and keeps the actions of the last tick."""

    state = ClusterState(nodes_from_spec("t4:1x4"), (job("1", submit_s=5.0),))
    asked: Sequence[Action] = ()

    def observe(self) -> ClusterState:
        return self.state

    def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
        self.asked = todo
        return ()


def test_a_plan_says_nothing_of_a_job_that_got_an_id_since():
    """The job that had the id was to get GPUs. The new one waits for its own round, also after a restart of the daemon."""
    shown, store, clock = Shown(), MemoryStore(), SimulatedClock()
    loop = observing(shown, clock, store, make_policy("fifo")[0])
    loop.tick()
    assert [action.job for action in shown.asked] == ["1"]
    shown.state = ClusterState(shown.state.nodes, (job("1", submit_s=100.0),))
    for again in (loop, observing(shown, clock, store, make_policy("fifo")[0])):
        again.paused = True
        again.tick()
        assert shown.asked == ()
    loop.paused = False
    clock.sleep(20.0)
    loop.tick()
    assert [action.job for action in shown.asked] == ["1"]
