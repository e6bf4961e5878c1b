"""Outcomes are told once."""

from __future__ import annotations

from penstock_loopback.demo.simulated import MemoryStore
from penstock_scheduler.model import (
    ClusterState,
    Hold,
    Migrate,
    Outcome,
    Phase,
    Plan,
    Progress,
    Recall,
    Start,
    Stop,
    StopCode,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord, dump_round, load_round
from penstock_scheduler.rounds.outcomes import ABSENT_S, OutcomeLog
from tests.scheduler.builders import job, on, snapshot


def test_what_cluster_and_cloud_do_for_one_job_is_told_once():
    """A job that waits for its return is held on site meanwhile: the second tick tells nothing new of it."""
    store = MemoryStore()
    outcomes = OutcomeLog(store)
    both = (Outcome(Hold("1", 1), Progress.DONE), Outcome(Recall("1", 1), Progress.UNDER_WAY, "saves"))
    for _ in range(3):
        outcomes.record(Plan(1), ClusterState((), ()), both, 0.0)
    assert [outcome for _, outcome in store.outcomes] == list(both)


def test_an_action_under_way_that_its_job_needs_no_longer_is_done():
    store = MemoryStore()
    outcomes = OutcomeLog(store)
    start = Start("1", 1, on("t4", t4_00=1))
    queued, starting = job("1"), job("1", phase=Phase.STARTING)
    running = job("1", phase=Phase.RUNNING, allocation=start.placement)
    told = (Outcome(start, Progress.UNDER_WAY),)
    outcomes.record(Plan(1), ClusterState((), (queued,)), told, 1.0)
    outcomes.record(Plan(1), ClusterState((), (starting,)), told, 2.0)
    outcomes.record(Plan(1), ClusterState((), (running,)), (), 3.0)
    assert store.outcomes == [(1.0, told[0]), (3.0, Outcome(start, Progress.DONE))]


def test_a_stop_that_no_round_decided_keeps_its_own_reason():
    """For example of a run that Slurm has started without its GPUs. The reason of a plan comes first."""
    store = MemoryStore()
    own, planned = Stop(StopCode.NO_GPUS, "no GPUs"), Stop(StopCode.GAIN, "faster")
    hold = Outcome(Hold("1", 1), Progress.DONE, "held", own)
    OutcomeLog(store).record(Plan(1), ClusterState((), ()), (hold,), 0.0)
    OutcomeLog(store).record(Plan(1, stops={"1": planned}), ClusterState((), ()), (hold,), 1.0)
    assert [outcome.stop for _, outcome in store.outcomes] == [own, planned]


def test_a_stop_that_no_round_decided_is_returned_once():
    """Each tick repeats the outcome until the job has left. Another stop of the job is a new one."""
    outcomes = OutcomeLog(MemoryStore())
    own, other = Stop(StopCode.NO_GPUS, "no GPUs"), Stop(StopCode.RECALL, "back")
    saves, leaves = (Outcome(Hold("1", 1), Progress.UNDER_WAY, text, own) for text in ("saves", "leaves"))
    gone = Outcome(Hold("1", 1), Progress.UNDER_WAY, "saves", other)
    found = [
        outcomes.record(plan, ClusterState((), ()), told, 0.0)
        for plan, told in (
            (Plan(1), (saves,)),
            (Plan(1), (saves,)),
            (Plan(1), (leaves,)),
            (Plan(1), ()),
            (Plan(1), (saves,)),
            (Plan(1), (gone,)),
            (Plan(1, stops={"1": own}), (saves,)),
        )
    ]
    assert found == [{"1": own}, {}, {}, {}, {"1": own}, {"1": other}, {}]


def test_a_job_that_saves_keeps_the_reason_of_the_round_that_stopped_it():
    """The next round sends it elsewhere, and has no other reason. After its end the reason is forgotten."""
    store = MemoryStore()
    outcomes = OutcomeLog(store)
    there, why = on("t4", t4_00=1), Stop(StopCode.GAIN, "faster")
    running, saving = (job("1", phase=phase, allocation=there) for phase in (Phase.RUNNING, Phase.STOPPING))
    asked = Outcome(Hold("1", 1), Progress.UNDER_WAY, "was asked to save")
    left = Outcome(Migrate("1", 2, on("t4", t4_01=1)), Progress.UNDER_WAY, "has saved, leaves its GPUs")
    outcomes.record(Plan(1, stops={"1": why}), ClusterState((), (running,)), (asked,), 1.0)
    outcomes.record(Plan(2), ClusterState((), (saving,)), (left,), 2.0)
    outcomes.record(Plan(3), ClusterState((), (job("1"),)), (), 3.0)
    outcomes.record(Plan(4), ClusterState((), (saving,)), (left,), 4.0)
    assert [outcome.stop for _, outcome in store.outcomes if outcome.text] == [why, why, None]


THERE = on("t4", t4_00=1)
WHY = Stop(StopCode.GAIN, "faster")
RUNNING, SAVING = (job("1", phase=phase, allocation=THERE) for phase in (Phase.RUNNING, Phase.STOPPING))
LEFT = Outcome(Migrate("1", 3, on("t4", t4_01=1)), Progress.UNDER_WAY, "has saved, leaves its GPUs")


def test_the_reason_of_a_stop_outlives_the_daemon():
    """It is in the record of the round that stopped the job, and in those of the rounds while the job saves."""
    saving = ClusterState((), (SAVING,))
    first = RoundRecord(snapshot((), (RUNNING,)), PolicyChoice(name="fifo"), Plan(1, stops={"1": WHY}))
    second = RoundRecord(
        snapshot((), (SAVING,)), first.policy, Plan(2), stopping=OutcomeLog(MemoryStore(), first).stopping(saving)
    )
    for last in (first, second):
        store = MemoryStore()
        again = OutcomeLog(store, load_round(dump_round(last), "here"))
        again.decided(Plan(3), again.stopping(saving))
        again.record(Plan(3), saving, (LEFT,), 1.0)
        assert [outcome.stop for _, outcome in store.outcomes] == [WHY]


def test_a_stop_whose_tick_failed_keeps_its_reason():
    """Slurm went away after the job was asked to save, so the tick recorded no outcome; then another round was decided."""
    store = MemoryStore()
    outcomes = OutcomeLog(store)
    outcomes.decided(Plan(1, stops={"1": WHY}), {})
    saving = ClusterState((), (SAVING,))
    outcomes.decided(Plan(2), outcomes.stopping(saving))
    outcomes.record(Plan(2), saving, (LEFT,), 1.0)
    assert [outcome.stop for _, outcome in store.outcomes] == [WHY]


def test_a_stop_keeps_its_reason_while_its_job_is_out_of_sight():
    """For ten minutes, during which a round may be decided and other jobs may have outcomes."""
    other = Outcome(Hold("2", 2), Progress.UNDER_WAY, "saves")
    for away_s, expected in ((ABSENT_S - 1, WHY), (ABSENT_S + 1, None)):
        store = MemoryStore()
        outcomes = OutcomeLog(store)
        outcomes.decided(Plan(1, stops={"1": WHY}), {})
        outcomes.record(Plan(1, stops={"1": WHY}), ClusterState((), (RUNNING,)), (), 0.0)
        for at_s in (1.0, away_s):
            nobody = ClusterState((), ())
            outcomes.decided(Plan(2), outcomes.stopping(nobody))
            outcomes.record(
                Plan(2), nobody, (other if at_s == 1.0 else Outcome(other.action, Progress.DONE),), at_s + 1.0
            )
        outcomes.record(Plan(2), ClusterState((), (SAVING,)), (LEFT,), away_s + 2.0)
        assert store.outcomes[-1][1].stop == expected
