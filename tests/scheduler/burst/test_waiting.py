"""Waiting policies, waiting budgets and estimates, worked by hand."""

import pytest

from penstock_scheduler.burst.deciding.estimates import Gravity, estimate, lost_s
from penstock_scheduler.model.waiting import Ask, Averages, Wait, WaitingPolicy, by_budget
from penstock_scheduler.people.errors import ConfigError

JOB = Ask(gpus=4, runtime_h=2.0)


@pytest.mark.parametrize(
    ("kind", "wait_h"),
    [
        (Wait.NONE, 0.0),
        (Wait.CONSTANT, 0.1),
        (Wait.RUNTIME, 0.2),  # 0.1 x 2 h
        (Wait.RESOURCE, 0.4),  # 0.1 x 4 GPUs
        (Wait.COMPUTE, 0.8),  # 0.1 x 8 GPU-hours
        (Wait.STAR, 0.0),
    ],
)
def test_a_job_of_4_gpus_for_2_hours_waits_by_its_policy(kind, wait_h):
    assert WaitingPolicy(kind, 0.1).wait_h(JOB) == pytest.approx(wait_h)


def test_a_job_back_from_the_cloud_waits_by_its_gpus_times_patience():
    assert WaitingPolicy(Wait.STAR, 0.1, patience=3).wait_h(JOB, returned=True) == pytest.approx(1.2)


def test_cpu_only_and_short_jobs_do_not_wait_for_gpus():
    policy = WaitingPolicy(Wait.CONSTANT, 1.0, short_h=0.25)
    assert policy.wait_h(Ask(0, 5.0, cpus=32)) is None
    assert policy.wait_h(Ask(8, 0.2)) is None
    assert policy.wait_h(Ask(8, 0.25)) == 1.0
    assert policy.wait_h(Ask(8, None)) == 1.0, "its running time is unknown"


def test_without_an_estimate_a_job_counts_as_one_of_an_hour():
    assert WaitingPolicy(Wait.COMPUTE, 0.1).wait_h(Ask(4, None)) == pytest.approx(0.4)


def test_cpus_weigh_a_53rd_of_a_gpu():
    assert Ask(1, 2.0, cpus=53).cost_gpu_h == pytest.approx(4.0)


def test_a_budget_of_25_percent_gives_the_papers_constants():
    """Fidelity set: T = 0.665234 h, E[r] = 1.747826; the paper's notebook has C = 598.71 s, alpha .143035, beta .095152."""
    averages = Averages(115, 0.6652342995169083, 1.7478260869565216)
    assert by_budget(Wait.CONSTANT, 25, averages).factor * 3600 == pytest.approx(598.71, abs=0.01)
    assert by_budget(Wait.COMPUTE, 25, averages).factor == pytest.approx(0.14303482587064678, rel=1e-12)
    assert by_budget(Wait.RESOURCE, 25, averages).factor == pytest.approx(0.09515167219458266, rel=1e-12)
    assert by_budget(Wait.RUNTIME, 25, averages).factor == 0.25


def test_running_averages_are_means_until_their_memory_is_full_and_then_follow():
    averages = Averages().with_job(1.0, 1).with_job(3.0, 5)
    assert (averages.runtime_h, averages.gpus) == (2.0, 3.0)
    for _ in range(200):
        averages = averages.with_job(10.0, 8, memory=20)
    assert averages.gpus == pytest.approx(8, abs=1e-3)


def test_a_budget_without_averages_says_what_to_give():
    with pytest.raises(ConfigError, match="give mean_runtime_h"):
        by_budget(Wait.COMPUTE, 25, Averages())
    with pytest.raises(ConfigError, match="at least 0"):
        by_budget(Wait.COMPUTE, -1, Averages(1, 1, 1))


def test_estimates_come_in_the_stated_order():
    known = {"user_s": 10.0, "work": 40.0, "goodput": 2.0, "history_s": (30.0, 50.0, 31.0), "time_limit_s": 99.0}
    assert estimate(**known).runtime_s == 10
    assert estimate(**(known | {"user_s": None})).runtime_s == 20
    assert estimate(**(known | {"user_s": None, "goodput": 0.0})).runtime_s == 31
    assert estimate(time_limit_s=99.0).source == "time-limit"
    assert estimate().runtime_s is None


def test_only_what_is_after_the_last_checkpoint_is_lost():
    assert (lost_s(250, 100), lost_s(250, None), lost_s(250, 0)) == (50, 250, 0)


def test_ten_gigabytes_take_80_seconds_on_a_gigabit():
    assert Gravity(125e6, 0.09).transfer_s(10e9) == 80
    assert Gravity(125e6, 0.09).usd(10e9) == pytest.approx(0.9)
