"""Budgets of GPU-hours and of dollars: when they are reached, whom they cover, and what they say."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import BudgetLine, GpuBudget, Offer


def gpu_hours(used_h: float, soft_h: float | None = None, hard_h: float | None = None) -> GpuBudget:
    return GpuBudget("maths", "month", soft_h, hard_h, used_h)


@pytest.mark.parametrize(("used_h", "reached"), [(99.9, False), (100.0, True), (100.1, True)])
def test_a_limit_is_reached_with_its_last_gpu_hour(used_h: float, reached: bool):
    soft, hard = gpu_hours(used_h, soft_h=100.0), gpu_hours(used_h, hard_h=100.0)
    assert (soft.over_soft, soft.over_hard) == (reached, False), "the hard limit is absent"
    assert (hard.over_soft, hard.over_hard) == (False, reached), "the soft limit is absent"


def test_a_limit_of_zero_is_reached_at_once():
    assert gpu_hours(0.0, soft_h=0.0).over_soft
    assert gpu_hours(0.0, hard_h=0.0).over_hard


def test_an_account_within_its_budget_keeps_its_weight_and_its_gpus():
    budget = gpu_hours(1.0, soft_h=100.0)
    assert (budget.soft_weight, budget.stops, budget.ends_s) == (1.0, False, None)


@pytest.mark.parametrize("of", [lambda a: GpuBudget(a, "day", 1, 2, 0), lambda a: BudgetLine(a, "day", 1.0, 0.0)])
def test_a_budget_covers_its_account_and_that_of_the_site_covers_all(of):
    assert [of("maths").covers(account) for account in ("maths", "physics", "a", "")] == [True, False, False, False]
    assert [of("").covers(account) for account in ("maths", "physics", "")] == [True, True, True]


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (
            GpuBudget("maths", "month", 80.0, 100.0, 90.0),
            "the budget of account maths: 90.0 of 80 (soft) and 100 (hard) GPU-hours used this month",
        ),
        (GpuBudget("", "day", None, 24.0, 25.04), "the budget of the site: 25.0 of 24 (hard) GPU-hours used today"),
        (GpuBudget("", "total", 1.5, None, 2.0), "the budget of the site: 2.0 of 1.5 (soft) GPU-hours used in total"),
        (GpuBudget("", "week", None, 1.0, 0.0), "the budget of the site: 0.0 of 1 (hard) GPU-hours used this week"),
        (GpuBudget("", "year", None, 1.0, 0.0), "the budget of the site: 0.0 of 1 (hard) GPU-hours used this year"),
        (
            BudgetLine("maths", "week", 10.0, 7.5),
            "the cloud budget of account maths, $10.00 this week ($7.50 of it used or committed)",
        ),
        (BudgetLine("", "day", 5.0, 0.0), "the cloud budget of the site, $5.00 today ($0.00 of it used or committed)"),
        (
            BudgetLine("", "total", 5.0, 5.0),
            "the cloud budget of the site, $5.00 in total ($5.00 of it used or committed)",
        ),
    ],
)
def test_a_budget_says_whose_it_is_and_how_much_is_used(budget: GpuBudget | BudgetLine, text: str):
    assert str(budget) == text


@pytest.mark.parametrize(("used_usd", "left_usd"), [(0.0, 10.0), (7.5, 2.5), (10.0, 0.0), (12.0, 0.0)])
def test_no_budget_has_less_than_nothing_left(used_usd: float, left_usd: float):
    assert BudgetLine("", "month", 10.0, used_usd).left_usd == left_usd


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "$0.00"),
        (1.236, "$1.24"),
        (12_345.678, "$12345.68"),
        (0.25, "$0.25"),
        (0.0034, "$0.0034"),
        (0.00996, "$0.0100"),
        (1e-9, "$0.000000"),
    ],
)
def test_people_read_two_significant_digits_of_small_prices(usd: float, text: str):
    assert f"({text} of it used" in str(BudgetLine("", "day", 5.0, usd))
    assert f", {text}/h)" in str(Offer("t4g@b", "t4", 1, 1, usd))


def test_an_offer_names_its_gpus_and_its_price():
    assert str(Offer("g5.12xlarge@b", "a10g", 1, 4, 5.672)) == "4 a10g (g5.12xlarge@b, $5.67/h)"
