"""Snapshots, and what they know of jobs."""

from __future__ import annotations

import dataclasses
from enum import Enum

import pytest
from pydantic import BaseModel

from penstock_profiles.estimators import LinearEstimator
from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile
from penstock_scheduler import model
from penstock_scheduler.model import ClusterState, JobFacts, Snapshot
from penstock_scheduler.model.flags import Flag
from penstock_scheduler.model.waiting import Ask, Averages, WaitingPolicy
from tests.scheduler.builders import job, snapshot, table

VALUES = [
    *(Flag, Ask, Averages, WaitingPolicy),
    *(
        each
        for name in model.__all__
        if isinstance(each := getattr(model, name), type) and not issubclass(each, (BaseModel, Enum, str))
    ),
]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_policy_cannot_change_or_misspell_what_it_was_given(kind: type):
    """A snapshot is stored as it was decided on; and a round of 48,000 jobs has no dict for each of them."""
    value = object.__new__(kind)
    for name in (dataclasses.fields(kind)[0].name, "misspelt"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(value, name, 1)
    assert not hasattr(value, "__dict__")


def test_a_part_of_a_snapshot_has_its_jobs_and_all_else_of_the_whole():
    whole = snapshot("t4:1x4", [job("1"), job("2"), job("3")])
    part = whole.only(each for each in whole.jobs if each.id != "2")
    assert [each.id for each in part.jobs] == ["1", "3"]
    assert dataclasses.replace(part, jobs=whole.jobs) == whole


def test_what_jobs_have_held_is_known_also_after_their_end():
    """Job 1 runs, job 2 has held nothing yet, and job 3 has just ended; an old count of job 1 does not hide the new one."""
    state = dataclasses.replace(
        snapshot("t4:1x4", [job("1"), job("2")], attained={"1": {"t4": 60.0}}),
        ended_gpu_s={"1": {"t4": 10.0}, "3": {"a100": 5.0}},
    )
    assert state.attained == {"1": {"t4": 60.0}, "3": {"a100": 5.0}}
    held = {each: state.attained_gpu_s(each) for each in ("1", "2", "3", "4")}
    assert held == {"1": {"t4": 60.0}, "2": {}, "3": {"a100": 5.0}, "4": {}}


def test_a_site_without_cloud_sharing_and_budgets_has_none():
    state = Snapshot(1, 0.0, (), (), {})
    assert state.cloud is state.sharing is None
    assert (state.budgets, state.limits, state.refused, state.ended_gpu_s, state.incumbent) == ((), (), (), {}, {})
    assert ClusterState((), ()) == ClusterState((), (), (), (), ())


MEASURED = Sensitivity(1, (1.0,), (1000.0,), ((1.0,),))
FACTS = JobFacts(
    table(t4={1: 1.0}),
    30.0,
    largest_run_gpus=4,
    unmeasured_types=("a100",),
    remaining_work=1000.0,
    attained_gpu_s={"t4": 60.0},
    sensitivity=SensitivityProfile("resnet18", (MEASURED,)),
    saves=False,
    cost_measured=True,
    starts_until_s=1100.0,
)


def test_new_gpu_seconds_change_nothing_else_that_is_known():
    assert FACTS.with_attained({"t4": 90.0}) == dataclasses.replace(FACTS, attained_gpu_s={"t4": 90.0})


@pytest.mark.parametrize(
    ("change", "by_time_only"),
    [
        ({}, True),
        ({"remaining_work": 900.0, "attained_gpu_s": {"t4": 90.0}}, True),
        ({"remaining_work": None}, True),
        ({"restart_cost_s": 31.0}, False),
        ({"starts_until_s": 0.0}, False),
        ({"largest_run_gpus": 8}, False),
        ({"unmeasured_types": ()}, False),
        ({"model": LinearEstimator()}, False),
        ({"sensitivity": None}, False),
        ({"saves": True}, False),
        ({"cost_measured": False}, False),
        ({"sensitivity": None, "remaining_work": 900.0}, False),
    ],
)
def test_only_the_work_that_was_done_is_a_matter_of_time(change: dict[str, object], by_time_only: bool):
    assert dataclasses.replace(FACTS, **change).differs_by_time_only(FACTS) is by_time_only  # type: ignore[arg-type]
