"""The simulated cluster, worked by hand: two t4 nodes of four GPUs, and jobs whose GPUs add up."""

from __future__ import annotations

import itertools
import math

import pytest

from penstock_scheduler.model import Hold, JobSpec, Migrate, Phase, Progress, Resize, Start
from penstock_scheduler.simulator.cluster import SimulatedCluster, nodes_from_spec
from penstock_scheduler.simulator.disturbances import Disturbances, Latencies
from penstock_scheduler.simulator.jobs import SimulatedClock, SimulatedJob
from penstock_scheduler.simulator.truth import TimedJob
from tests.scheduler.builders import on


def job(name: str, gpu_seconds: float, submit_s: float = 0.0, restart_s: float = 10.0) -> SimulatedJob:
    spec = JobSpec(max_gpus=8)
    return SimulatedJob(name, name, spec, TimedJob(None, gpu_seconds, restart_s, {}), submit_s)


def cluster(*jobs: SimulatedJob, **options: object) -> tuple[SimulatedCluster, SimulatedClock]:
    clock = SimulatedClock()
    return SimulatedCluster(nodes_from_spec("t4:2x4"), jobs, clock, **options), clock  # type: ignore[arg-type]


def test_a_job_arrives_restarts_runs_and_ends_between_two_observations():
    """200 GPU-seconds on 4 GPUs are 50 s, after a start of 10 s: it ends at 5 + 10 + 50."""
    one = job("a", 200, submit_s=5)
    simulated, clock = cluster(one)
    assert simulated.observe().jobs == ()
    assert simulated.next_event_s() == 5
    clock.sleep(5)
    (seen,) = simulated.observe().jobs
    assert (seen.phase, seen.restarts) == (Phase.QUEUED, 0)
    simulated.apply([Start("a", 1, on("t4", t4_00=4))])
    assert simulated.next_event_s() == 65
    clock.sleep(9.5)
    assert simulated.observe().jobs[0].phase is Phase.STARTING
    clock.sleep(0.5)
    assert simulated.observe().jobs[0].phase is Phase.RUNNING
    assert one.progress == 0
    clock.sleep(20)
    simulated.close()
    assert one.progress == 80
    clock.sleep(100)
    assert simulated.observe().jobs == ()
    assert (one.finish_s, one.progress, simulated.finished) == (65, 200, True)
    assert [run.gpu_seconds for run in one.runs] == [240]


def test_a_move_costs_a_restart_and_nothing_is_lost_but_time():
    """40 s of training on 1 GPU, then 160 GPU-seconds on 4 after another 10 s: 10 + 40 + 10 + 40 = 100 s."""
    one = job("a", 200)
    simulated, clock = cluster(one)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(50)
    simulated.observe()
    simulated.apply([Resize("a", 2, on("t4", t4_01=4))])
    clock.sleep(1000)
    assert simulated.observe().jobs == ()
    assert (one.finish_s, one.restarts) == (100, 1)
    assert [(run.start_s, run.end_s, run.gpu_seconds) for run in one.runs] == [(0, 50, 50), (50, 100, 200)]


def test_a_restart_that_is_cut_short_begins_anew():
    """Moved 4 s into its start: 4 + 10 + 50."""
    one = job("a", 50)
    simulated, clock = cluster(one)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(4)
    simulated.observe()
    simulated.apply([Migrate("a", 2, on("t4", t4_01=1))])
    clock.sleep(1000)
    simulated.observe()
    assert one.finish_s == 64


def test_an_action_that_is_done_costs_nothing_when_repeated():
    one = job("a", 50)
    simulated, clock = cluster(one)
    simulated.observe()
    for _ in range(3):
        (outcome,) = simulated.apply([Start("a", 1, on("t4", t4_00=1))])
        assert outcome.progress is Progress.DONE
        clock.sleep(3)
    assert one.starts == 1
    clock.sleep(1000)
    simulated.observe()
    assert one.finish_s == 60
    assert simulated.apply([Start("a", 1, on("t4", t4_00=1))])[0].text == "it has ended"


def test_two_jobs_change_places_at_once():
    one, two = job("a", 400), job("b", 400)
    simulated, clock = cluster(one, two)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=4)), Start("b", 1, on("t4", t4_01=4))])
    clock.sleep(20)
    simulated.observe()
    outcomes = simulated.apply([Migrate("a", 2, on("t4", t4_01=4)), Migrate("b", 2, on("t4", t4_00=4))])
    assert {outcome.progress for outcome in outcomes} == {Progress.DONE}
    assert (one.allocation, two.allocation) == (on("t4", t4_01=4), on("t4", t4_00=4))


def test_gpus_are_given_once():
    one, two = job("a", 400), job("b", 400)
    simulated, _ = cluster(one, two)
    simulated.observe()
    _, second = simulated.apply([Start("a", 1, on("t4", t4_00=3)), Start("b", 1, on("t4", t4_00=2))])
    assert second.progress is Progress.UNDER_WAY
    assert two.allocation is None
    simulated.apply([Hold("a", 2), Start("b", 2, on("t4", t4_00=2))])
    assert (one.allocation, two.allocation) == (None, on("t4", t4_00=2))


def test_moves_of_one_shape_are_free_if_that_is_asked_for():
    one = job("a", 100)
    simulated, clock = cluster(one, moves_are_free=True)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(50)
    simulated.observe()
    simulated.apply([Migrate("a", 2, on("t4", t4_01=1))])
    clock.sleep(1000)
    simulated.observe()
    assert (one.finish_s, one.restarts) == (110, 0)


class FailsOnce(Disturbances):
    """The first node fails after 45 s for 30 s."""

    def failures(self, node, until_s):
        return iter([(45.0, 75.0)] if node == "t4-00" else [])


def test_a_job_on_a_failed_node_goes_on_from_its_last_checkpoint():
    """Ready at 10, checkpoints every 20 s of training: at 45 it has done 35 and saved 20. Again at 60: 60 + 10 + 80."""
    one = job("a", 100)
    simulated, clock = cluster(one, disturbances=FailsOnce(), checkpoint_s=20.0)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(60)
    state = simulated.observe()
    assert [node.may_start for node in state.nodes] == [False, True]
    assert (state.jobs[0].phase, one.progress, one.failures) == (Phase.QUEUED, 20, 1)
    (refused,) = simulated.apply([Start("a", 2, on("t4", t4_00=1))])
    assert refused.progress is Progress.FAILED
    simulated.apply([Start("a", 2, on("t4", t4_01=1))])
    clock.sleep(20)
    assert all(node.may_start for node in simulated.observe().nodes)
    clock.sleep(1000)
    simulated.observe()
    assert one.finish_s == 150
    assert one.runs[0].end_s == 45


def test_profiles_and_stragglers_cost_what_they_say():
    """20 GPU-s on one GPU before the first start alone, and steps that take 1.5 times as long."""
    slow = Disturbances(profiling_gpu_s=20, straggler_share=1, straggler_slowdown=1.5, straggler_spread=0)
    one = job("a", 100)
    simulated, clock = cluster(one, disturbances=slow)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(1000)
    simulated.observe()
    assert one.finish_s == pytest.approx(10 + 20 + 150)


def test_two_distributed_jobs_on_one_node_slow_each_other():
    """Half as fast while both are there: a has 2 GPUs and does 2 x 40 alone, then 1 a second."""
    one, two = job("a", 100), job("b", 1000)
    simulated, clock = cluster(one, two, disturbances=Disturbances(interference=0.5))
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1, t4_01=1))])
    clock.sleep(50)
    simulated.observe()
    simulated.apply([Start("b", 2, on("t4", t4_00=1, t4_01=1))])
    clock.sleep(1000)
    simulated.observe()
    assert one.finish_s == 70
    assert two.finish_s is not None
    assert two.finish_s == pytest.approx(50 + 10 + 10 * 0.5 + (1000 - 10) / 2, abs=6)


def test_time_jumps_from_event_to_event_and_never_back():
    """Five jobs of 40 s come every 7 s to four GPUs: the last one waits for the first, until 40."""
    jobs = [job(str(number), 30, submit_s=7.0 * number) for number in range(5)]
    simulated, clock = cluster(*jobs)
    clock.next_event_s = simulated.next_event_s
    times = []
    for place in itertools.count():
        waiting = [each for each in simulated.observe().jobs if each.phase is Phase.QUEUED]
        simulated.apply([Start(each.id, place, on("t4", t4_00=1)) for each in waiting])
        times.append(clock.now_s())
        if simulated.finished:
            break
        clock.sleep(math.inf)
    assert times == [0, 7, 14, 21, 28, 40, 47, 54, 61, 80]
    clock.sleep(math.inf)
    assert clock.now_s() == 80


def test_stops_take_the_time_that_a_resource_manager_takes():
    """Trains from 10 on, is told at 20 to move, trains until 24, leaves at 25; may start from 28 on, and is ready at 38.

    14 of 100 are done by then on one GPU: the rest takes until 38 + 86 = 124, and 2 s later it is gone.
    """
    one, two = job("a", 100), job("b", 20)
    takes = Latencies(launch_s=1.0, leave_s=5.0, lost_s=1.0, pause_s=3.0, exit_s=2.0)
    simulated, clock = cluster(one, two, latencies=takes)
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(2)
    assert simulated.observe().jobs[0].phase is Phase.RUNNING
    clock.sleep(18)
    simulated.observe()
    told = [Migrate("a", 2, on("t4", t4_01=1)), Start("b", 2, on("t4", t4_00=4))]
    for at_s, phase, texts in (
        (20, Phase.STOPPING, ("saves and leaves its GPUs", "waits for GPUs that another job still holds")),
        (24.9, Phase.STOPPING, ("saves and leaves its GPUs", "waits for GPUs that another job still holds")),
        (25, Phase.QUEUED, ("pauses before it can start again", "")),
    ):
        clock.sleep(at_s - clock.now_s())
        simulated.observe()
        assert tuple(outcome.text for outcome in simulated.apply(told)) == texts
        assert simulated.observe().jobs[0].phase is phase
    clock.sleep(3)
    simulated.observe()
    assert [outcome.progress for outcome in simulated.apply(told)] == [Progress.DONE] * 2
    assert one.progress == pytest.approx(14)
    clock.sleep(1000)
    simulated.observe()
    assert one.finish_s == pytest.approx(126)
    assert [run.end_s for run in one.runs] == pytest.approx([25, 126])
    assert two.finish_s == pytest.approx(25 + 10 + 5 + 2)


def test_a_job_that_is_done_before_it_would_leave_ends():
    one = job("a", 12)
    simulated, clock = cluster(one, latencies=Latencies(leave_s=5.0, lost_s=1.0))
    simulated.observe()
    simulated.apply([Start("a", 1, on("t4", t4_00=1))])
    clock.sleep(20)
    simulated.observe()
    simulated.apply([Hold("a", 2)])
    clock.sleep(1000)
    assert simulated.observe().jobs == ()
    assert one.finish_s == 22
