"""The loop on the simulated cluster, and what it leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

import pytest

from penstock_profiles.estimators import TableEstimator
from penstock_profiles.families import Families
from penstock_profiles.wire import Report
from penstock_scheduler.diff import actions
from penstock_scheduler.errors import ClusterAway, RoundFailed
from penstock_scheduler.limits import LimitSettings, site_limits
from penstock_scheduler.loop import RoundLoop
from penstock_scheduler.model import (
    Action,
    Assignment,
    ClusterState,
    EndedRun,
    Hold,
    JobSpec,
    Migrate,
    Outcome,
    Phase,
    Plan,
    Progress,
    Reason,
    ReasonCode,
    Resize,
    Snapshot,
    Start,
)
from penstock_scheduler.models import SpecModels
from penstock_scheduler.policies import REGISTRY, make_policy
from penstock_scheduler.ports import CloudNode, Cluster, ClusterParts, Store
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from penstock_scheduler.store import MemoryStore, open_store
from penstock_scheduler.triggers import OnEvent, Period
from tests.scheduler.builders import job, on

TABLE = {"t4": {1: 1.0, 2: 1.9, 4: 3.6}, "a100": {1: 4.0, 8: 24.0}}


def simulated(count: int, policy_name: str = "sia", **parts: object) -> tuple[RoundLoop, SimulatedCluster, MemoryStore]:
    clock = SimulatedClock()
    spec = JobSpec(max_gpus=8, goodput_table=TABLE)  # type: ignore[arg-type]
    jobs = [
        SimulatedJob(str(i), f"j{i}", spec, EstimatedJob(TableEstimator(TABLE), parts.get("work", 2000.0)), i * 100.0)
        for i in range(count)
    ]
    cluster = SimulatedCluster(nodes_from_spec("t4:2x4,a100:1x8"), jobs, clock)
    store = MemoryStore()
    policy, settings = make_policy(policy_name)
    loop = RoundLoop(
        ClusterParts(parts.get("cluster", cluster)),  # type: ignore[arg-type]
        clock,
        parts.get("store", store),  # type: ignore[arg-type]
        parts.get("trigger", Period(60.0)),  # type: ignore[arg-type]
        parts.get("policy", policy),  # type: ignore[arg-type]
        SpecModels(Families(), 30.0),
        tick_s=10.0,
        rest_s=parts.get("rest_s", 0.0),  # type: ignore[arg-type]
        settings=settings,
        rules=partial(within, parts.get("limits", LimitSettings())),  # type: ignore[arg-type]
    )
    return loop, cluster, store


class Told:
    """A cluster that shows one state after the other, and on which nothing can be done."""

    def __init__(self, looks: Iterable[ClusterState] = ()) -> None:
        self.looks = iter(looks)

    def observe(self) -> ClusterState:
        return next(self.looks)

    def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
        return ()

    def reports(self) -> tuple[Report, ...]:
        return ()


class Nothing:
    """A policy that gives nobody anything."""

    name = "nothing"

    def decide(self, snapshot: Snapshot) -> Plan:
        return Plan(snapshot.round)


def looking(cluster: Cluster, clock: SimulatedClock, store: Store, **parts: object) -> RoundLoop:
    """A loop that decides every 10 s, by default nothing."""
    optional = {name: parts.pop(name) for name in ("accounts", "cloud_nodes") if name in parts}
    given = {"policy": Nothing(), "models": SpecModels(Families(), 30.0)} | parts
    its = ClusterParts(cluster, **optional)  # type: ignore[arg-type]
    return RoundLoop(its, clock, store, Period(10.0), tick_s=10.0, **given)  # type: ignore[arg-type]


def within(limits: LimitSettings, snapshot: Snapshot) -> Snapshot:
    return dataclasses.replace(snapshot, limits=(*snapshot.limits, *site_limits(limits, snapshot.jobs)))


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

    _, cluster, _ = simulated(2)
    clock = cluster._clock
    policy, settings = make_policy("sia")
    store = MemoryStore()
    away = Away(cluster)
    models = SpecModels(Families(), 30.0)
    loop = RoundLoop(ClusterParts(away), clock, store, Period(60.0), policy, models, tick_s=10.0, settings=settings)
    loop.run(lambda: cluster.finished)
    assert cluster.finished


def test_a_loop_that_starts_again_takes_up_the_plan_and_the_count(tmp_path):
    store = open_store(tmp_path, writer=True)
    loop, cluster, _ = simulated(3, store=store)
    for _ in range(5):
        loop.tick()
        cluster._clock.sleep(30.0)
    last = store.last_round()
    again, _, _ = simulated(3, store=store)
    again.tick()
    newest = store.last_round()
    assert last is not None
    assert newest is not None
    assert newest.snapshot.round == last.snapshot.round + 1


@pytest.mark.parametrize("cloud", [False, True])
def test_what_jobs_have_attained_is_counted_by_type_and_survives_a_restart(tmp_path, cloud):
    """A job holds 4 t4 GPUs for 60 s, then 8 a100 GPUs for 30 s: 240 and 240 GPU-seconds; 10 s without a daemon count too.

    If the a100 are the cloud's, they are paid for in dollars, and count as none of the site's.
    """
    clock = SimulatedClock()
    where = [on("t4", t4_00=4), on("a100", a100_00=8)]

    class CloudNodes:
        def nodes(self):
            return (CloudNode("a100-00", "a100", 8, 96, 1000, free=False, up=True),)

    class Moving(Told):
        def observe(self):
            held = where[0] if clock.now_s() - started_s <= 60 else where[1]
            return ClusterState((), (job("j", phase=Phase.RUNNING, allocation=held), job("queued")))

    started_s = clock.now_s()
    store = open_store(tmp_path, writer=True)
    first = looking(Moving(), clock, store, cloud_nodes=CloudNodes() if cloud else None)
    for _ in range(9):
        first.tick()
        clock.sleep(10.0)
    assert store.last_round().snapshot.attained == {"j": {"t4": 240.0} | ({} if cloud else {"a100": 160.0})}
    looking(Moving(), clock, store, cloud_nodes=CloudNodes() if cloud else None).tick()
    assert store.last_round().snapshot.attained == {"j": {"t4": 240.0} | ({} if cloud else {"a100": 240.0})}


def test_gpu_seconds_follow_the_clusters_own_times():
    """Looks at 0, 10, 20, 30 s.

    A run of 2 GPUs from 22 to 27 s is never seen running: 10. One of 4 GPUs starts at 4 s, is requeued at 17 s and starts anew
    at 19 s on 1 GPU, leaves its node at 26 s: 4 * 13 + 1 * 7 = 59. One of 8 GPUs from 5 s ends at 22 s: 136.
    Of one that was requeued twice between two looks only what was seen counts: 1 s.
    """
    begun = SimulatedClock().now_s()

    def at(seconds: float) -> float:
        return begun + seconds

    def runs(name: str, since: float, restarts: int = 0, **more):
        held = {4: on("t4", t4_00=4), 1: on("t4", t4_00=1), 8: on("a100", a100_00=8)}[more.pop("gpus")]
        fields = {"phase": Phase.RUNNING, "allocation": held, "started_s": at(since), "restarts": restarts} | more
        return job(name, **fields)

    looks = [
        ClusterState((), (job("moves"), job("ends"))),
        ClusterState((), (runs("twice", 9, gpus=1), runs("moves", 4, gpus=4), runs("ends", 5, gpus=8))),
        ClusterState(
            (),
            (
                job("twice", restarts=2, stopped_s=at(15)),
                runs("moves", 19, 1, gpus=1, stopped_s=at(17)),
                runs("ends", 5, gpus=8),
            ),
        ),
        ClusterState(
            (),
            (runs("moves", 19, 1, gpus=1, leaving=True, phase=Phase.STOPPING, stopped_s=at(26)),),
            ended=(
                EndedRun("ends", on("a100", a100_00=8), at(5), at(22)),
                EndedRun("unseen", on("t4", t4_00=2), at(22), at(27)),
                EndedRun("long over", on("t4", t4_00=2), at(3), at(8)),
            ),
        ),
    ]
    for restart in (False, True):  # the second time with a daemon that dies after each round
        clock, store, loop, cluster = SimulatedClock(), MemoryStore(), None, Told(looks)
        for _ in looks:
            if loop is None or restart:
                loop = looking(cluster, clock, store)
            loop.tick()
            clock.sleep(10.0)
        assert store.last_round().snapshot.attained == {
            "moves": {"t4": 59.0},
            "ends": {"a100": 136.0},
            "unseen": {"t4": 10.0},
            "twice": {"t4": 1.0},
        }


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_that_has_been_counted_to_its_end_is_not_counted_again(gone):
    """4 GPUs for 10 s, looks at 0, 20, 40 and 60 s, each by a new daemon: 40.

    Its node cleans up for long; the plan has sent it elsewhere already.
    """
    clock, store = SimulatedClock(), MemoryStore()
    began = clock.now_s()
    held = on("t4", t4_00=4)
    run = job("j", phase=Phase.RUNNING, allocation=held, started_s=began)
    leaves = dataclasses.replace(run, phase=Phase.STOPPING, leaving=True, stopped_s=began + 10)
    ended = ClusterState((), (), ended=(EndedRun("j", held, began, began + 10),))

    class Elsewhere:
        name = "elsewhere"

        def decide(self, snapshot):
            given = {
                each.id: Assignment(on("a100", a100_00=8), 1.0, Reason(ReasonCode.CHOSEN, "")) for each in snapshot.jobs
            }
            return Plan(snapshot.round, given)

    counted = []
    for look in (
        ClusterState((), (run,)),
        ClusterState((), (leaves,)),
        ended if gone else ClusterState((), (leaves,)),
        ClusterState((), ()),
    ):
        looking(Told([look]), clock, store, policy=Elsewhere()).tick()
        clock.sleep(20.0)
        counted.append(store.last_round().snapshot.attained["j"])
    assert counted == [{"t4": 0.0}, *[{"t4": 40.0}] * 3]


def test_a_run_that_ends_while_a_look_takes_long_is_counted_once():
    """2 GPUs from 0 s to 27 s, seen at 10 s; the look of 20 s takes until the job is gone, that of 30 s is told of it again."""
    clock, store = SimulatedClock(), MemoryStore()
    began, held = clock.now_s(), on("t4", t4_00=2)
    gone = ClusterState((), (), ended=(EndedRun("j", held, began, began + 27),))
    runs = ClusterState((), (job("j", phase=Phase.RUNNING, allocation=held, started_s=began),))
    looks = (runs, runs, gone, gone, gone)
    loop = looking(Told(looks), clock, store)
    counted = []
    for _ in range(5):
        loop.tick()
        clock.sleep(10.0)
        counted.append(store.last_round().snapshot.attained["j"]["t4"])
    assert counted == [0.0, 20.0, 40.0, 54.0, 54.0]


def test_time_in_which_a_job_is_suspended_is_not_counted():
    """2 GPUs, looked at every 10 s; suspended from 5 s to 12 s and again from 20 s on: 10 s, 13 s and 13 s have run."""
    clock, store = SimulatedClock(), MemoryStore()
    began, held = clock.now_s(), on("t4", t4_00=2)
    run = job("j", phase=Phase.RUNNING, allocation=held, started_s=began)
    looks = (ClusterState((), (dataclasses.replace(run, suspended_s=s),)) for s in (0.0, 5.0, 7.0, 17.0))
    loop = looking(Told(looks), clock, store)
    counted = []
    for _ in range(4):
        loop.tick()
        clock.sleep(10.0)
        counted.append(store.last_round().snapshot.attained["j"]["t4"])
    assert counted == [0.0, 10.0, 26.0, 26.0]


def test_a_suspended_run_that_was_out_of_sight_is_not_suspended_twice():
    """2 GPUs, looked at every 10 s, suspended from 5 s on: 10 GPU-seconds. Out of sight at 30 s, it counts to the middle, 25 s.

    At 40 s it is there again, and only what it was suspended since the last look is taken off, not all 35 s anew.
    """
    clock, store = SimulatedClock(), MemoryStore()
    run = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=2), started_s=clock.now_s())
    seen = [dataclasses.replace(run, suspended_s=s) for s in (0.0, 5.0, 15.0, 35.0)]
    looks = [ClusterState((), (each,)) for each in seen]
    looks.insert(3, ClusterState((), ()))
    loop = looking(Told(looks), clock, store)
    counted = []
    for _ in range(5):
        loop.tick()
        clock.sleep(10.0)
        counted.append(store.last_round().snapshot.attained["j"]["t4"])
    assert counted == [0.0, 10.0, 10.0, 20.0, 20.0]


def test_an_end_that_nobody_saw_is_the_accounts_or_else_the_middle():
    """4 GPUs from 0 s, seen at 10 s, requeued by its user, back in the queue at 20 s: to the middle, 15 s, 60 GPU-seconds.

    With the accounts, 4 * 12 for that run, and 2 * 3 for one that came and went in between: 54.
    """
    began = SimulatedClock().now_s()
    job_runs = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=4), started_s=began)
    gone = job("j", restarts=2, requeued_s=began + 20)
    once = job("j", restarts=1, requeued_s=began + 20)
    recorded = (
        EndedRun("j", on("t4", t4_00=4), began, began + 12),
        EndedRun("j", on("t4", t4_01=2), began + 14, began + 17),
        EndedRun("j", on("t4", t4_01=2), began - 50, began - 40),
    )

    def attained(after, accounts):
        clock, store = SimulatedClock(), MemoryStore()
        clock.sleep(10.0)
        loop = looking(Told(ClusterState((), (each,)) for each in (job_runs, after)), clock, store, accounts=accounts)
        loop._seen_s = began  # a daemon that has been there from the start
        loop.tick()
        clock.sleep(10.0)
        loop.tick()
        return store.last_round().snapshot.attained["j"]["t4"]

    assert attained(once, None) == pytest.approx(4 * 15, abs=4)
    assert attained(gone, lambda jobs, since_s: recorded) == 4 * 12 + 2 * 3
    assert attained(once, lambda jobs, since_s: ()) == pytest.approx(4 * 15, abs=4)


def plan(**placements: object) -> Plan:
    reason = Reason(ReasonCode.CHOSEN, "why")
    given = {name: Assignment(where, reason, 1.0) for name, where in placements.items() if where is not None}  # type: ignore[arg-type]
    waiting = {name: reason for name, where in placements.items() if where is None}
    return Plan(7, given, waiting)


def test_actions_are_the_difference_between_plan_and_cluster():
    here, bigger, other = on("t4", t4_00=1), on("t4", t4_00=4), on("a100", a100_00=1)
    running = {"phase": Phase.RUNNING, "allocation": here}
    wanted = plan(a=here, b=here, c=bigger, d=other, e=None, f=None)
    jobs = [job("a"), *(job(name, **running) for name in "bcde"), job("f"), job("unknown", **running)]
    found = {action.job: action for action in actions(wanted, jobs)}
    assert found == {
        "a": Start("a", 7, here),
        "c": Resize("c", 7, bigger),
        "d": Migrate("d", 7, other),
        "e": Hold("e", 7),
    }
    assert isinstance(actions(wanted, jobs)[-1], Start), "stops come before starts"


def test_a_job_that_was_asked_to_leave_and_may_stay_is_told_so():
    here = on("t4", t4_00=1)
    stopping = job("a", phase=Phase.STOPPING, allocation=here)
    assert actions(plan(a=here), [stopping]) == (Migrate("a", 7, here),)


def test_the_partition_alone_is_no_reason_to_move():
    held = on("t4", partition="t4", t4_00=1)
    running = job("a", phase=Phase.RUNNING, allocation=held)
    assert actions(plan(a=dataclasses.replace(held, partition="all")), [running]) == ()
