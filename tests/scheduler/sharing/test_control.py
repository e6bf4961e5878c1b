"""AntMan's control of one GPU, against jobs with a slowdown that is a known function of the opportunistic share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest

from penstock_scheduler.rounds.sharing.control import ControlSettings, Evidence, ShareControl, Steps, advance

SETTINGS = ControlSettings()
TURN = SETTINGS.settled_periods + 1


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


class Source(Protocol):
    def period(self, share: float) -> Steps: ...


def settle(scenario: Source, control: ShareControl | None = None, most: int = 5000) -> tuple[ShareControl, int]:
    control = control or ShareControl()
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


LOOKED_AT = 4 * TURN
"""Periods, once a control is settled."""


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 7), *(pytest.param(1000, seed, marks=pytest.mark.long) for seed in (7, 8))]
)
def test_the_guaranteed_job_keeps_its_speed_and_little_is_left_unused(count: int, seed: int):
    """Over random scenarios: within the tolerance in every settled period of four cycles, and 90 % of
    what was feasible, with periods at share 0 and new searches. Then the job becomes more sensitive, and has the GPU to itself a
    period later."""
    settling, used, cut = [], [], 0
    for index, scenario in enumerate(scenarios(count, seed)):
        control, periods = settle(scenario)
        settling.append(periods)
        shares = []
        for _ in range(LOOKED_AT):
            within = scenario.slowdown(control.share) <= SETTINGS.tolerance
            assert within or not control.settled, f"scenario {index}: {control}"
            shares.append(control.share)
            control = advance(control, scenario.period(control.share), SETTINGS)
        if scenario.feasible() >= 0.01:
            used.append(np.mean(shares) / scenario.feasible())
        control = control if control.share else advance(control, scenario.period(0.0), SETTINGS)
        if control.share:
            scenario.slowdown = lambda share, its=control.share: 4 * SETTINGS.tolerance * share / its
            assert advance(control, scenario.period(control.share), SETTINGS).share == 0.0, f"scenario {index}"
            cut += 1
    assert cut >= 0.9 * count
    assert min(used) >= 0.83
    assert np.mean(np.array(used) >= 0.9) >= 0.98
    assert np.mean(used) >= 0.94
    assert np.median(settling) <= 60
    assert np.quantile(settling, 0.95) <= 400


@dataclass
class Queue:
    """Two jobs of which each needs a GPU that does one thing at a time for half of each step: 40 ms, and 80 ms beside it.

    As `benchmarks/agent.py antman`. The guaranteed job's steps wait for it, or do not; the waits vary as much as a step is long.
    """

    seed: int = 0
    period_s: float = 2.0
    jitter: float = 0.05
    """Standard deviation of half a step, as a part of it."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.now_s = self.asks_s = 0.0
        """When the opportunistic job next asks for the GPU."""

    def half(self, seconds: float) -> float:
        return seconds * max(1 + self.jitter * self.random.standard_normal(), 0.0)

    def period(self, share: float) -> Steps:
        return Steps.of(self.durations(share))

    def durations(self, share: float) -> list[float]:
        """Of the guaranteed job's steps in a period, s."""
        durations_s, end_s = [], self.now_s + self.period_s
        self.asks_s = max(self.asks_s, self.now_s) if share else np.inf
        if np.isinf(self.asks_s) and share:
            self.asks_s = self.now_s + self.half(0.04)
        while self.now_s < end_s:
            began_s = self.now_s
            wants_s = began_s + self.half(0.02)
            if self.asks_s < wants_s:  # the opportunistic job was first: its half, the rest of its step, and its pause
                free_s = self.asks_s + self.half(0.04)
                its_s = free_s - self.asks_s + 0.04
                self.asks_s = free_s + its_s * (1 / share - 1) + self.half(0.04)
                wants_s = max(wants_s, free_s)
            self.now_s = wants_s + self.half(0.02)
            if self.asks_s < self.now_s:
                self.asks_s = self.now_s  # it waits until the GPU is free
            durations_s.append(self.now_s - began_s)
        return durations_s

    def slowdown(self, share: float) -> float:
        """Over many periods, of another queue of this kind."""
        twin = Queue(self.seed + 1, jitter=self.jitter)
        alone, beside = (sum((twin.period(each) for _ in range(1000)), Steps()) for each in (0.0, share))
        return beside.slowdown(alone)[0]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_it_is_sure_of_a_job_whose_steps_wait_or_do_not(seed: int):
    """Single steps beside the opportunistic job vary by a fifth and more, and are not independent."""
    queue = Queue(seed)
    control, periods = settle(queue)
    shares = []
    for _ in range(5 * TURN):
        shares.append(control.share)
        control = advance(control, queue.period(control.share), SETTINGS)
    assert queue.slowdown(max(shares)) <= SETTINGS.tolerance
    assert queue.slowdown(float(np.mean(shares)) / 0.78) >= SETTINGS.tolerance, "that would not have been feasible"
    assert periods <= 2000


@dataclass
class Collisions:
    """Steps of half a second that take twice as long where they meet the opportunistic job's; some twenty in a period of 10 s."""

    seed: int

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def slowdown(self, share: float) -> float:
        return 0.3 * share

    def period(self, share: float) -> Steps:
        durations_s: list[float] = []
        while sum(durations_s) < 10.0:
            meets = self.random.random() < self.slowdown(share)
            durations_s.append(0.5 * (1 + meets + 0.01 * self.random.standard_normal()))
        return Steps.of(durations_s)


def test_a_cycle_that_happened_to_see_little_of_the_other_job_weighs_no_more_for_that():
    """It has both a small slow-down and a small spread."""
    settled = [settle(Collisions(seed))[0].good.share for seed in range(20)]
    assert max(0.3 * share for share in settled) <= SETTINGS.tolerance


def test_while_it_makes_sure_the_opportunistic_job_has_most_of_what_it_will_have():
    """Slices become longer at a share that stays in doubt, so that few periods are at share 0."""
    queue, control, shares = Queue(3), ShareControl(), []
    for _ in range(200):
        shares.append(control.share)
        control = advance(control, queue.period(control.share), SETTINGS)
    assert not control.settled
    assert shares[50:].count(0.0) < 0.9 * 150 / (SETTINGS.search_periods + 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_machine_that_drifts_is_not_charged_to_the_opportunistic_job(seed: int):
    """All steps become a tenth longer and shorter again, over and over, in spells of some 80 periods."""
    random = np.random.default_rng(seed)
    scenario = Scenario(lambda share: 0.2 * share, seed)
    control, _ = settle(scenario)
    shares = []
    for _ in range(1000):
        if random.random() < 1 / 80:
            scenario.base_s = 0.11 if scenario.base_s == 0.1 else 0.1
        assert not control.settled or scenario.slowdown(control.share) <= SETTINGS.tolerance
        shares.append(control.share)
        control = advance(control, scenario.period(control.share), SETTINGS)
    assert np.mean(shares) >= 0.6 * scenario.feasible()


def test_a_job_that_does_not_mind_shares_everything():
    assert beside(Scenario(lambda share: 0.0)).share == 1.0


def test_a_job_that_minds_everything_shares_nothing_and_that_is_the_end_of_it():
    scenario = Scenario(lambda share: 0.5 if share > 0 else 0.0)
    control, _ = settle(scenario)
    assert control.share == 0.0
    for _ in range(100):
        control = advance(control, scenario.period(control.share), SETTINGS)
        assert control.share == 0.0


def test_a_guaranteed_job_begins_with_the_whole_gpu():
    """Who comes gets a new control, so the opportunistic share is 0 before its first step."""
    assert ShareControl().share == 0.0
    assert advance(ShareControl(), Scenario(lambda share: 0.0, steps=2).period(0.0), SETTINGS).share == 0.0, (
        "base unknown yet"
    )


def test_it_is_cut_within_one_period_when_the_job_becomes_more_sensitive():
    control = beside(Scenario(lambda share: 0.1 * share))
    assert control.share > 0.4
    sensitive = Scenario(lambda share: 0.4 * share)
    cut = advance(control, sensitive.period(control.share), SETTINGS)
    assert cut.share == 0.0
    again, _ = settle(sensitive, cut)
    assert 0.9 * sensitive.feasible() <= beside(sensitive, again).share <= sensitive.feasible()


def beside(scenario: Scenario, control: ShareControl | None = None) -> ShareControl:
    """Settled, and in a period in which the opportunistic job trains."""
    control = control or settle(scenario)[0]
    return control if control.share else advance(control, scenario.period(0.0), SETTINGS)


def test_a_little_too_slow_is_found_out_within_some_turns():
    """6.4 % where 5 are allowed: no single period shows it beyond doubt."""
    scenario = Scenario(lambda share: 0.1 * share, noise=0.03)
    control = beside(scenario)
    share = control.share
    scenario.slowdown = lambda share: 0.133 * share
    for _ in range(20 * TURN):
        control = advance(control, scenario.period(control.share), SETTINGS)
    control = beside(scenario, settle(scenario, control)[0])
    assert control.share < share
    assert scenario.slowdown(control.share) <= SETTINGS.tolerance


def test_it_rises_when_the_job_becomes_less_sensitive():
    control = beside(Scenario(lambda share: 0.5 * share))
    tolerant = Scenario(lambda share: 0.06 * share)
    control_now = control
    for _ in range(TURN):
        control_now = advance(control_now, tolerant.period(control_now.share), SETTINGS)
    assert not control_now.settled
    again = beside(tolerant, settle(tolerant, control_now)[0])
    assert again.share >= 0.9 * tolerant.feasible() > 5 * control.share


def test_a_base_that_is_out_of_date_is_measured_anew():
    """The job's steps take twice as long from now on, whatever the share: a larger batch, say."""
    control = beside(Scenario(lambda share: 0.1 * share))
    slower = Scenario(lambda share: 0.1 * share, base_s=0.2)
    control = advance(control, slower.period(control.share), SETTINGS)
    assert not control.settled
    control = beside(slower, settle(slower, control)[0])
    assert 0.9 * slower.feasible() <= control.share <= slower.feasible()
    assert control.base.mean_s == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize("slow", range(1, 8))
def test_one_slow_period_of_the_machine_does_not_hold_the_share_down(slow: int):
    scenario, control = Scenario(lambda share: 0.1 * share), ShareControl()
    for period in range(400):
        machine = dataclasses.replace(scenario, base_s=0.12) if period == slow else scenario
        control = advance(control, machine.period(control.share), SETTINGS)
    assert 0.9 * scenario.feasible() <= beside(scenario, control).share <= scenario.feasible()


def test_a_share_that_a_bad_spell_made_bad_is_tried_again():
    """Whenever 0.35 or more is tried the machine is a fifth slower, until that is taken to be bad; 0.5 would be feasible."""
    scenario, control = Scenario(lambda share: 0.1 * share), ShareControl()
    while control.bad is None:
        machine = dataclasses.replace(scenario, base_s=0.12) if control.share > 0.35 else scenario
        control = advance(control, machine.period(control.share), SETTINGS)
    assert 0.35 < control.bad.share < 0.9 * scenario.feasible()
    for _ in range(1500):
        control = advance(control, scenario.period(control.share), SETTINGS)
    control, _ = settle(scenario, control)
    assert 0.9 * scenario.feasible() <= beside(scenario, control).share <= scenario.feasible()


@pytest.mark.parametrize("seed", [1, 11, 22])
def test_a_machine_that_stands_still_now_and_then_does_not_cost_the_opportunistic_job_its_share(seed: int):
    """Half a second every five minutes, in some step, whoever runs: in a period of 2 s that is a fifth."""
    queue, stalls = Queue(seed), np.random.default_rng(seed)
    control, shares = ShareControl(), []
    for _ in range(2400):
        shares.append(control.share)
        steps = queue.period(control.share)
        if stalls.random() < 2 / 300:
            steps = Steps(steps.count - 1, steps.mean_s, steps.squares) + Steps.of([0.5])
        control = advance(control, steps, SETTINGS)
    assert queue.slowdown(float(np.mean(shares[1200:])) / 0.75) >= SETTINGS.tolerance, (
        "that would not have been feasible"
    )


def test_a_job_beside_which_no_share_was_good_is_measured_again_in_the_end():
    """The opportunistic job becomes harmless, and the job's own speed says nothing of it: few steps a period."""
    control, _ = settle(Scenario(lambda share: 0.5 if share > 0 else 0.0, steps=5))
    assert (control.share, control.trial and control.trial.share) == (0.0, 0.0)
    harmless = Scenario(lambda share: 0.0, steps=5)
    periods = 0
    while control.settled:
        control, periods = advance(control, harmless.period(control.share), SETTINGS), periods + 1
        assert periods <= SETTINGS.patience + 5
    assert periods >= 0.9 * SETTINGS.patience
    trial = settle(harmless, control)[0].trial
    assert trial is not None
    assert trial.share == 1.0


def test_a_job_beside_which_no_share_was_good_is_measured_again_when_it_has_become_another_job():
    scenario = Scenario(lambda share: 0.5 if share > 0 else 0.0)
    control, _ = settle(scenario)
    for _ in range(3):
        control = advance(control, scenario.period(control.share), SETTINGS)
    other = Scenario(lambda share: 0.0, base_s=0.2)
    control = advance(control, other.period(control.share), SETTINGS)
    assert not control.settled
    assert beside(other, settle(other, control)[0]).share == 1.0


def test_a_period_without_steps_tells_nothing():
    control, _ = settle(Scenario(lambda share: 0.1 * share))
    assert advance(control, Steps(), SETTINGS) == control


def test_cycles_that_differ_count_more_than_what_their_steps_would_explain():
    """Slow-downs of 4 and 6 %, by their steps known to 2 and 1 %, the second of four times as many steps.

    What was before weighs half: weights 0.5 and 4, mean (0.5 x 4 + 4 x 6) / 4.5 = 5.778, squares 0.5 x 1.778^2 + 4 x 0.222^2 =
    1.778. By their steps a cycle of weight 1 varies by 2^2 x 1 = 1^2 x 4 = 4. Of 1.5 cycles, with 4 before: (1.778 + 4 x 4) /
    (0.5 + 4) = 3.951, over 4.5 = 0.937^2.
    """
    seen = Evidence().plus(0.04, 0.02, weight=1, periods=5)
    assert seen.error == pytest.approx(0.02), "of one cycle only its steps tell"
    assert seen.error_after(20) == pytest.approx(0.01)
    seen = seen.plus(0.06, 0.01, weight=4, periods=20, keep=0.5)
    assert (seen.cycles, seen.periods, seen.weight) == (1.5, 22.5, 4.5)
    assert seen.mean == pytest.approx(0.05778, rel=1e-3)
    assert seen.error == pytest.approx(0.00937, rel=1e-3)
    assert seen.spread == pytest.approx(seen.error * 1.5**0.5)


def test_steps_add_up_as_if_they_were_one_list():
    """Of 1 to 12: mean 6.5, squares (12^3 - 12) / 12 = 143, error sqrt(143 / 11 / 12)."""
    both = Steps.of([1.0, 2.0]) + Steps.of([float(second) for second in range(3, 13)])
    assert both == Steps(12, pytest.approx(6.5), pytest.approx(143.0))  # type: ignore[arg-type]
    assert both.error_s == pytest.approx((143 / 11 / 12) ** 0.5)
    assert Steps.of([1.0, 2.0]).error_s == float("inf"), "too few to tell"
    assert Steps() + both == both


@pytest.mark.parametrize("seed", [1, 11, 22])
def test_what_the_guaranteed_job_has_lost_it_gets_back(seed: int):
    """It keeps its speed over each minute, in which single periods of the same share differ by much more."""
    queue, control, periods = Queue(seed), ShareControl(), list[Steps]()
    alone_s = sum((queue.period(0.0) for _ in range(400)), Steps()).mean_s
    for _ in range(600):
        periods.append(queue.period(control.share))
        control = advance(control, periods[-1], SETTINGS)
    minutes = [sum(periods[start : start + 30], Steps()).mean_s / alone_s - 1 for start in range(15, 570)]
    assert max(minutes) <= SETTINGS.tolerance
