"""What the plan gives out and what the cluster shows as held: a difference that stays is told, one that passes is not."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from penstock_profiles.estimators import TableEstimator
from penstock_scheduler.api.ports import NOT_COUNTED, GpuSecondsByJob, RoundListener
from penstock_scheduler.model import (
    Assignment,
    ClusterState,
    Job,
    JobSpec,
    Pack,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    SharedGpus,
    Stop,
    StopCode,
    WaitingJob,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.plan_check import DIFFERS, NONE_STARTS, PATIENCE_S, PlanCheck, StartCheck
from penstock_scheduler.rounds.policies import REGISTRY
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from penstock_scheduler.simulator.disturbances import Latencies
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.loops import TABLE, simulated

WHY = Reason(ReasonCode.CHOSEN, "why")
COST_S = 30.0
SPEC = JobSpec(max_gpus=8, goodput_table=TABLE)  # type: ignore[arg-type]


def round_of(jobs: list[Job], given: dict[str, Placement], **more: object) -> RoundRecord:
    waiting = {each.id: WHY for each in jobs if each.id not in given}
    plan = Plan(1, {name: Assignment(where, WHY, 1.0) for name, where in given.items()}, waiting, **more)  # type: ignore[arg-type]
    state = snapshot("t4:4x4", jobs, restart_cost_s=COST_S)
    return RoundRecord(state, PolicyChoice(name="sia"), plan, {})


def seen(*jobs: Job) -> ClusterState:
    return ClusterState(snapshot("t4:4x4", []).nodes, jobs)


def warnings(record: RoundRecord, state: ClusterState, *times_s: float) -> list[bool]:
    """Whether each look at these times warns."""
    check, told = PlanCheck(), []
    for at_s in times_s:
        check.take(record, state, 1000.0 + at_s)
        told.append(check.warning(1000.0 + at_s).startswith(DIFFERS))
    return told


LONG = (0.0, 59.0, 61.0, COST_S + PATIENCE_S + 1, 100_000.0)


def test_jobs_that_are_not_there_and_hold_gpus_in_the_plan_are_told(caplog):
    """Two phantoms: the plan gives them 8 GPUs, and the cluster shows none as held."""
    phantoms = [job("1"), job("2")]
    record = round_of(phantoms, {"1": on("t4", t4_00=4), "2": on("t4", t4_01=4)})
    assert warnings(record, seen(*phantoms), *LONG) == [False, False, False, True, True]
    check = PlanCheck()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for at_s in LONG:
            check.take(record, seen(*phantoms), 1000.0 + at_s)
    assert "the plan gives 8 GPUs to 2 jobs, for which the cluster shows 0 as held" in check.warning(101_000.0)
    assert [each.job for each in caplog.records] == ["1", "2"], "each once"  # type: ignore[attr-defined]
    check.take(record, seen(), 101_001.0)
    assert check.warning(101_001.0) == "", "they are gone"


def test_a_job_that_holds_other_gpus_than_it_was_given_is_told_after_a_minute():
    runs = job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
    record = round_of([runs], {"1": on("t4", t4_00=4)})
    assert warnings(record, seen(runs), *LONG) == [False, False, True, True, True]


def test_a_new_round_does_not_start_the_minute_anew():
    lost, check = job("1"), PlanCheck()
    for number in range(10):
        check.take(round_of([lost], {"1": on("t4", t4_00=1 + number % 2)}), seen(lost), 1000.0 + 20 * number)
    assert check.warning(1180.0)


@pytest.mark.parametrize("pause_s", [5.0, 300.0])
def test_a_move_may_take_as_long_as_it_usually_does(pause_s):
    stops = {"1": Stop(StopCode.GAIN, "why")}
    stopping = job("1", phase=Phase.STOPPING, allocation=on("t4", t4_00=2), pauses_s=(pause_s, 1.0))
    usual_s = max(pause_s, COST_S)
    for phase in (Phase.STOPPING, Phase.RUNNING):
        state = seen(dataclasses.replace(stopping, phase=phase))
        record = round_of([stopping], {"1": on("t4", t4_01=4)}, stops=stops)
        assert warnings(record, state, 0.0, usual_s + PATIENCE_S - 1, usual_s + PATIENCE_S + 1) == [False, False, True]


def test_a_job_that_waits_for_another_one_to_leave_its_gpus_is_no_difference():
    first = job("1", phase=Phase.STOPPING, allocation=on("t4", t4_00=4), pauses_s=(50_000.0,))
    record = round_of([first, job("2")], {"2": on("t4", t4_00=4)})
    assert warnings(record, seen(first, job("2")), 0.0, 40_000.0) == [False, False]
    gone = seen(job("1"), job("2"))
    assert warnings(record, gone, 0.0, 40_000.0) == [False, True]


RUNS = job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=2))


@pytest.mark.parametrize(
    ("jobs", "given", "more"),
    [
        ([RUNS], {"1": on("t4", t4_00=2)}, {}),
        ([dataclasses.replace(RUNS, phase=Phase.STARTING)], {"1": on("t4", t4_00=2)}, {}),
        ([job("1")], {}, {}),
        ([RUNS], {}, {}),  # it came to run after the round, and no round has a reason to stop it
        ([dataclasses.replace(RUNS, leaving=True)], {"1": on("t4", t4_01=4)}, {}),
        ([RUNS], {"1": on("t4", t4_00=1)}, {"shared": (SharedGpus("t4-00", 1, (Pack(("1",)),)),)}),
    ],
    ids=["runs", "starts", "waits", "came since", "cleans up", "shares"],
)
def test_what_goes_as_usual_is_never_told(jobs, given, more):
    assert warnings(round_of(jobs, given, **more), seen(*jobs), *LONG) == [False] * len(LONG)


def test_jobs_of_which_the_plan_knows_nothing_and_no_plan_at_all_are_not_told():
    later = dataclasses.replace(RUNS, id="9", submit_s=2000.0)
    assert warnings(round_of([], {}), seen(later), *LONG) == [False] * len(LONG)
    check = PlanCheck()
    check.take(None, seen(RUNS), 1000.0)
    assert check.warning(1e9) == ""


@pytest.mark.parametrize("policy", sorted(REGISTRY))
def test_nothing_is_told_while_jobs_start_move_and_end_as_they_do(policy):
    """A simulated afternoon: a round a minute, a look every 10 s."""
    clock = SimulatedClock()
    jobs = [
        SimulatedJob(str(i), f"j{i}", SPEC, EstimatedJob(TableEstimator(TABLE), 2000.0), i * 100.0) for i in range(8)
    ]
    slow = Latencies(launch_s=40.0, leave_s=25.0, lost_s=5.0, pause_s=15.0, exit_s=20.0)
    cluster = SimulatedCluster(nodes_from_spec("t4:2x4,a100:1x8"), jobs, clock, latencies=slow)
    loop, _, store = simulated(0, policy, clock, cluster=cluster)
    check, start_check, told = PlanCheck(), StartCheck(), []

    class Looking(RoundListener):
        def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
            record = store.last_round()
            check.take(record, state, now_s)
            start_check.take(record, state, now_s)
            told.append(check.warning(now_s) + start_check.warning(now_s))

    loop._listeners = (Looking(),)
    while clock.now_s() < 4 * 3600:
        loop.tick()
        clock.sleep(10.0)
    assert len(told) > 1000
    assert set(told) == {""}
    assert not cluster.observe().jobs, "all jobs have run and ended"


# --- whether jobs start at all


STUCK = job("1")
TRIED = round_of([STUCK], {"1": on("t4", t4_00=2)})


def numbered(record: RoundRecord, number: int) -> RoundRecord:
    return dataclasses.replace(record, snapshot=dataclasses.replace(record.snapshot, round=number))


def given_up(each: Job) -> ClusterState:
    waits = WaitingJob(each, "waiting-cluster", "waits until 12:00 to be sent again")
    return dataclasses.replace(seen(), waiting=(waits,))


def starts(*rounds: tuple[RoundRecord, ClusterState]) -> list[bool]:
    """Whether each round, 30 s apart, is told as one of rounds in which no job starts."""
    check, told = StartCheck(), []
    for number, (record, state) in enumerate(rounds):
        for tick in range(3):
            check.take(numbered(record, number), state, 1000.0 + 30 * number + tick)
        told.append(check.warning(1002.0 + 30 * number).startswith(NONE_STARTS))
    return told


def test_three_rounds_that_start_no_job_on_free_gpus_are_told():
    in_vain, paused = (TRIED, seen(STUCK)), (round_of([], {}), given_up(STUCK))
    assert starts(*[in_vain] * 5) == [False, False, False, True, True]
    # While the job waits to be sent again, the rounds have no job to place: they count neither way.
    assert starts(in_vain, paused, in_vain, paused, in_vain, paused, in_vain) == [False] * 6 + [True]
    starting = dataclasses.replace(STUCK, phase=Phase.STARTING, allocation=on("t4", t4_00=2))
    assert starts(*[(TRIED, seen(starting))] * 4)[-1], "its own GPUs are free for it"


def test_the_rounds_of_one_moment_are_not_told():
    check = StartCheck()
    for number in range(10):
        check.take(numbered(TRIED, number), seen(STUCK), 1000.0 + number)
    assert not check.warning(1000.0 + PATIENCE_S)
    assert "in 9 rounds and " in check.warning(1001.0 + PATIENCE_S)
    assert "1 job was sent" in check.warning(1001.0 + PATIENCE_S)


OTHER = job("2", phase=Phase.RUNNING, allocation=on("t4", t4_03=1))
HOLDER = job("2", phase=Phase.RUNNING, allocation=on("t4", t4_00=3))


@pytest.mark.parametrize(
    "last",
    [
        (TRIED, seen(STUCK, OTHER)),  # another job has started
        (TRIED, seen(dataclasses.replace(STUCK, phase=Phase.RUNNING, allocation=on("t4", t4_00=2)))),
        (round_of([], {}), seen()),  # its user has cancelled it
        (round_of([], {}), dataclasses.replace(seen(), waiting=(WaitingJob(STUCK, "held", "is held by its user"),))),
    ],
    ids=["another starts", "it starts", "gone", "held"],
)
def test_a_start_ends_the_count_and_so_does_the_end_of_the_wait(last):
    in_vain = (TRIED, seen(STUCK))
    assert starts(*[in_vain] * 4, last)[-2:] == [True, False]
    assert starts(*[in_vain] * 4, last, in_vain)[-1] is False


def test_jobs_that_wait_for_gpus_or_for_nodes_to_boot_are_not_told():
    assert not any(starts(*[(TRIED, seen(STUCK, HOLDER))] * 9)), "3 of the 4 GPUs are held"
    nodes = tuple(dataclasses.replace(node, boot_s=300.0) for node in seen().nodes)
    assert not any(starts(*[(TRIED, ClusterState(nodes, (STUCK,)))] * 9))
    taken = tuple(dataclasses.replace(node, gpus_others=3) for node in seen().nodes)
    assert not any(starts(*[(TRIED, ClusterState(taken, (STUCK,)))] * 9)), "jobs of Slurm alone hold them"
    assert not any(starts(*[(round_of([STUCK], {}), seen(STUCK))] * 9)), "no round has placed it"
