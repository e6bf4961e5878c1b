"""The numbers of waiting policies: which are refused, what the paper's are, and what passes through a waiting budget."""

from __future__ import annotations

import pytest

from penstock_scheduler.model.waiting import CPUS_PER_GPU, Ask, Averages, Wait, WaitingPolicy, by_budget
from penstock_scheduler.people.errors import ConfigError

MEANS = Averages(jobs=10.0, runtime_h=2.0, gpus=4.0)
NAN = float("nan")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"factor": -0.1}, "the factor -0.1 of compute-wait must be at least 0"),
        ({"factor": NAN}, "the factor nan"),
        ({"t_max_h": 0.0}, r"t_max_h=0.0 must be above 0, patience=3.0 at least 0; the paper has 0.25 and 3"),
        ({"t_max_h": -1.0}, "t_max_h=-1.0 must be above 0"),
        ({"patience": -0.1}, "t_max_h=0.25 must be above 0, patience=-0.1 at least 0"),
        ({"patience": NAN}, "patience=nan"),
    ],
)
def test_numbers_out_of_their_range_are_refused(numbers: dict[str, float], words: str):
    with pytest.raises(ConfigError, match=words):
        WaitingPolicy(Wait.COMPUTE, **numbers)  # type: ignore[arg-type]


def test_the_smallest_numbers_are_good():
    policy = WaitingPolicy(Wait.STAR, 0.0, t_max_h=0.01, patience=0.0)
    assert policy.wait_h(Ask(4, 2.0), returned=True) == 0.0


def test_a_policy_that_says_no_more_has_the_papers_numbers_and_no_wait():
    policy = WaitingPolicy(Wait.COMPUTE)
    assert (policy.factor, policy.short_h, policy.t_max_h, policy.patience) == (0.0, None, 0.25, 3.0)
    assert by_budget(Wait.STAR, 25, MEANS) == WaitingPolicy(Wait.STAR, 0.125)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (Wait.NONE, 0.0),
        (Wait.CONSTANT, 0.5),  # P T = 0.25 x 2 h
        (Wait.RUNTIME, 0.25),  # P
        (Wait.COMPUTE, 0.0625),  # P / E[r] = 0.25 / 4
        (Wait.RESOURCE, 0.125),  # P T / E[r] = 0.25 x 2 / 4
        (Wait.STAR, 0.125),
    ],
)
def test_a_budget_of_25_percent_on_means_of_2_hours_and_4_gpus(kind: Wait, factor: float):
    policy = by_budget(kind, 25, MEANS, short_h=0.5, t_max_h=0.75, patience=2.0)
    assert policy == WaitingPolicy(kind, factor, 0.5, 0.75, 2.0)
    assert by_budget(kind, 0, MEANS).factor == 0.0


@pytest.mark.parametrize("percent", [-1e-9, NAN])
def test_a_budget_below_nothing_is_refused(percent: float):
    with pytest.raises(ConfigError, match="must be at least 0; the paper's is 25"):
        by_budget(Wait.COMPUTE, percent, MEANS)


@pytest.mark.parametrize("averages", [Averages(), Averages(1, 2.0, 0.0), Averages(1, 0.0, 4.0)])
def test_means_are_needed_by_all_but_no_wait(averages: Averages):
    with pytest.raises(ConfigError, match="there are none; give mean_runtime_h and mean_gpus"):
        by_budget(Wait.RUNTIME, 25, averages)
    assert by_budget(Wait.NONE, 25, averages) == WaitingPolicy(Wait.NONE)


def test_means_below_one_are_means():
    assert by_budget(Wait.RESOURCE, 100, Averages(1, 0.5, 0.5)).factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ask", "cost_gpu_h"),
    [
        (Ask(4, 2.0), 8.0),
        (Ask(1, 2.0, cpus=CPUS_PER_GPU), 4.0),
        (Ask(2, 0.5, cpus=26.5), 1.25),
        (Ask(0, 2.0, cpus=106.0), 4.0),
        (Ask(4, None, cpus=8.0), None),
        (Ask(4, 0.0), 0.0),
    ],
)
def test_a_job_costs_its_gpus_and_its_cpus_times_its_running_time(ask: Ask, cost_gpu_h: float | None):
    assert ask.cost_gpu_h == cost_gpu_h


@pytest.mark.parametrize(("runtime_h", "wait_h"), [(0.49, None), (0.5, 1.0), (0.51, 1.0), (None, 1.0)])
def test_only_a_job_that_is_known_to_be_short_leaves_at_once(runtime_h: float | None, wait_h: float | None):
    assert WaitingPolicy(Wait.CONSTANT, 1.0, short_h=0.5).wait_h(Ask(1, runtime_h)) == wait_h


@pytest.mark.parametrize(("gpus", "wait_h"), [(0, None), (1, 0.5), (2, 0.5)])
def test_a_job_of_one_gpu_waits_and_one_of_none_does_not(gpus: int, wait_h: float | None):
    assert WaitingPolicy(Wait.CONSTANT, 0.5).wait_h(Ask(gpus, 1.0)) == wait_h


@pytest.mark.parametrize(
    ("kind", "wait_h"), [(Wait.RUNTIME, 0.1), (Wait.COMPUTE, 0.4), (Wait.RESOURCE, 0.4), (Wait.CONSTANT, 0.1)]
)
def test_a_job_of_unknown_length_counts_as_one_of_an_hour(kind: Wait, wait_h: float):
    """4 GPUs, a factor of 0.1. CPUs do not count, because their cost is not known."""
    assert WaitingPolicy(kind, 0.1).wait_h(Ask(4, None, cpus=53.0)) == pytest.approx(wait_h)


def test_a_job_that_comes_back_waits_for_a_multiple_of_its_resource_wait():
    assert WaitingPolicy(Wait.STAR, 0.5).wait_h(Ask(4, 2.0), returned=True) == 6.0
    assert WaitingPolicy(Wait.STAR, 0.5).wait_h(Ask(4, 2.0)) == 0.0
    assert WaitingPolicy(Wait.RESOURCE, 0.5).wait_h(Ask(4, 2.0), returned=True) == 2.0


def test_an_average_of_5_000_jobs_moves_by_a_5_000th():
    averages = Averages(4999.0, 1.0, 1.0).with_job(1.0, 1)
    assert averages == Averages(5000.0, 1.0, 1.0)
    assert averages.with_job(5001.0, 1) == Averages(5000.0, 2.0, 1.0)
    assert Averages().with_job(2.0, 8) == Averages(1.0, 2.0, 8.0)
