"""What an instance on the spot market is billed, worked by hand."""

import pytest

from penstock_scheduler.burst.manager.runs import Slot

HOUR_S = 3600.0
AT_S = 1_790_000_000.0
PRICES = [(AT_S - 9 * HOUR_S, 0.40), (AT_S + 0.5 * HOUR_S, 0.60), (AT_S + 1.5 * HOUR_S, 0.30)]


def bill(seconds: float, prices=PRICES, extras=0.0, taken=False) -> float:
    slot = Slot(node="n", instance="i", launched_s=AT_S, ended_s=AT_S + seconds, taken=taken)
    return sum(slot.billed(prices, extras).usd_by_month(9.0, AT_S).values())


@pytest.mark.parametrize(
    ("hours", "usd"),
    [(0.25, 0.10), (1.0, 0.40), (1.5, 0.40 + 0.30), (2.5, 0.40 + 0.60 + 0.15), (3.0, 0.40 + 0.60 + 0.30)],
)
def test_each_hour_costs_the_price_at_its_begin(hours, usd):
    assert bill(hours * HOUR_S) == pytest.approx(usd, abs=1e-9)


def test_a_minute_at_least_is_billed():
    assert bill(1.0) == pytest.approx(0.40 / 60, abs=1e-9)


def test_volume_and_address_are_billed_besides():
    assert bill(1.5 * HOUR_S, extras=0.02) == pytest.approx(0.70 + 0.03, abs=1e-9)


def test_the_first_hour_is_free_if_the_provider_takes_the_instance_within_it():
    assert bill(0.9 * HOUR_S, extras=0.02, taken=True) == pytest.approx(0.018, abs=1e-9)
    assert bill(1.5 * HOUR_S, taken=True) == pytest.approx(0.70, abs=1e-9)


def test_without_prices_the_offered_one_counts():
    assert bill(HOUR_S, prices=()) == pytest.approx(9.0, abs=1e-9)


def test_a_history_that_begins_late_holds_from_the_launch_on():
    assert bill(HOUR_S, prices=PRICES[1:]) == pytest.approx(0.60, abs=1e-9)
