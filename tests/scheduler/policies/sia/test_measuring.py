"""Measuring new jobs on one GPU of each type."""

import dataclasses
from typing import Any

import pytest

from penstock_scheduler.model import Configuration, Job, Node, Phase, ReasonCode, Snapshot
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings
from tests.scheduler.builders import job, on, snapshot, table, with_facts

sia = Sia(SiaSettings(measure_gpu_s=20))
THREE = "a100:1x4,rtx:1x4,t4:1x4"
ALL = ("a100", "rtx", "t4")


def nodes(*of: tuple[str, str, int, tuple[str, ...], str]) -> tuple[Node, ...]:
    """(name, type, GPUs, partitions, reservation) each."""
    return tuple(Node(name, kind, gpus, inside, reservation=kept) for name, kind, gpus, inside, kept in of)


def new(where: str | None, *unknown: str, nodes: str = THREE, others: tuple[Job, ...] = (), **more: Any) -> Snapshot:
    """A job that has, or waits for, one GPU, and of which these types are unknown; 100 s after it came."""
    attained = more.pop("attained", {})
    models = {"j": more.pop("model")} if "model" in more else {}
    held = {"phase": Phase.RUNNING, "allocation": on(where, **{f"{where}_00": 1})} if where else {}
    state = snapshot(nodes, [job("j", submit_s=900.0, **held, **more), *others], models, attained={"j": attained})
    return with_facts(state, unmeasured_types={"j": unknown}, largest_run_gpus={"j": 1 if where else 0})


def test_a_new_job_is_measured_on_one_gpu_of_each_type_before_it_grows():
    """It comes, reports from A100, then from RTX, then from T4: one GPU each time, and two when all is known."""
    first = sia.decide(new(None, *ALL)).assignments["j"]
    assert first.configuration == Configuration(1, 1, first.placement.gpu_type)
    assert (first.reason.code, first.reason.text) == (
        ReasonCode.MEASURING,
        f"is to be measured on {first.placement.gpu_type}, 1 of 3 types",
    )
    silent_yet = sia.decide(new("rtx", *ALL)).assignments["j"]
    assert (silent_yet.configuration, silent_yet.reason.text) == (
        Configuration(1, 1, "rtx"),
        "being measured on rtx, 1 of 3 types",
    )
    second = sia.decide(new("rtx", "t4")).assignments["j"]
    assert (second.configuration, second.reason.text) == (
        Configuration(1, 1, "t4"),
        "is to be measured on t4, 3 of 3 types",
    )
    last = sia.decide(new("t4", model=table(a100={1: 9.0, 2: 16.0}, rtx={1: 2.0}, t4={1: 1.0}))).assignments["j"]
    assert last.configuration == Configuration(1, 2, "a100")
    assert last.reason.code is ReasonCode.CHOSEN


def test_a_type_that_the_model_says_nothing_of_is_open_to_a_job_that_is_measured():
    """Two GPUs that are known would be better at once; and without measuring it would never know the third type."""
    model = table(rtx={1: 2.0, 2: 4.0}, t4={1: 1.0, 2: 2.0})
    state = new("t4", "a100", model=model)
    assert sia.decide(state).chosen == {"j": Configuration(1, 1, "a100")}
    assert Sia(SiaSettings(measure_gpu_s=0)).decide(state).chosen["j"].gpu_type == "rtx"
    only = new(None, "a100", model=table(t4={1: 0.0}))
    assert sia.decide(only).chosen == {"j": Configuration(1, 1, "a100")}


@pytest.mark.parametrize(
    ("unlike", "why"),
    [
        ({"adaptivity": "rigid", "min_gpus": 1, "max_gpus": 1}, "its user wants it so"),
        ({"adaptivity": "fixed", "min_gpus": 1, "max_gpus": 1}, "it may not be moved"),
        ({"preemptible": False}, "it may not be moved"),
        ({"min_gpus": 2}, "it needs more than one"),
        ({"scale_unit": 2}, "it needs more than one"),
        ({"gpu_types": ("rtx",)}, "there is nothing to compare"),
        ({"attained": {"rtx": 50.0}}, "it ran for 30 s + 20 s and reported nothing"),
        ({"attained": {"t4": 540.0}}, "it is not new: three times 180 s"),
    ],
)
def test_known_and_unmovable_jobs_are_not_measured(unlike, why):
    reasons = [given.reason for given in sia.decide(new(None, "a100", "rtx", **unlike)).assignments.values()]
    assert [reason.code for reason in reasons] == [ReasonCode.CHOSEN], why
    just_so = {"attained": {"rtx": 49.0}} if "rtx" in unlike.get("attained", {}) else {"attained": {"t4": 539.0}}
    measured = sia.decide(new(None, "a100", "rtx", **just_so)).assignments["j"]
    assert measured.reason.code is ReasonCode.MEASURING, "and a job like the others is"


def test_measuring_takes_no_gpus_from_other_jobs():
    """All A100 are another's, which trains better with each: the new job stays on its T4, and grows when it is new no more."""
    other = job("o", phase=Phase.RUNNING, allocation=on("a100", a100_00=4), max_gpus=4, gpu_types=("a100",))
    state = new("t4", "a100", nodes="a100:1x4,t4:1x4", others=(other,))
    assert sia.decide(state).chosen == {"o": Configuration(1, 4, "a100"), "j": Configuration(1, 1, "t4")}
    later = dataclasses.replace(with_facts(state, attained_gpu_s={"j": {"t4": 360.0}}), time_s=5000.0)
    assert sia.decide(later).chosen == {"o": Configuration(1, 4, "a100"), "j": Configuration(1, 4, "t4")}


def test_measuring_moves_and_shrinks_no_other_job():
    """An old job has all A100, of which the last four bring it next to nothing; or the RTX, and would be as well on the A100."""
    flat = table(a100={1: 1.0, 2: 1.9, 4: 3.4, 8: 3.5})
    old = job("o", phase=Phase.RUNNING, allocation=on("a100", a100_00=8), gpu_types=("a100",))
    state = new("t4", "a100", nodes="a100:1x8,t4:1x4", others=(old,))
    state = dataclasses.replace(with_facts(state, model={"o": flat}), time_s=36000.0)
    assert sia.decide(state).chosen == {"o": Configuration(1, 8, "a100"), "j": Configuration(1, 1, "t4")}
    old = job("o", phase=Phase.RUNNING, allocation=on("rtx", rtx_00=1), max_gpus=1)
    state = new("a100", "rtx", nodes="a100:1x1,rtx:1x1", others=(old,))
    same = table(a100={1: 1.0}, rtx={1: 1.0})
    state = dataclasses.replace(with_facts(state, model={"o": same}), time_s=86400.0)
    assert sia.decide(state).chosen == {"o": Configuration(1, 1, "rtx"), "j": Configuration(1, 1, "a100")}


def test_a_job_that_is_being_measured_stays_until_it_has_reported():
    """Job 1 is known on its A100 and would be measured on the one RTX, on which the other has just begun."""
    other = job("o", phase=Phase.RUNNING, allocation=on("rtx", rtx_00=1), submit_s=5.0)
    state = new("a100", "rtx", nodes="a100:1x1,rtx:1x1", others=(other,))
    state = with_facts(state, unmeasured_types={"j": state.facts["j"].unmeasured_types, "o": ("a100", "rtx")})
    assert sia.decide(state).chosen == {"o": Configuration(1, 1, "rtx"), "j": Configuration(1, 1, "a100")}
