"""AntMan's control of one GPU, against jobs whose slow-down is a known function of the opportunistic share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from penstock_scheduler.sharing.control import Control, ControlSettings, Steps, advance

SETTINGS = ControlSettings()


@dataclass
class Scenario:
    """A guaranteed job whose steps take `base_s * (1 + slowdown(share))`, with noise."""

    slowdown: Callable[[float], float]
    seed: int = 0
    base_s: float = 0.1
    noise: float = 0.01
    """Standard deviation of one step, as a part of it."""
    steps: int = 50
    """In a control period."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def period(self, share: float) -> Steps:
        mean = self.base_s * (1 + self.slowdown(share))
        return Steps.of(list(mean * (1 + self.noise * self.random.standard_normal(self.steps))))

    def feasible(self) -> float:
        """Largest share within the tolerance, to a ten-thousandth."""
        shares = np.linspace(0, 1, 10_001)
        return float(max(share for share in shares if self.slowdown(float(share)) <= SETTINGS.tolerance))


def settle(scenario: Scenario, control: Control | None = None, most: int = 400) -> tuple[Control, int]:
    control = control or Control()
    for period in range(most):
        if control.settled:
            return control, period
        control = advance(control, scenario.period(control.share), SETTINGS)
    raise AssertionError(f"not settled after {most} periods: {control}")


def scenarios(count: int, seed: int) -> list[Scenario]:
    """Slow-downs that are linear, curved, or begin beyond a threshold; from insensitive to very sensitive."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        slope, power, threshold = 10 ** random.uniform(-1.5, 0.7), random.uniform(0.6, 2.5), random.uniform(0, 0.9)
        shape: Callable[[float], float] = [
            lambda s, a=slope: a * s,
            lambda s, a=slope, k=power: a * s**k,
            lambda s, a=slope, t=threshold: a * max(s - t, 0.0),
        ][index % 3]
        noise, steps = random.uniform(0.001, 0.03), int(random.integers(20, 300))
        made.append(Scenario(shape, int(random.integers(2**31)), 10 ** random.uniform(-2, 0.5), noise, steps))
    return made


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_the_guaranteed_job_keeps_its_speed_and_little_is_left_unused(count: int):
    """Over random scenarios: never above the tolerance once settled, and 90 % of what was feasible."""
    used = []
    for index, scenario in enumerate(scenarios(count, seed=7)):
        control, _ = settle(scenario)
        for _ in range(50):
            assert scenario.slowdown(control.share) <= SETTINGS.tolerance, f"scenario {index}: {control}"
            control = advance(control, scenario.period(control.share), SETTINGS)
        if scenario.feasible() >= 0.01:
            used.append(control.share / scenario.feasible())
    assert min(used) >= 0.88
    assert np.mean(np.array(used) >= 0.9) >= 0.99
    assert np.mean(used) >= 0.95


def test_a_job_that_does_not_mind_shares_everything():
    assert settle(Scenario(lambda share: 0.0))[0].share == 1.0


def test_a_job_that_minds_everything_shares_nothing_and_that_is_the_end_of_it():
    scenario = Scenario(lambda share: 0.5 if share > 0 else 0.0)
    control, _ = settle(scenario)
    assert control.share == 0.0
    for _ in range(100):
        control = advance(control, scenario.period(control.share), SETTINGS)
        assert control.share == 0.0


def test_a_guaranteed_job_begins_with_the_whole_gpu():
    """Who comes gets a new control, so the opportunistic share is 0 before its first step."""
    assert Control().share == 0.0
    assert advance(Control(), Scenario(lambda share: 0.0, steps=2).period(0.0), SETTINGS).share == 0.0, (
        "base unknown yet"
    )


def test_it_is_cut_within_one_period_when_the_job_becomes_more_sensitive():
    control, _ = settle(Scenario(lambda share: 0.1 * share))
    assert control.share > 0.4
    sensitive = Scenario(lambda share: 0.4 * share)
    cut = advance(control, sensitive.period(control.share), SETTINGS)
    assert cut.share <= control.share / 2
    again, _ = settle(sensitive, cut)
    assert 0.9 * sensitive.feasible() <= again.share <= sensitive.feasible()


def test_it_rises_when_the_job_becomes_less_sensitive():
    control, _ = settle(Scenario(lambda share: 0.5 * share))
    tolerant = Scenario(lambda share: 0.06 * share)
    again, _ = settle(tolerant, advance(control, tolerant.period(control.share), SETTINGS))
    assert again.share >= 0.9 * tolerant.feasible() > 5 * control.share


def test_a_base_that_is_out_of_date_is_measured_anew():
    """The job's steps take twice as long from now on, whatever the share: a larger batch, say."""
    control, _ = settle(Scenario(lambda share: 0.1 * share))
    slower = Scenario(lambda share: 0.1 * share, base_s=0.2)
    for _ in range(300):
        control = advance(control, slower.period(control.share), SETTINGS)
    assert control.settled
    assert 0.9 * slower.feasible() <= control.share <= slower.feasible()
    assert control.base.mean_s == pytest.approx(0.2, rel=0.01)


def test_a_period_without_steps_tells_nothing():
    control, _ = settle(Scenario(lambda share: 0.1 * share))
    assert advance(control, Steps(), SETTINGS) == control


def test_steps_add_up_as_if_they_were_one_list():
    """Of 1 to 12: mean 6.5, squares (12^3 - 12) / 12 = 143, error sqrt(143 / 11 / 12)."""
    both = Steps.of([1.0, 2.0]) + Steps.of([float(second) for second in range(3, 13)])
    assert both == Steps(12, pytest.approx(6.5), pytest.approx(143.0))  # type: ignore[arg-type]
    assert both.error_s == pytest.approx((143 / 11 / 12) ** 0.5)
    assert Steps.of([1.0, 2.0]).error_s == float("inf"), "too few to tell"
    assert Steps() + both == both
