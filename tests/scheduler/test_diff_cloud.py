"""What is left to do in the cloud; and how a change of GPUs on site is told from a move."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import (
    Assignment,
    BurstJob,
    CloudAssignment,
    CloudRun,
    Job,
    Migrate,
    Offer,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Recall,
    Resize,
    Stop,
    StopCode,
)
from penstock_scheduler.rounds.diff import actions, cloud_actions, concerned
from tests.scheduler.builders import job, on

OFFER = Offer("g5.12xlarge@b", "a10g", 1, 4, 5.0)
WHY = Reason(ReasonCode.CHOSEN, "why")
GAIN = Stop(StopCode.GAIN, "why")
HERE = on("t4", t4_00=2)


def leaving(*names: str, stays: bool = False, recalls: tuple[str, ...] = ()) -> Plan:
    bursts = {name: CloudAssignment(OFFER, 3.0, WHY, stays) for name in names}
    return Plan(7, {}, {}, bursts, recalls=dict.fromkeys(recalls, WHY))


@pytest.mark.parametrize(
    ("waiting", "leaves"),
    [
        (job("a"), True),
        (job("a", phase=Phase.STARTING), False),
        (job("a", phase=Phase.RUNNING, allocation=HERE), False),
        (job("a", phase=Phase.QUEUED, allocation=HERE), False),
        (job("a", phase=Phase.STOPPING, allocation=HERE), False),
    ],
    ids=["queued", "starting", "running", "queued, and its GPUs are not free yet", "stopping"],
)
def test_a_job_leaves_for_the_cloud_only_while_it_waits_without_gpus(waiting: Job, leaves: bool):
    expected = (BurstJob("a", 7, OFFER.id, 3.0),) if leaves else ()
    assert cloud_actions(leaving("a"), [waiting], []) == expected


def test_a_job_that_is_away_or_was_away_before_the_round_is_not_ordered_again():
    assert cloud_actions(leaving("a"), [job("a")], [CloudRun("a", OFFER, 0.0, 3.0)]) == ()
    assert cloud_actions(leaving("a", stays=True), [job("a")], []) == ()


def test_recalls_come_first_in_order_and_only_for_jobs_that_are_away():
    plan = leaving("b", "a", recalls=("z", "y", "home"))
    runs = [CloudRun(name, OFFER, 0.0, 3.0) for name in "zy"]
    found = cloud_actions(plan, [job("a"), job("b"), job("home")], runs)
    assert found == (Recall("y", 7), Recall("z", 7), BurstJob("a", 7, OFFER.id, 3.0), BurstJob("b", 7, OFFER.id, 3.0))


def test_a_job_that_is_recalled_does_not_leave_in_the_same_round():
    assert cloud_actions(leaving("a", recalls=("a",)), [job("a")], []) == ()


@pytest.mark.parametrize(
    ("wanted", "action"),
    [
        (on("t4", t4_00=4), Resize),
        (on("t4", t4_00=1), Resize),
        (on("t4", t4_01=2), Migrate),
        (on("a100", a100_00=4), Migrate),
        (on("k80", k80_00=4), Migrate),
    ],
    ids=["more GPUs", "fewer GPUs", "as many elsewhere", "a later type", "an earlier type"],
)
def test_another_number_of_gpus_of_one_type_is_a_resize_and_all_else_a_move(wanted: Placement, action: type):
    running = job("a", phase=Phase.RUNNING, allocation=HERE)
    assert actions(Plan(7, {"a": Assignment(wanted, WHY, 1.0)}, stops={"a": GAIN}), [running]) == (
        action("a", 7, wanted),
    )


def test_a_plan_concerns_what_it_gives_sends_or_recalls_and_all_that_is_not_in_the_queue():
    plan = leaving("leaves", recalls=("recalled",))
    plan = dataclasses.replace(plan, assignments={"given": Assignment(on("t4", t4_00=1), WHY, 1.0)})
    running = job("runs", phase=Phase.RUNNING, allocation=on("t4", t4_01=1))
    jobs = [running, *(job(name) for name in ("given", "leaves", "recalled", "stays"))]
    assert [each.id for each in concerned(plan, jobs)] == ["runs", "given", "leaves", "recalled"]
