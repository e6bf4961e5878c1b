"""GPU-seconds, counted by the round loop and by hand."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_scheduler.accounts.gpu_seconds import GpuSeconds, UnknownEnds
from penstock_scheduler.api.ports import CloudNode
from penstock_scheduler.model import Assignment, ClusterState, EndedRun, Job, Phase, Plan, Reason, ReasonCode
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on
from tests.scheduler.loops import Told, observing


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
    first = observing(Moving(), clock, store, cloud_nodes=CloudNodes() if cloud else None)
    for _ in range(9):
        first.tick()
        clock.sleep(10.0)
    assert store.last_round().snapshot.attained == {"j": {"t4": 240.0} | ({} if cloud else {"a100": 160.0})}
    observing(Moving(), clock, store, cloud_nodes=CloudNodes() if cloud else None).tick()
    assert store.last_round().snapshot.attained == {"j": {"t4": 240.0} | ({} if cloud else {"a100": 240.0})}


def test_gpu_seconds_follow_the_clusters_own_times():
    """Looks at 0, 10, 20, 30 s.

    A run of 2 GPUs from 22 to 27 s is never seen running: 10. One of 4 GPUs starts at 4 s, is requeued at 17 s and starts anew
    at 19 s on 1 GPU, leaves its node at 26 s: 4 * 13 + 1 * 7 = 59. One of 8 GPUs from 5 s ends at 22 s: 136.
    Of one that was requeued twice between two observations only what was seen counts: 1 s.
    """
    begun = SimulatedClock().now_s()

    def at(seconds: float) -> float:
        return begun + seconds

    def runs(name: str, since: float, restarts: int = 0, **more):
        held = {4: on("t4", t4_00=4), 1: on("t4", t4_00=1), 8: on("a100", a100_00=8)}[more.pop("gpus")]
        fields = {"phase": Phase.RUNNING, "allocation": held, "started_s": at(since), "restarts": restarts} | more
        return job(name, **fields)

    states = [
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
        clock, store, loop, cluster = SimulatedClock(), MemoryStore(), None, Told(states)
        for _ in states:
            if loop is None or restart:
                loop = observing(cluster, clock, store)
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
    """4 GPUs for 10 s, observations at 0, 20, 40 and 60 s, each by a new daemon: 40.

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
    for state in (
        ClusterState((), (run,)),
        ClusterState((), (leaves,)),
        ended if gone else ClusterState((), (leaves,)),
        ClusterState((), ()),
    ):
        observing(Told([state]), clock, store, policy=Elsewhere()).tick()
        clock.sleep(20.0)
        counted.append(store.last_round().snapshot.attained["j"])
    assert counted == [{"t4": 0.0}, *[{"t4": 40.0}] * 3]


def test_a_job_that_is_gone_has_used_all_up_to_its_end():
    """2 GPUs from 0 s to 27 s, and an observation that began at 20 s: its charge must not wait for the next observation."""
    book, held = GpuSeconds(observed_s=990.0), on("t4", t4_00=2)
    book.count(ClusterState((), (job("j", phase=Phase.RUNNING, allocation=held, started_s=1000.0),)), 1010.0)
    gone = ClusterState((), (), ended=(EndedRun("j", held, 1000.0, 1027.0),))
    book.count(gone, 1020.0, (), {"cloud"})
    assert (book.attained, book.so_far) == ({"j": {"t4": 40.0}}, {"j": {"t4": 54.0}})
    book.count(gone, 1030.0)
    assert book.attained == book.so_far == {"j": {"t4": 54.0}}
    book.count(ClusterState((), (), ended=(EndedRun("k", held, 1000.0, 1050.0),)), 1040.0, (), {"t4-00"})
    assert "k" not in book.so_far, "nodes in the cloud are paid for in dollars"


@pytest.mark.parametrize("told_again", [True, False])
def test_a_run_that_ends_during_a_long_observation_is_counted_once(told_again):
    """2 GPUs from 0 s to 27 s, seen at 10 s; the look of 20 s takes until the job is gone. Slurm may tell of it only once."""
    clock, store = SimulatedClock(), MemoryStore()
    began, held = clock.now_s(), on("t4", t4_00=2)
    gone = ClusterState((), (), ended=(EndedRun("j", held, began, began + 27),))
    runs = ClusterState((), (job("j", phase=Phase.RUNNING, allocation=held, started_s=began),))
    states = (runs, runs, gone, *([gone if told_again else ClusterState((), ())] * 2))
    loop = observing(Told(states), clock, store)
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
    states = (ClusterState((), (dataclasses.replace(run, suspended_s=s),)) for s in (0.0, 5.0, 7.0, 17.0))
    loop = observing(Told(states), clock, store)
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
    states = [ClusterState((), (each,)) for each in seen]
    states.insert(3, ClusterState((), ()))
    loop = observing(Told(states), clock, store)
    counted = []
    for _ in range(5):
        loop.tick()
        clock.sleep(10.0)
        counted.append(store.last_round().snapshot.attained["j"]["t4"])
    assert counted == [0.0, 10.0, 10.0, 20.0, 20.0]


def test_an_unobserved_end_is_that_of_the_accounts_or_else_the_middle():
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
        states = [ClusterState((), ()), ClusterState((), (job_runs,)), ClusterState((), (after,))]
        loop = observing(Told(states), clock, store, accounts=accounts)
        for _ in states:
            loop.tick()
            clock.sleep(10.0)
        return store.last_round().snapshot.attained["j"]["t4"]

    assert attained(once, None) == pytest.approx(4 * 15, abs=4)
    assert attained(gone, lambda jobs, since_s: recorded) == 4 * 12 + 2 * 3
    assert attained(once, lambda jobs, since_s: ()) == pytest.approx(4 * 15, abs=4)


HELD = on("t4", t4_00=2)


def runs(started_s: float | None = 0.0, **more: object) -> Job:
    """Job j on 2 GPUs."""
    return job("j", **{"phase": Phase.RUNNING, "allocation": HELD, "started_s": started_s} | more)


def counted(*states: tuple[float, Job | EndedRun | None], book: GpuSeconds | None = None) -> float | None:
    """GPU-seconds of job j after these observations: (time, the job, its end, or neither)."""
    book = book or GpuSeconds()
    for now_s, seen in states:
        jobs = (seen,) if isinstance(seen, Job) else ()
        ended = (seen,) if isinstance(seen, EndedRun) else ()
        book.count(ClusterState((), jobs, ended=ended), now_s)
    attained = book.attained.get("j")
    return None if attained is None else attained["t4"]


def test_a_cluster_that_tells_no_times_counts_what_was_observed():
    """Runs at 10, 20 and 30 s and is gone at 40 s: nothing tells when it ended."""
    run = runs(None)
    assert counted((0.0, None), (10.0, run), (20.0, run), (30.0, run), (40.0, None)) == 2 * 30.0


def test_a_run_that_began_in_the_second_of_the_last_observation_began_after_it():
    assert counted((10.5, None), (20.0, runs(10.0))) == 2 * 10.0
    assert counted((10.5, None), (20.0, runs(9.5))) == 2 * 9.5, "one that began a whole second earlier was not there"


def test_a_run_that_begins_after_the_observation_began_is_not_counted_yet():
    assert counted((0.0, None), (10.0, runs(11.0)), (20.0, runs(11.0))) == 2 * 9.0


def test_a_run_that_was_sent_and_is_back_in_the_queue_counts_a_quarter_of_the_time_between():
    """Sent at 0 s, back at 40 s after one restart: it ended at 20 s on average, and began at 10 s on average: 10 s."""
    for back, expected in ((job("j", restarts=1), 2 * 10.0), (job("j", restarts=2), 0.0), (None, None)):
        book = GpuSeconds()
        book.count(ClusterState((), (job("j"),)), 0.0)
        book.sent([job("j")], {"j": HELD}, 0.0)
        assert counted((40.0, back), book=book) == (expected or (0.0 if back is None else expected))


def test_a_requeue_ends_a_run_at_the_latest():
    """Seen at 10 s, requeued at 20 s, seen in the queue at 40 s: the end is between 10 and 20 s."""
    assert counted((0.0, None), (10.0, runs()), (40.0, job("j", restarts=1, requeued_s=20.0))) == 2 * 15.0


def test_the_next_run_ends_the_one_before_at_the_latest():
    """Seen at 10 s; its next run starts at 20 s and is seen at 40 s: 15 s of the first, 20 s of the second."""
    assert counted((0.0, None), (10.0, runs()), (40.0, runs(20.0, restarts=1))) == 2 * (15.0 + 20.0)


def test_a_run_counted_too_far_gives_back_what_it_did_not_have():
    """Counted to 10.9 s; the cluster's clock has whole seconds and says it ended at 10 s."""
    assert counted((0.0, None), (10.9, runs()), (20.0, EndedRun("j", HELD, 0.0, 10.0))) == pytest.approx(2 * 10.0)
    assert counted((0.0, runs()), (1.0, job("j", restarts=1, stopped_s=-5.0))) == 0.0, "never below 0"


def test_gpu_seconds_of_an_absent_job_are_kept_for_five_minutes():
    seen = ((0.0, runs()), (10.0, runs()), (20.0, EndedRun("j", HELD, 0.0, 12.0)))
    assert counted(*seen, (319.0, None)) == 2 * 12.0
    assert counted(*seen, (320.0, None)) is None
    assert counted(*seen, (319.0, job("j", restarts=1)), (400.0, None)) == 2 * 12.0, "it was back meanwhile"


def test_accounts_are_asked_only_for_runs_of_unknown_end():
    book = GpuSeconds()
    book.count(ClusterState((), (runs(),)), 10.0)
    told = [
        ClusterState((), (runs(),)),
        ClusterState((), (), ended=(EndedRun("j", HELD, 0.0, 12.0),)),
        ClusterState((), (job("j", restarts=1, stopped_s=12.0),)),
    ]
    assert [book.unknown_ends(state) for state in told] == [None] * 3
    unknown = [
        ClusterState((), ()),
        ClusterState((), (), ended=(EndedRun("j", HELD, 15.0, 17.0),)),
        ClusterState((), (job("j", restarts=1),)),
        ClusterState((), (job("j", restarts=2, stopped_s=12.0),)),
    ]
    assert [book.unknown_ends(state) for state in unknown] == [UnknownEnds(("j",), 9.0)] * 4


def test_runs_in_the_accounts_count_once_and_only_since_the_last_observation():
    """Counted to 10 s. The run itself went on to 14 s, another lasted from 15 to 17 s; one ended at 10 s, before."""
    recorded = [
        EndedRun("j", HELD, 0.0, 14.0),
        EndedRun("j", HELD, 15.0, 17.0),
        EndedRun("j", HELD, 4.0, 10.0),
        EndedRun("other", HELD, 0.0, 14.0),
    ]
    for state in (
        ClusterState((), (), ended=(EndedRun("j", HELD, 15.0, 17.0),)),
        ClusterState((), (job("j", restarts=2),)),
    ):
        book = GpuSeconds()
        book.count(ClusterState((), (runs(),)), 0.0)
        book.count(ClusterState((), (runs(),)), 10.0)
        book.count(state, 20.0, recorded)
        assert book.attained == {"j": {"t4": 2 * (14.0 + 2.0)}}


def test_a_snapshot_keeps_the_sums_of_its_time():
    book = GpuSeconds()
    book.count(ClusterState((), (runs(),)), 0.0)
    book.count(ClusterState((), (runs(),)), 10.0)
    kept = book.attained
    book.count(ClusterState((), (runs(),)), 20.0)
    assert (kept, book.attained) == ({"j": {"t4": 20.0}}, {"j": {"t4": 40.0}})


def test_accounts_are_asked_for_all_runs_since_the_oldest_count():
    """One run is counted to 10 s, the other one begins at 12 s by the cluster's clock."""
    book = GpuSeconds()
    runs_ = (job("a", phase=Phase.RUNNING, allocation=HELD, started_s=12.0), runs())
    book.count(ClusterState((), runs_), 10.0)
    assert book.unknown_ends(ClusterState((), ())) == UnknownEnds(("a", "j"), 9.0)


def test_a_job_with_the_id_of_a_former_job_has_attained_nothing():
    """Also if the former one was in the last observation, or is in the saved round; a requeued job keeps what it has."""
    held = on("t4", t4_00=4)
    former = job("j", phase=Phase.RUNNING, allocation=held, submit_s=5.0, started_s=10.0)
    another = job("j", submit_s=100.0)
    requeued = dataclasses.replace(another, restarts=1)
    for now, expected in ((another, {}), (requeued, {"j": {"t4": 240.0}})):
        for restored in (False, True):
            counted = GpuSeconds()
            counted.count(ClusterState((), (former,)), 10.0)
            counted.count(ClusterState((), (former,)), 70.0)
            if restored:
                counted = GpuSeconds(counted.attained, (former,), 70.0)
            counted.count(ClusterState((), ()), 70.0)
            counted.count(ClusterState((), (now,)), 101.0)
            assert counted.attained == expected


@pytest.mark.parametrize("told_by", ["cluster", "accounts"])
@pytest.mark.parametrize(("seen", "gpu_type"), [(True, "t4"), (False, "unknown type")])
def test_a_node_that_is_gone_keeps_the_type_that_was_seen(told_by, seen, gpu_type):
    """A job holds 2 GPUs from 5 to 15 s; by 20 s Slurm lists the job's node no more, and nobody knows its type then."""
    counted = GpuSeconds()
    held, lost = on("t4", n01=2), dataclasses.replace(on("t4", n01=2), gpu_type="")
    counted.count(ClusterState((), ()), 0.0)
    there = job("j", phase=Phase.RUNNING, allocation=held if seen else lost, started_s=5.0)
    counted.count(ClusterState((), (there,)), 10.0)
    run = EndedRun("j", lost, 5.0, 15.0)
    if told_by == "cluster":
        counted.count(ClusterState((), (), ended=(run,)), 20.0)
    else:
        counted.count(ClusterState((), ()), 20.0, [run])
    assert counted.attained == {"j": {gpu_type: 20.0}}
