"""Jobs: what may be done to them, where they are, and which limits count them."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Configuration, GpuLimit, Job, JobSpec, Phase
from tests.scheduler.builders import job, on


@pytest.mark.parametrize(
    ("adaptivity", "preemptible", "movable"),
    [
        ("adaptive", True, True),
        ("strong-scaling", True, True),
        ("rigid", True, True),
        ("fixed", True, False),
        ("adaptive", False, False),
        ("rigid", False, False),
        ("fixed", False, False),
    ],
)
def test_a_job_that_its_user_pinned_is_never_moved(adaptivity: str, preemptible: bool, movable: bool):
    each = job("1", adaptivity=adaptivity, preemptible=preemptible, min_gpus=2, max_gpus=2)
    assert each.movable is movable


def test_only_a_guaranteed_job_goes_first():
    ranks = {name: job("1", gpu_class=name).sharing_priority for name in ("guaranteed", "opportunistic", None)}
    assert ranks == {"guaranteed": 1, "opportunistic": 0, None: 0}


@pytest.mark.parametrize(
    ("phase", "runs", "on_its_way"),
    [
        (Phase.QUEUED, False, False),
        (Phase.STARTING, False, True),
        (Phase.RUNNING, True, False),
        (Phase.STOPPING, False, True),
    ],
)
def test_a_job_runs_or_is_on_its_way_or_neither(phase: Phase, runs: bool, on_its_way: bool):
    held, target = on("t4", n1=2, n2=2), on("a100", n3=1)
    each = job("1", phase=phase, allocation=held, target=target)
    assert each.running_on == (held if runs else None)
    assert each.running_as == (Configuration(2, 4, "t4") if runs else None)
    assert each.bound_for == (target if on_its_way else None)


def test_a_job_that_nothing_else_is_known_of_has_never_run_and_weighs_as_much_as_any():
    each = Job("1", "train", "ada", JobSpec(), ("all",), Phase.QUEUED, 0.0)
    assert (each.restarts, each.suspended_s, each.pauses_s, each.weight) == (0, 0.0, (), 1.0)
    assert not each.leaving
    assert each.allocation is each.target is each.started_s is each.stopped_s is each.time_limit_s is None


ADA = job("1", user="ada", account="maths", qos="normal", partitions=("gpu", "all"))


@pytest.mark.parametrize(
    ("limit", "covers"),
    [
        (GpuLimit("user", "ada", 4), True),
        (GpuLimit("user", "bob", 4), False),
        (GpuLimit("user", "maths", 4), False),
        (GpuLimit("account", "maths", 4), True),
        (GpuLimit("account", "physics", 4), False),
        (GpuLimit("account", "science", 4, below=("maths", "physics")), True),
        (GpuLimit("account", "science", 4, below=("physics",)), False),
        (GpuLimit("qos", "normal", 4), True),
        (GpuLimit("qos", "high", 4), False),
        (GpuLimit("partition", "gpu", 4), True),
        (GpuLimit("partition", "all", 4), False),
        (GpuLimit("qos", "normal", 4, user="ada"), True),
        (GpuLimit("qos", "normal", 4, user="bob"), False),
        (GpuLimit("qos", "normal", 4, account="maths"), True),
        (GpuLimit("qos", "normal", 4, account="physics"), False),
        (GpuLimit("qos", "normal", 4, user="ada", account="physics"), False),
        (GpuLimit("qos", "normal", 4, user="bob", account="maths"), False),
        (GpuLimit("account", "maths", 4, spared_qos=("normal",)), False),
        (GpuLimit("account", "maths", 4, spared_qos=("high",)), True),
        (GpuLimit("account", "maths", 4, user="bob", spared_qos=("high",)), False),
    ],
)
def test_a_limit_counts_the_jobs_that_it_names_and_no_other(limit: GpuLimit, covers: bool):
    """Ada's job is in account maths, has QOS normal, and was submitted to partition gpu first, then all."""
    assert limit.covers(ADA) is covers


def test_a_limit_of_a_partition_does_not_cover_a_job_that_names_none():
    assert not GpuLimit("partition", "gpu", 4).covers(job("1", partitions=()))


def test_a_limit_of_a_type_counts_only_gpus_of_that_type():
    assert [GpuLimit("user", "ada", 4, "a100").counts(each) for each in ("a100", "t4", "h100")] == [True, False, False]
    assert GpuLimit("user", "ada", 4).counts("t4")


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (GpuLimit("user", "ada", 4), "the limit of 4 GPUs for user ada"),
        (GpuLimit("account", "maths", 8, "a100"), "the limit of 8 a100 GPUs for account maths"),
        (GpuLimit("qos", "high", 2, user="ada"), "the limit of 2 GPUs for qos high and jobs of user ada"),
        (
            GpuLimit("qos", "high", 2, "t4", user="ada", account="maths"),
            "the limit of 2 t4 GPUs for qos high and jobs of user ada of account maths",
        ),
    ],
)
def test_a_limit_says_which_jobs_it_is_for(limit: GpuLimit, text: str):
    assert str(limit) == text


def test_of_jobs_that_were_submitted_at_once_the_lower_number_goes_first():
    ids = ["10", "9", "12_10", "12_2", "12", "1000000", "99_1", "sim-b", "sim-a"]
    in_order = sorted((job(each, submit_s=5.0) for each in ids), key=lambda each: each.in_order)
    assert [each.id for each in in_order] == ["9", "10", "12", "12_2", "12_10", "99_1", "1000000", "sim-a", "sim-b"]
