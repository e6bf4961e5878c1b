"""Waiting budgets count time in the queue only, over all runs of a job."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock_scheduler.burst.deciding.choices import leaves_s
from penstock_scheduler.burst.manager.book import QueueTime, counted, returned
from penstock_scheduler.model import CloudState, Job, Phase
from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from tests.scheduler.builders import job, snapshot, table

HOUR = 3600.0


def at(phase: Phase, **fields: Any) -> Job:
    return dataclasses.replace(job("j", submit_s=0.0), phase=phase, **fields)


def test_a_job_that_is_preempted_after_27_hours_of_running_has_not_waited_them():
    """An hour in the queue, 27 hours of running, and then it is queued again: an hour of its two is over."""
    known = counted({}, [at(Phase.QUEUED)], 0.0)
    known = counted(known, [at(Phase.RUNNING, started_s=HOUR)], HOUR + 5)
    known = counted(known, [at(Phase.QUEUED, requeued_s=28 * HOUR)], 28 * HOUR)
    state = snapshot("t4:1x4", [at(Phase.QUEUED)], {"j": table(t4={1: 1.0})}, time_s=28 * HOUR)
    since_s = known["j"].waits_since_s(0.0, 28 * HOUR)
    cloud = CloudState(waiting=WaitingPolicy(Wait.CONSTANT, 2.0), waits_since_s={"j": since_s})
    assert leaves_s(state.jobs[0], dataclasses.replace(state, cloud=cloud)) == 29 * HOUR


def test_without_a_record_a_job_counts_from_its_return_to_the_queue():
    state = snapshot("t4:1x4", [at(Phase.QUEUED, requeued_s=28 * HOUR)], {"j": table(t4={1: 1.0})}, time_s=28 * HOUR)
    state = dataclasses.replace(state, cloud=CloudState(waiting=WaitingPolicy(Wait.CONSTANT, 2.0)))
    assert leaves_s(state.jobs[0], state) == 30 * HOUR
    known = counted({}, state.jobs, 28 * HOUR + 9)
    assert known["j"].waits_since_s(0.0, 28 * HOUR + 9) == 28 * HOUR


def test_the_time_of_a_job_that_waits_stands_still():
    """A round in which nothing but the time has changed must look the same."""
    known = counted({}, [at(Phase.QUEUED)], 0.0)
    later = counted(known, [at(Phase.QUEUED)], 50.0)
    assert later["j"] is known["j"]
    assert later["j"].waits_since_s(0.0, 50.0) == 0.0
    assert QueueTime(out_s=1.0, left_s=10.0).waits_since_s(100.0, 30.0) == 121.0


def test_a_job_that_comes_back_from_the_cloud_begins_to_wait_then():
    back = returned(at(Phase.QUEUED), 500.0)
    assert back.waits_since_s(0.0, 900.0) == 500.0
    assert counted({"j": back}, [], 1000.0) == {}, "jobs that are gone are forgotten"
