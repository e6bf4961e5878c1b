"""Plans: GPUs that they allocate, and whether the solver was cut short."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import (
    Assignment,
    Configuration,
    Pack,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    SharedGpus,
    SolveReport,
    SolveStatus,
)
from tests.scheduler.builders import on


def given(placement: Placement) -> Assignment:
    return Assignment(placement, Reason(ReasonCode.CHOSEN, "it is its turn"), 1.0)


def report(status: SolveStatus, objective: float = 10.0, bound: float = 10.0) -> SolveReport:
    return SolveReport("highs", status, objective, bound, 0.1)


def test_a_plan_counts_each_gpu_that_it_allocates_once():
    """Job 1 has 4 + 2 GPUs and job 2 has 1 beside it. Jobs 3 and 4 share the same 2 GPUs of n2."""
    shared = SharedGpus("n2", 2, (Pack(("3",), gpus=2), Pack(("4",), gpus=2)))
    plan = Plan(
        1,
        {
            "1": given(on("t4", n1=4, n2=2)),
            "2": given(on("t4", n1=1)),
            "3": given(on("t4", n2=2)),
            "4": given(on("t4", n2=2)),
        },
        shared=(shared,),
    )
    assert plan.gpus_held() == {"n1": 5, "n2": 4}
    assert plan.sharing() == {"3": shared, "4": shared}
    assert plan.chosen == {
        "1": Configuration(2, 6, "t4"),
        "2": Configuration(1, 1, "t4"),
        "3": Configuration(1, 2, "t4"),
        "4": Configuration(1, 2, "t4"),
    }


def test_two_groups_of_one_node_are_counted_both():
    groups = tuple(SharedGpus("n1", gpus, (Pack((job,)),)) for gpus, job in ((1, "1"), (2, "2")))
    plan = Plan(1, {job: given(on("t4", n1=1)) for job in ("1", "2")}, shared=groups)
    assert plan.gpus_held() == {"n1": 3}


def test_an_empty_plan_allocates_nothing():
    plan = Plan(1)
    assert (plan.gpus_held(), plan.sharing(), plan.chosen) == ({}, {}, {})
    assert not plan.cut_short


@pytest.mark.parametrize("status", list(SolveStatus))
def test_only_a_time_limit_cuts_a_plan_short(status: SolveStatus):
    """A limit of nodes is the same on every machine. Only a plan that a time limit cut short replays from its record."""
    assert Plan(1, solve=report(status)).cut_short is (status is SolveStatus.TIME_LIMIT)


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(10.0, 10.0, 0.0), (10.0, 12.0, 0.2), (-10.0, -8.0, 0.2), (10.0, 9.0, 0.1), (0.0, 0.0, 0.0)],
)
def test_the_gap_is_relative_to_the_objective(objective: float, bound: float, gap: float):
    assert report(SolveStatus.NODE_LIMIT, objective, bound).gap == pytest.approx(gap)


def test_the_gap_of_an_objective_of_nearly_nothing_is_a_number():
    assert report(SolveStatus.NODE_LIMIT, 0.0, 1e-9).gap == pytest.approx(1.0)


def test_a_reason_without_an_estimate_names_no_start():
    reason = Reason(ReasonCode.WAITING_CAPACITY, "waits for a free GPU")
    assert (reason.needs, reason.estimated_start_s) == ("", None)
