"""The next step of an action, in every state of its job: each case expects the whole step."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from penstock_profiles.wire import ControlMessage, Request, Started
from penstock_scheduler.model import (
    Hold,
    Job,
    JobSpec,
    Migrate,
    NodeChoice,
    Outcome,
    Phase,
    Placement,
    Progress,
    Share,
    Start,
    StopCode,
)
from penstock_slurm.act import steps
from penstock_slurm.act.steps import MISPLACED, STUCK, TRIES, Placing, Scope, Step, stays, step
from penstock_slurm.gateway.base import JobPlacement, Write
from penstock_slurm.observe.view import Spooled
from penstock_slurm.settings import SlurmSettings
from tests.constants import with_constants
from tests.slurm_plugin.test_states import job as slurm_job

SETTINGS = with_constants(
    SlurmSettings,
    {
        "partitions": ("p", "sky"),
        "cloud_partition": "sky",
        "start_patience_s": 60.0,
        "checkpoint_wait_s": 30.0,
        "credential_pause_s": 120.0,
    },
)
NOW_S = 1000.0
TWO = Placement("t4", "p", (Share("n0", 2), Share("n1", 2)))
OTHER = Placement("t4", "p", (Share("n2", 4),))
FREE = {"n0": 2, "n1": 2, "n2": 4}
START, MOVE, HOLD = Start("7", 5, TWO), Migrate("7", 5, OTHER), Hold("7", 5)
CONTROL = ControlMessage(job_id="7", epoch=3, round=4, submitted_s=10.0, submitted_to="p")
ASKED = CONTROL.model_copy(update={"request": Request(id="4-3", asked_s=990.0), "moved_s": 990.0})
READS = Started(gpu_type="t4", gpu_ids={})
DEAF = Started(gpu_type="t4", gpu_ids={}, answers_requests=False)
BY_SIGNAL = Started(gpu_type="t4", gpu_ids={}, answers_requests=False, usr2="steps")


def view(phase: Phase = Phase.QUEUED, allocation: Placement | None = None) -> Job:
    return Job("7", "j", "u", JobSpec(max_gpus=4), ("p", "sky"), phase, submit_s=10.0, allocation=allocation)


def pending(**changes: Any) -> Scope:
    """The scope of a job that waits, held by Penstock. Names of Slurm's record go there, the others into the scope."""
    return _scope(slurm_job("PENDING"), view(), changes)


def running(**changes: Any) -> Scope:
    """The scope of a job that runs on `TWO`, as its second run."""
    record = dataclasses.replace(slurm_job("RUNNING", priority=9), nodes=("n0", "n1"), restarts=1, submit_s=20.0)
    return _scope(record, view(Phase.RUNNING, TWO), changes)


def _scope(record: Any, seen: Job, changes: dict[str, Any]) -> Scope:
    names = {each.name for each in dataclasses.fields(record)}
    record = dataclasses.replace(record, **{name: value for name, value in changes.items() if name in names})
    given = {"free": FREE, "job": seen, "spooled": Spooled()} | {k: v for k, v in changes.items() if k not in names}
    return Scope(slurm=record, now_s=NOW_S, **given)


def under_way(action: Any, text: str, *writes: Write, **more: Any) -> Step:
    return Step(Outcome(action, Progress.UNDER_WAY, text), writes, **more)


def new_run(**changes: Any) -> ControlMessage:
    """The control message of a job's first run on `TWO`."""
    fields: dict[str, Any] = {"job_id": "7", "epoch": 0, "round": 5, "gpu_type": "t4", "nodes": 2, "gpus": 4}
    fields |= {"submitted_s": 10.0, "submitted_to": "p", "holds": 0}
    return ControlMessage(**(fields | changes))


def place(**changes: Any) -> Write:
    fields: dict[str, Any] = {"partition": "p", "nodes": ("n0", "n1"), "gpus_per_node": 2, "tasks": 2, "cpus": 2}
    return Write("7", "place", JobPlacement(**(fields | changes)))


def sent(scope: Scope, action: Placing = START) -> tuple[Write, ...]:
    return step(action, scope, SETTINGS).writes


def told(scope: Scope, action: Placing = START) -> ControlMessage:
    control = step(action, scope, SETTINGS).control
    assert control is not None
    return control


RELEASE = Write("7", "release")
HELD_BACK = Write("7", "hold")
WAITS = "waits for Slurm to start it"


# --- a job that waits


def test_a_job_that_waits_is_told_placed_and_released():
    assert step(START, pending(), SETTINGS) == under_way(
        START, WAITS, place(), RELEASE, control=new_run(), new_run=True, freed={"n0": -2, "n1": -2}
    )


def test_a_job_is_placed_on_a_single_node():
    one = Start("7", 5, OTHER)
    assert sent(pending(), one) == (place(nodes=("n2",), gpus_per_node=4, tasks=1, cpus=1), RELEASE)
    assert told(pending(), one) == new_run(nodes=1)


def test_a_job_that_slurm_may_start_is_held_before_it_is_placed():
    scope = pending(priority=9)
    assert sent(scope) == (HELD_BACK, place(), RELEASE)
    assert told(scope) == new_run(holding=0)
    assert told(pending()).holding is None


def test_a_job_needs_all_its_gpus_on_each_node():
    short = step(START, pending(free={"n0": 2, "n1": 1}), SETTINGS)
    assert short == under_way(START, "waits for GPUs that another job still holds")
    assert step(START, pending(free={"n0": 2}), SETTINGS) == short, "nothing is free on a node that is not listed"
    assert step(START, pending(free={"n1": 2}), SETTINGS) == short


def test_gpus_that_are_counted_for_the_job_where_it_was_sent_before_count_as_free():
    before = Placement("t4", "p", (Share("n0", 1), Share("n3", 3)))
    scope = pending(job=view(Phase.STARTING, before), free={"n0": 1, "n1": 2}, priority=9)
    found = step(START, scope, SETTINGS)
    assert found.freed == {"n0": -1, "n3": 3, "n1": -2}
    assert step(START, dataclasses.replace(scope, free={"n0": 0, "n1": 2}), SETTINGS).writes == ()
    cleared = pending(job=view(Phase.STARTING, before), free={"n0": 1, "n1": 2}, gpus_per_node=None)
    assert step(START, cleared, SETTINGS).writes == (), "Slurm counts no GPUs for a cleared job"


def test_a_cleared_job_gets_its_gpus_back_and_counts_as_sharing_until_then():
    scope = pending(gpus_per_node=None)
    assert step(START, scope, SETTINGS).freed == {"n0": -2, "n1": -2}
    assert told(scope) == new_run(shares=True)


def test_a_job_that_shares_is_placed_without_gpus_and_goes_first():
    first = Write("7", "put_first")
    found = step(START, pending(shares=True, free={}), SETTINGS)
    assert found.writes == (place(gpus_per_node=0), RELEASE, first)
    assert (found.control, found.freed, found.new_run) == (new_run(shares=True), {}, True)
    assert sent(pending(shares=True, stand_in=True)) == (place(gpus_per_node=0, stand_in=True), RELEASE, first)
    assert sent(pending(stand_in=True)) == (place(), RELEASE), "a stand-in is for jobs that share"
    waits = step(START, pending(shares=True, kept_back="waits for a group"), SETTINGS)
    assert waits == under_way(START, "waits for a group")
    assert sent(pending(kept_back="waits for a group")) == (place(), RELEASE)


@pytest.mark.parametrize("tries", [TRIES, TRIES + 1])
def test_a_job_that_slurm_refuses_too_often_fails_this_round(tries: int):
    found = step(START, pending(tries=tries, reason="BadConstraints"), SETTINGS)
    text = f"Slurm refused the placement {tries} times: BadConstraints"
    assert found == Step(Outcome(START, Progress.FAILED, text))
    assert sent(pending(tries=TRIES - 1)) == (place(), RELEASE)
    assert TRIES == 3


def test_a_requeued_job_pauses_until_slurm_has_forgotten_its_credential():
    early = step(START, pending(restarts=1, revoked_for_s=119.9), SETTINGS)
    assert early == under_way(START, "pauses until Slurm has forgotten the credential of its last run")
    assert sent(pending(restarts=1, revoked_for_s=120.0)) == (place(), RELEASE)
    assert sent(pending(restarts=0, revoked_for_s=0.0)) == (place(), RELEASE)


def test_an_element_that_shares_its_array_s_record_is_split_first():
    found = step(START, pending(one_record=True), SETTINGS)
    assert found == under_way(START, "is taken out of its array", Write("7", "split"))


def test_a_job_that_was_sent_there_already_is_awaited():
    there = {"job": view(Phase.STARTING, TWO), "priority": 9}
    assert step(START, pending(**there, released_s=940.1), SETTINGS) == under_way(START, WAITS)
    emptied = step(START, pending(**there, released_s=0.0, makes_room=True), SETTINGS)
    assert emptied.outcome.progress is Progress.UNDER_WAY, "Slurm may take its time to stop plain jobs for it"
    elsewhere = pending(job=view(Phase.STARTING, OTHER), priority=9)
    assert sent(elsewhere) == (HELD_BACK, place(), RELEASE)
    assert sent(pending(job=view(Phase.QUEUED, TWO))) == (place(), RELEASE), "it is held, and was sent nowhere"


def test_a_job_that_slurm_does_not_start_in_time_is_held_and_fails():
    late = pending(job=view(Phase.STARTING, TWO), priority=9, released_s=940.0, reason="Resources", restarts=1)
    text = "Slurm did not start it in 60 s: Resources"
    noted = ControlMessage(job_id="7", epoch=0, round=5, submitted_s=0.0, submitted_to="p", holds=1, holding=1)
    assert step(START, late, SETTINGS) == Step(Outcome(START, Progress.FAILED, text), (HELD_BACK,), noted)
    held = dataclasses.replace(late, slurm=dataclasses.replace(late.slurm, priority=0))
    assert step(START, held, SETTINGS) == Step(Outcome(START, Progress.FAILED, text))


@pytest.mark.parametrize(
    ("reason", "after_s", "shares", "fails"),
    [
        ("Resources", 10.0, False, True),
        ("Resources", 9.9, False, False),
        ("Priority", 59.9, False, False),
        ("None", 59.9, False, False),
        ("None", 60.0, False, True),
        ("Resources", 59.9, True, False),
    ],
)
def test_nodes_that_lack_something_in_slurm_s_view_are_given_up_after_ten_seconds(
    reason: str, after_s: float, shares: bool, fails: bool
) -> None:
    """The book of a round may not count it. A job that shares GPUs waits for a placeholder job to give way."""
    sent_s = NOW_S - after_s
    late = pending(job=view(Phase.STARTING, TWO), priority=9, released_s=sent_s, reason=reason, shares=shares)
    assert (step(START, late, SETTINGS).outcome.progress is Progress.FAILED) is fails


def test_a_job_is_not_sent_again_to_nodes_that_did_not_start_it():
    """The plan is older than the attempt in vain. The next round finds other nodes."""
    for tried, writes in ((TWO.nodes[:1], False), (("n2",), True)):
        seen = dataclasses.replace(view(), nodes=NodeChoice(tried=frozenset(tried)))
        assert bool(step(START, pending(job=seen), SETTINGS).writes) is writes


def test_the_cloud_takes_its_own_time_to_boot_a_node():
    cloud = Placement("t4", "sky", TWO.shares)
    late = pending(job=view(Phase.STARTING, cloud), priority=9, released_s=0.0)
    action = Start("7", 5, cloud)
    assert step(action, late, SETTINGS) == under_way(action, WAITS)


@pytest.mark.parametrize(("priority", "writes"), [(0, ()), (9, (HELD_BACK,))])
def test_a_pending_job_that_is_to_be_held_is_held_once(priority: int, writes: tuple[Write, ...]):
    found = step(HOLD, pending(priority=priority, spooled=Spooled(CONTROL), restarts=2), SETTINGS)
    noted = CONTROL.model_copy(update={"holds": 2, "holding": 2}) if writes else None
    assert found == Step(Outcome(HOLD, Progress.DONE), writes, noted)


# --- the control message of its next run


def test_the_time_limit_of_the_next_run_is_noted_with_the_run_it_is_for():
    scope = pending(limit_s=600.0, restarts=1, revoked_for_s=120.0)
    assert told(scope) == new_run(time_limit_s=600.0, time_limit_restarts=1, holds=1)
    assert sent(scope) == (place(time_limit_s=600.0), RELEASE)
    endless = pending(limit_s=math.inf)
    assert told(endless) == new_run()
    assert sent(endless) == (place(time_limit_s=math.inf), RELEASE)


def test_what_the_submission_said_is_kept_from_the_first_control_message_on():
    before = CONTROL.model_copy(
        update={"submitted_to": "q", "submitted_limit_s": 77.0, "moved_s": 5.0, "pauses_s": (1.0, 2.0)}
    )
    scope = pending(spooled=Spooled(before), time_limit_s=99.0)
    assert told(scope) == new_run(submitted_to="q", submitted_limit_s=77.0, moved_s=5.0, pauses_s=(1.0, 2.0))
    assert told(pending(spooled=Spooled(CONTROL), time_limit_s=99.0)).submitted_limit_s == 99.0
    assert told(pending(time_limit_s=99.0)) == new_run(submitted_limit_s=99.0)
    again = pending(time_limit_s=99.0, restarts=1, revoked_for_s=120.0)
    assert told(again).submitted_limit_s is None, "after its first run, Slurm's record has what was left of the limit"
    assert told(pending(job=dataclasses.replace(view(), partitions=()))).submitted_to is None


def test_an_element_of_an_array_is_told_its_number_in_slurm():
    assert told(pending(array_job_id=7, number=12)).slurm_job == "12"
    assert told(pending(number=12)).slurm_job is None


def test_cpus_and_memory_that_come_with_the_gpus_are_placed_and_noted():
    given = Start("7", 5, Placement("t4", "p", (Share("n0", 2, 6, 900), Share("n1", 2, 6, 900))))
    assert told(pending(), given) == new_run(cpus=6, memory_mb=900)
    wanted = place(cpus=12, cpus_per_task=6, memory_mb_per_node=900)
    assert sent(pending(), given) == (wanted, RELEASE)


# --- how tasks and CPUs follow the GPUs


def asks(**numbers: int) -> dict[str, Any]:
    """A record with the note on what the header of its script requests."""
    return {"admin_comment": json.dumps({"penstock": {"max_gpus": 4}, "penstock_request": numbers})}


def test_tasks_follow_the_gpus_of_a_node():
    assert sent(pending(**asks(tasks=3, gpus=1))) == (place(tasks=12, cpus=12, tasks_per_node=6), RELEASE)
    two_cpus = pending(**asks(tasks=1, gpus=1), cpus_per_task=2)
    assert sent(two_cpus) == (place(tasks=4, cpus=8, tasks_per_node=2), RELEASE)


def test_cpus_of_a_task_follow_the_gpus_of_a_node():
    assert sent(pending(**asks(cpus=8, node_gpus=4))) == (place(cpus=8, cpus_per_task=4, tasks_per_node=1), RELEASE)
    both = pending(**asks(tasks=1, gpus=1, cpus=8, node_gpus=4))
    assert sent(both) == (place(tasks=4, cpus=16, cpus_per_task=4, tasks_per_node=2), RELEASE)


def test_memory_follows_the_gpus_of_a_node():
    assert sent(pending(**asks(memory_mb=1000, node_gpus=4))) == (place(memory_mb_per_node=500), RELEASE)


def test_cpus_that_come_with_the_gpus_are_divided_among_the_tasks_and_each_task_has_one():
    shares = (Share("n0", 2, 7), Share("n1", 2, 7))
    given = Start("7", 5, Placement("t4", "p", shares))
    three = place(tasks=4, cpus=14, cpus_per_task=3, tasks_per_node=2)
    assert sent(pending(**asks(tasks=1, gpus=1)), given) == (three, RELEASE)
    few = place(tasks=16, cpus=16, cpus_per_task=1, tasks_per_node=8)
    assert sent(pending(**asks(tasks=4, gpus=1)), given) == (few, RELEASE)


# --- begin times


def plain(**changes: Any) -> Scope:
    """The scope of a job that a begin time keeps back, after which Slurm may start it."""
    shape = {"partition": "p", "nodes": 1, "gpus_per_node": 2}
    comment = json.dumps({"penstock": {"max_gpus": 4}, "penstock_plain": shape})
    return pending(**({"priority": 9, "eligible_s": NOW_S + 1, "admin_comment": comment} | changes))


def test_a_placement_ends_a_begin_time_that_keeps_the_job_back_and_the_job_needs_no_release():
    assert sent(plain()) == (place(ends_begin=True),)
    assert told(plain()).holding is None
    assert sent(plain(eligible_s=NOW_S)) == (HELD_BACK, place(), RELEASE)
    assert sent(plain(shares=True)) == (place(gpus_per_node=0, ends_begin=True), Write("7", "put_first"))


# --- a job that runs


@pytest.mark.parametrize("state", ["COMPLETING", "STAGE_OUT"])
@pytest.mark.parametrize("action", [START, MOVE, HOLD])
def test_a_job_whose_run_has_ended_is_left_alone_until_slurm_has_cleaned_up(state: str, action: Any):
    assert step(action, running(state=state), SETTINGS) == under_way(action, "saves and leaves its GPUs")


def test_a_job_without_its_gpus_is_stopped_first():
    text = "Slurm started it without its GPUs: it is stopped first"
    assert step(MOVE, running(lacks_gpus=True), SETTINGS) == under_way(MOVE, text)


def test_a_job_that_is_where_the_plan_wants_it_stays():
    stay = Step(Outcome(START, Progress.DONE, "stays where it is"))
    assert step(START, running(), SETTINGS) == stay
    assert step(START, running(spooled=Spooled(CONTROL, READS, 3)), SETTINGS) == stay, "nothing is told anew"
    withdrawn = CONTROL.model_copy(update={"round": 5, "request": None, "moved_s": None})
    found = step(START, running(spooled=Spooled(ASKED, READS, 3)), SETTINGS)
    assert found == dataclasses.replace(stay, control=withdrawn)


def test_where_a_job_stays():
    there = view(Phase.RUNNING, TWO)
    assert stays(START, there, misplaced=False)
    assert not stays(START, there, misplaced=True)
    assert not stays(HOLD, there, misplaced=False)
    assert not stays(MOVE, there, misplaced=False)
    assert not stays(START, view(Phase.RUNNING), misplaced=False)


def asked_now(control: ControlMessage, action: Any = MOVE) -> ControlMessage:
    request = Request(id=f"5-{control.epoch}", asked_s=NOW_S)
    moved_s = None if action is HOLD else NOW_S
    return control.model_copy(update={"request": request, "moved_s": moved_s, "round": 5})


SAVES = Write("7", "requeue_hold")


@pytest.mark.parametrize("action", [MOVE, HOLD])
def test_a_run_that_reads_requests_is_asked_to_save(action: Any):
    found = step(action, running(spooled=Spooled(CONTROL, READS, 3)), SETTINGS)
    assert found == under_way(action, "was asked to save", control=asked_now(CONTROL, action))


@pytest.mark.parametrize("asked_s", [970.1, 1000.0])
def test_a_run_that_was_asked_has_its_time_to_save(asked_s: float):
    control = ASKED.model_copy(update={"request": Request(id="4-3", asked_s=asked_s)})
    found = step(MOVE, running(spooled=Spooled(control, READS, 3)), SETTINGS)
    assert found == under_way(MOVE, "was asked to save"), "it is not asked twice"


@pytest.mark.parametrize(("asked_s", "waited"), [(970.0, "30"), (1000.1, "-0"), (900.0, "100")])
def test_a_run_that_does_not_save_in_time_is_stopped_with_a_message(asked_s: float, waited: str):
    """A request from the future is one of another clock: no run can be waited for by it."""
    control = ASKED.model_copy(update={"request": Request(id="4-3", asked_s=asked_s)})
    assert step(MOVE, running(spooled=Spooled(control, READS, 3)), SETTINGS) == under_way(
        MOVE,
        "gets Slurm's signals to save, leaves its GPUs",
        SAVES,
        control=control.model_copy(update={"holds": 2}),
        message=f"it did not save within {waited} s of the request, and was stopped",
    )


def test_a_run_that_has_saved_is_stopped():
    found = step(MOVE, running(spooled=Spooled(ASKED, READS, 3, saved=True)), SETTINGS)
    told = ASKED.model_copy(update={"holds": 2})
    assert found == under_way(MOVE, "has saved, leaves its GPUs", SAVES, control=told)


def test_an_answer_to_another_request_does_not_count():
    """A request to give up nodes is over when the whole run has to leave."""
    keeps = CONTROL.model_copy(update={"request": Request(id="4-3", asked_s=990.0, keep_nodes=("n0",))})
    found = step(MOVE, running(spooled=Spooled(keeps, READS, 3, saved=True)), SETTINGS)
    assert found == under_way(MOVE, "was asked to save", control=asked_now(keeps))


@pytest.mark.parametrize("present", [DEAF, None])
def test_a_run_that_reads_no_requests_is_stopped_at_once(present: Started | None):
    found = step(MOVE, running(spooled=Spooled(CONTROL, present, 3)), SETTINGS)
    told = asked_now(CONTROL).model_copy(update={"holds": 2})
    assert found == under_way(MOVE, "gets Slurm's signals to save, leaves its GPUs", SAVES, control=told)


def test_a_job_without_a_control_message_gets_one_from_its_record():
    found = step(MOVE, running(spooled=Spooled(None, DEAF, 6), partition=("q", "p")), SETTINGS)
    first = ControlMessage(job_id="7", epoch=6, round=5, submitted_s=20.0, submitted_to="q")
    assert found.control == asked_now(first).model_copy(update={"holds": 2})


def test_a_run_that_asks_for_a_signal_gets_one_for_each_request():
    found = step(MOVE, running(spooled=Spooled(CONTROL, BY_SIGNAL, 3)), SETTINGS)
    assert (found.signal, found.outcome.text) == ("steps", "was asked to save")
    again = running(spooled=Spooled(ASKED, BY_SIGNAL, 3), signalled="4-3")
    assert step(MOVE, again, SETTINGS).signal is None
    older = running(spooled=Spooled(ASKED, BY_SIGNAL, 3), signalled="3-3")
    assert step(MOVE, older, SETTINGS).signal == "steps"
    late = dataclasses.replace(older, now_s=NOW_S + 100)
    assert step(MOVE, late, SETTINGS).signal == "steps"


def test_a_job_on_a_silent_node_is_not_stopped():
    found = step(MOVE, running(silent=True, spooled=Spooled(CONTROL, DEAF, 3)), SETTINGS)
    assert found == under_way(MOVE, "waits until its nodes respond, or Slurm gives them up")


def test_a_job_stays_while_others_would_lose_the_gpus_that_it_holds_in_slurm():
    text = "waits until its GPUs are reserved for the jobs that share them"
    asked = running(spooled=Spooled(CONTROL, DEAF, 3), leaves_a_gap=True)
    assert step(MOVE, asked, SETTINGS) == under_way(MOVE, text, control=asked_now(CONTROL))
    late = running(spooled=Spooled(ASKED, BY_SIGNAL, 3), leaves_a_gap=True)
    late = dataclasses.replace(late, now_s=1020.0)
    message = "it did not save within 30 s of the request, and was stopped"
    assert step(MOVE, late, SETTINGS) == under_way(MOVE, text, signal="steps", message=message)


def test_what_is_left_of_a_time_limit_is_noted_for_the_next_run():
    for left_s in (0.0, 5.0):
        found = step(MOVE, running(spooled=Spooled(ASKED, READS, 3, saved=True), left_s=left_s), SETTINGS)
        told = ASKED.model_copy(update={"holds": 2, "time_limit_s": left_s, "time_limit_restarts": 2})
        assert found.control == told


@pytest.mark.parametrize(
    ("record", "holding", "holds"),
    [
        ({"reason": "JobHeldUser"}, None, None),
        ({"reason": "JobHeldUser"}, 1, 2),
        ({"reason": "JobHeldAdmin"}, 1, None),
        ({"priority": 0}, None, None),
    ],
)
def test_a_hold_of_somebody_else_outlives_the_run(record: dict[str, Any], holding: int | None, holds: int | None):
    """A hold of Penstock's own that came too late does not."""
    control = ASKED.model_copy(update={"holding": holding})
    found = step(MOVE, running(spooled=Spooled(control, READS, 3, saved=True), **record), SETTINGS)
    assert found.control is not None
    assert (found.control.holds, "holds" in found.control.model_fields_set) == (holds, True)


def test_a_job_that_has_to_restart_where_it_is_says_why():
    found = step(START, running(misplaced=MISPLACED, spooled=Spooled(CONTROL, READS, 3)), SETTINGS)
    wanted = under_way(START, "was asked to save", control=asked_now(CONTROL))
    assert found == dataclasses.replace(wanted, outcome=dataclasses.replace(wanted.outcome, stop=MISPLACED))
    stuck = step(START, running(misplaced=STUCK, spooled=Spooled(CONTROL, READS, 3)), SETTINGS)
    text = f"was asked to save: {STUCK.text}"
    assert stuck.outcome == dataclasses.replace(found.outcome, text=text, stop=STUCK)
    assert (MISPLACED.code, STUCK.code) == (StopCode.SHARING, StopCode.PREEMPTED)


def test_steps_and_their_scope_are_values():
    for each in (pending(), under_way(HOLD, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, None)
        assert not hasattr(each, "__dict__"), "there are thousands"
    bare_step = under_way(HOLD, "x")
    assert (bare_step.job, bare_step.new_run, bare_step.message, bare_step.signal) == ("7", False, "", None)
    assert steps.under_way(HOLD, "x", SAVES) == under_way(HOLD, "x", SAVES)
    bare = Scope(slurm_job("RUNNING"), view(), Spooled(), 0.0)
    flags = (bare.silent, bare.lacks_gpus, bare.shares, bare.stand_in, bare.leaves_a_gap, bare.one_record)
    assert (flags, bare.tries, bare.released_s, bare.revoked_for_s) == ((False,) * 6, 0, 0.0, 0.0)
