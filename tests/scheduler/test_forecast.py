"""What a round would decide with one more job: by hand, on one node of 4 T4s. The time is 1000 s."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import Adaptivity, BudgetLine, CloudState, Job, JobFacts, Offer, Phase, ReasonCode
from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from penstock_scheduler.rounds.forecast import ask, describe, with_job
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, on, snapshot, table

FAST = table(t4={1: 10, 2: 19, 4: 36})


def rigid(name: str, gpus: int, **fields: object) -> Job:
    return job(name, adaptivity=Adaptivity.RIGID, min_gpus=gpus, max_gpus=gpus, **fields)


def test_the_start_is_estimated_by_the_time_limit_of_the_job_that_holds_the_gpus() -> None:
    """The holder has run 0 s of its 600, so that its GPUs come free at 1600. Without a limit the start is not known."""
    policy, _ = make_policy("sia")
    for limit_s, start_s in ((600, 1600.0), (None, None)):
        holder = rigid(
            "a", 4, phase=Phase.RUNNING, allocation=on("t4", t4_00=4), preemptible=False, time_limit_s=limit_s
        )
        seen = with_job(snapshot("t4:1x4", [holder], {"a": FAST}), rigid("new", 2), {"new": JobFacts(FAST, 30)}, ())
        answer = ask(policy, seen, "new")
        assert answer.assignment is None
        assert answer.reason.code is ReasonCode.WAITING_CAPACITY
        assert (answer.start_s, answer.others) == (start_s, {})


def test_a_forecast_names_the_jobs_that_would_have_less() -> None:
    """Two alike share the four GPUs that one of them holds."""
    policy, _ = make_policy("sia")
    holder = job("a", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=4))
    seen = with_job(snapshot("t4:1x4", [holder], {"a": FAST}), job("new", max_gpus=4), {"new": JobFacts(FAST, 30)}, ())
    answer = ask(policy, seen, "new")
    assert answer.assignment is not None
    assert answer.assignment.placement.gpus == 2
    ((name, (before, after)),) = answer.others.items()
    assert name == "a"
    assert before is not None
    assert after is not None
    assert (before.placement.gpus, after.placement.gpus) == (4, 2)
    assert answer.start_s == 1000.0


@pytest.mark.parametrize(("wait_h", "leaves"), [(0.0, True), (2.0, False)])
def test_a_forecast_says_when_a_job_leaves_for_the_cloud_and_for_how_much(wait_h: float, leaves: bool) -> None:
    """All GPUs are held. An hour on site is an hour there, at $3 an hour, and the margin is a quarter."""
    policy, _ = make_policy("fifo")
    holder = rigid("a", 4, phase=Phase.RUNNING, allocation=on("t4", t4_00=4), preemptible=False)
    new = rigid("new", 2, burst="allowed", runtime_s=3600.0, submit_s=1000.0)
    seen = with_job(snapshot("t4:1x4", [holder], {"a": FAST}), new, {"new": JobFacts(FAST, 30)}, ())
    cloud = CloudState(
        offers=(Offer("vm", "t4", 1, 2, 3.0, boot_s=0.0),),
        budgets=(BudgetLine("", "total", 100.0, 0.0),),
        waiting=WaitingPolicy(Wait.CONSTANT, wait_h),
    )
    answer = ask(policy, dataclasses.replace(seen, cloud=cloud), "new")
    assert answer.assignment is None
    assert answer.leaves is leaves
    text = " ".join(describe(answer, 1000.0))
    assert "2 t4 (vm, $3.00/h)" in text
    assert "for about $3.00, at most $3.75" in text
    told = "The job would leave for the cloud" if leaves else "It may leave for the cloud in 2.0 h"
    assert told in text
