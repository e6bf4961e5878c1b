"""AntMan's control of one GPU: a guaranteed job keeps its speed, opportunistic jobs get what is left over.

After *AntMan: Dynamic scaling on GPU clusters for deep learning* (OSDI '20), section 4.2. The compute share of the
opportunistic jobs is the part of the time, 0 to 1, in which they may train (a duty cycle between their steps). When a
guaranteed job comes, it is 0. Then the share is raised until the guaranteed job's steps take longer than the tolerance allows.

**What is measured.** Time goes in *turns*: a control period at share 0, then some at the share that is tried. A turn's
slow-down is how much longer the steps of the second part took than those of the first, total time over steps. So each turn has
its own reference, seconds old while searching and minutes once settled: a machine that becomes slower for other reasons slows
both parts, and is not charged to the guest.

**What is sure.** Steps beside a guest are not independent: they wait for it or they do not, and other load comes in spells. So
the uncertainty of the mean over turns is taken from how much *turns* differ. While there are few, what the spread of single
steps would explain counts as if it were eight turns more; once there are as many, turns that agree better than their steps are
taken at their word, as far as Student's t allows: a step that ends late and one that makes up for it vary, their sum does not.
A share is `good` when the
upper bound of its slow-down is within the tolerance, `bad` when the lower bound is not, or when it does not look as if
`patience` periods would show it to be good. Of two turns in a row that had a period too slow beyond doubt the second ends at
once, and the share is bad. Turns are short at first, so that a bad share soon goes. At a share that stays in doubt they become
longer, if it is the steps beside the guest that vary: so it has most of what it will have while the control makes sure. A turn in
which the guest seems to have made the job faster is left out, unless the one before it was.

**What is tried.** The paper raises step by step. Here the next share is where the slow-downs of the largest good and the
smallest bad share, interpolated, are what is aimed at: a little within the tolerance, and more where turns differ much, since
else no patience would be enough. Before anything was bad, it is at most twice the last one.

**Once settled** turns are long, so share 0 costs a guest a fiftieth (more where a period has fewer than `LEAST_STEPS`). In each
period the control asks more:

- One period is too slow beyond doubt: share 0 now, and a new search from half the share.
- The turn so far differs from what was known, up or down: a new look at the same share, reference first. So nothing is said to
  be the guest's doing, or to have become harmless, before both have been compared anew.

And after each turn: if the slow-down is surely less than what is aimed at, the search goes on from there, up to the smallest bad
share. What made that one bad may have been the machine, so it is forgotten as fast as what was known of the settled one, and then
tried again. Settled at share 0, the search begins anew after `patience` periods.

`advance` is one control period; a `ShareControl` is all that is remembered from one to the next.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

LEAST_STEPS = 10
"""Of fewer steps the spread is not known well enough to rest anything on."""

LEAST_TURNS = 2
"""Before a share is good."""

PRIOR_TURNS = 8
"""So many turns the spread of single steps is worth in how much turns are taken to differ; beyond them it may be left out."""

QUANTILE = 3.3
"""Of the normal distribution: how much wider Student's t is where it has this one; the default of `z`."""

GROW_TURNS = 3
"""After so many turns at one share they become longer, by the length of the first."""

FAR = 1.5
"""At so many times the tolerance one period is enough."""

KEEP = 0.9
"""Weight of what was known before a turn, once settled: some ten turns are remembered."""

FORGOTTEN = 0.5
"""Of so many turns a bad share is not known any more."""


class ControlSettings(BaseModel):
    """How much a guaranteed job may lose, and how eagerly the limit is sought."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tolerance: float = Field(
        default=0.05, gt=0, lt=1, description="Most by which a guaranteed job's steps may take longer."
    )
    first_share: float = Field(default=0.05, gt=0, le=1, description="Share that is tried first.")
    resolution: float = Field(
        default=0.02, gt=0, lt=1, description="Settled when the limit is known to this part of the share."
    )
    least_share: float = Field(
        default=0.004, gt=0, le=1, description="Below this an opportunistic job does not train at all."
    )
    z: float = Field(default=3.3, gt=0, description="Standard errors within which a slow-down is taken to be known.")
    aim: float = Field(
        default=0.97, gt=0, lt=1, description="Part of the tolerance that is aimed at; less where turns differ much."
    )
    search_periods: int = Field(
        default=4, ge=1, description="Periods beside the guest in the first turns at a share, for each one without it."
    )
    settled_periods: int = Field(default=49, ge=1, description="The same, once settled, and at most until then.")
    patience: int = Field(default=700, ge=2, description="Periods in which a share has to be seen to be good.")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of the guaranteed job in one control period, or several."""

    count: int = 0
    mean_s: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean, s^2."""

    @classmethod
    def of(cls, durations_s: list[float]) -> Steps:
        """Of single steps."""
        if not durations_s:
            return cls()
        mean = math.fsum(durations_s) / len(durations_s)
        return cls(len(durations_s), mean, math.fsum((d - mean) ** 2 for d in durations_s))

    def __add__(self, other: Steps) -> Steps:
        count = self.count + other.count
        if count == 0:
            return self
        apart = other.mean_s - self.mean_s
        mean = self.mean_s + apart * other.count / count
        return Steps(count, mean, self.squares + other.squares + apart**2 * self.count * other.count / count)

    @property
    def error_s(self) -> float:
        """Standard error of the mean, were steps independent; infinite for fewer than `LEAST_STEPS`."""
        if self.count < LEAST_STEPS:
            return math.inf
        return math.sqrt(self.squares / (self.count - 1) / self.count)

    def slowdown(self, base: Steps) -> tuple[float, float]:
        """By which part of the base these take longer, and the standard error of that, were steps independent."""
        ratio = self.mean_s / base.mean_s
        # First-order error of a ratio of two independent means.
        return ratio - 1, ratio * math.hypot(self.error_s / self.mean_s, base.error_s / base.mean_s)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The slow-downs of several turns at one share, of which each weighs by how many steps it had.

    Not by how well its own steps say that it is known: a turn that happened to see little of the guest has both a small
    slow-down and a small spread.
    """

    turns: float = 0.0
    """How many; old ones count less."""
    periods: float = 0.0
    """How many control periods these had; likewise."""
    mean: float = 0.0
    weight: float = 0.0
    """Sum over the turns of their weights, which are as 1 / variance."""
    squares: float = 0.0
    """Weighted sum of squared distances from the mean."""
    variance: float = 0.0
    """Of a turn of weight 1, were steps independent: the mean over the turns."""

    def plus(self, slowdown: float, error: float, weight: float = 1.0, periods: int = 1, keep: float = 1.0) -> Evidence:
        """With another turn, what was known before weighing so much less.

        Args:
            slowdown: of that turn.
            error: standard error of it, were its steps independent.
            weight: see `weight_of`.
            periods: that it had.
            keep: weight of what was known before.
        """
        before = self.faded(keep)
        turns, both, apart = before.turns + 1, before.weight + weight, slowdown - self.mean
        return Evidence(
            turns,
            before.periods + periods,
            self.mean + apart * weight / both,
            both,
            before.squares + apart**2 * weight * before.weight / both,
            self.variance + (error**2 * weight - self.variance) / turns,
        )

    def faded(self, keep: float = KEEP) -> Evidence:
        """All of it weighing so much less, as after a turn in which nothing was seen of it."""
        return dataclasses.replace(
            self,
            turns=keep * self.turns,
            periods=keep * self.periods,
            weight=keep * self.weight,
            squares=keep * self.squares,
        )

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite before there is a turn.

        Of many turns that of the mean alone if it is less, so much larger that `QUANTILE` of it are as sure as Student's t.
        """
        if self.turns == 0:
            return math.inf
        freedom = self.turns - 1
        error = math.sqrt((self.squares + PRIOR_TURNS * self.variance) / (freedom + PRIOR_TURNS) / self.weight)
        if freedom < PRIOR_TURNS:
            return error
        return min(error, wider(freedom) * math.sqrt(self.squares / freedom / self.weight))

    @property
    def spread(self) -> float:
        """Standard deviation of a mean turn; 0 before there is one."""
        return self.error * math.sqrt(self.turns) if self.turns else 0.0

    def least(self, settings: ControlSettings) -> float:
        """What a turn's slow-down is not below."""
        if self.turns < LEAST_TURNS:
            return -FAR * settings.tolerance
        return self.mean - (settings.z + 1) * math.hypot(self.spread, self.error)

    def error_after(self, periods: float) -> float:
        """The error of the mean once there are so many periods, if they are as those up to now; 0 before there is a turn."""
        return self.error * math.sqrt(self.periods / periods) if self.turns else 0.0


def wider(freedom: float) -> float:
    """How many times further Student's t reaches than the normal distribution, for the same probability as beyond `QUANTILE`.

    Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.7.5, its first two terms: from 7 degrees of freedom on it
    is within 4 %.
    """
    square = QUANTILE**2
    return 1 + (square + 1) / (4 * freedom) + (5 * square**2 + 16 * square + 3) / (96 * freedom**2)


def weight_of(base: Steps, beside: Steps) -> float:
    """How much a turn of these weighs: as 1 / variance of its slow-down, if all steps vary alike."""
    return 1 / (1 / base.count + 1 / beside.count)


@dataclass(frozen=True, slots=True)
class Tried:
    """A share, and what it did to the guaranteed job."""

    share: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class ShareControl:
    """What is known about one guaranteed job and the opportunistic ones beside it; when one comes or goes, a new one begins."""

    share: float = 0.0
    """Compute share of all opportunistic jobs together, now."""
    trial: Tried | None = None
    """The share of this turn, which is `share` but for the period at 0; None: the first one."""
    base: Steps = field(default_factory=Steps)
    """Steps at share 0 in this turn."""
    beside: Steps = field(default_factory=Steps)
    """Steps at the share of the trial in this turn."""
    periods: int = 0
    """ShareControl periods of those; settled at share 0, of all."""
    good: Tried = field(default_factory=Tried)
    """Largest share that was seen to be within the tolerance."""
    bad: Tried | None = None
    """Smallest share that was not; None: none was tried yet."""
    settled: bool = False
    """Whether the share of the trial stays unless the guaranteed job's steps change."""
    far: bool = False
    """Whether the turn before was cut short, as the machine may have stood still in it: of two in a row the second one counts."""


def advance(control: ShareControl, steps: Steps, settings: ControlSettings) -> ShareControl:
    """The control for the next period.

    Args:
        control: that of the period which is over.
        steps: the guaranteed job's steps in it; none if it made no step, and then all stays.
        settings: see there.
    """
    if steps.count == 0:
        return control
    trial = control.trial or Tried(settings.first_share)
    if control.share == 0:
        return _alone(control, trial, steps, settings)
    return _beside(control, trial, steps, settings)


def _alone(control: ShareControl, trial: Tried, steps: Steps, settings: ControlSettings) -> ShareControl:
    """A period at share 0 is over."""
    if trial.share == 0 and control.base.count:  # nobody can be beside this job, unless one of them becomes another one
        slowdown, error = steps.slowdown(control.base)
        again = control.periods >= settings.patience  # a search costs it a few
        if again or abs(slowdown) - settings.z * error > settings.tolerance:
            return ShareControl()
        control = dataclasses.replace(control, periods=control.periods + 1)
    base = control.base + steps
    share = trial.share if base.count >= LEAST_STEPS else 0.0
    return dataclasses.replace(control, share=share, trial=trial, base=base)


def _beside(control: ShareControl, trial: Tried, steps: Steps, settings: ControlSettings) -> ShareControl:
    """A period at the share of the trial is over."""
    known = trial.evidence
    slowdown, error = steps.slowdown(control.base)
    if slowdown - (settings.z + 1) * max(error, known.spread) > FAR * settings.tolerance:
        if control.settled:
            return _begin(ShareControl(bad=control.bad), trial.share / 2, settings)
        if not control.far:  # it may have been the machine
            return _turn(dataclasses.replace(control, far=True))
        return _next(
            dataclasses.replace(
                control, bad=Tried(trial.share, known.plus(slowdown, error, weight_of(control.base, steps)))
            ),
            settings,
        )
    beside, periods = control.beside + steps, control.periods + 1
    slowdown, error = beside.slowdown(control.base)
    if not control.far and slowdown < min(0.0, known.least(settings)):
        # Nobody makes it faster: the machine stood still while it was alone.
        return _turn(dataclasses.replace(control, far=True))
    if control.settled:
        doubt = (settings.z + 1) * math.hypot(max(error, known.spread), known.error)
        if slowdown > settings.tolerance and slowdown - known.mean > doubt:
            return _begin(ShareControl(bad=control.bad), trial.share, settings)
        if known.mean - slowdown > max(doubt, settings.tolerance / 4):
            return _begin(ShareControl(), trial.share, settings)
    control = dataclasses.replace(control, beside=beside, periods=periods)
    if periods < _length(control, known, beside, settings) or math.isinf(error):
        return control
    weight, keep = weight_of(control.base, beside), KEEP if control.settled else 1.0
    seen = Tried(trial.share, known.plus(slowdown, error, weight, periods + 1, keep))
    return _judge(dataclasses.replace(control, trial=seen, far=False), seen, settings)


def _length(control: ShareControl, known: Evidence, beside: Steps, settings: ControlSettings) -> int:
    """Periods beside the guest in this turn."""
    if control.settled:
        return settings.settled_periods
    if beside.error_s <= control.base.error_s:  # what is in doubt now is how long steps take without it
        return settings.search_periods
    return min(settings.search_periods * (1 + int(known.turns) // GROW_TURNS), settings.settled_periods)


def _judge(control: ShareControl, trial: Tried, settings: ControlSettings) -> ShareControl:
    """A turn is over."""
    seen, margin = trial.evidence, settings.z * trial.evidence.error
    if seen.mean - margin > settings.tolerance:
        good = Tried() if control.settled else control.good
        return _next(dataclasses.replace(control, good=good, bad=trial), settings)
    if control.settled:
        return _once_settled(control, trial, settings)
    if seen.turns >= LEAST_TURNS and seen.mean + margin <= settings.tolerance:
        return _next(dataclasses.replace(control, good=trial), settings)
    in_the_end = settings.z * seen.error_after(settings.patience)
    if seen.periods >= settings.patience or seen.mean - seen.error + in_the_end > settings.tolerance:
        return _next(dataclasses.replace(control, bad=trial), settings)
    return _turn(control)


def _once_settled(control: ShareControl, trial: Tried, settings: ControlSettings) -> ShareControl:
    """A turn at the settled share is over: what was taken for its slow-down, or a larger one's, may have been too much."""
    bad = control.bad
    if bad is not None:
        bad = Tried(bad.share, bad.evidence.faded())
    if trial.evidence.mean + settings.z * trial.evidence.error >= settings.aim * settings.tolerance:
        return _turn(dataclasses.replace(control, bad=bad))
    if bad is not None and bad.evidence.turns < FORGOTTEN:
        return _begin(dataclasses.replace(control, good=trial, bad=None), bad.share, settings)
    return _next(dataclasses.replace(control, good=trial, bad=bad), settings)


def _next(control: ShareControl, settings: ControlSettings) -> ShareControl:
    """The next share to try, or the settled one."""
    good, bad = control.good, control.bad
    # Not by the bad one alone: one period in which the machine stood still made its turns differ widely, perhaps.
    known = [tried.evidence for tried in (good, bad) if tried is not None and tried.evidence.turns]
    decidable = settings.z * min(evidence.error_after(settings.patience / 2) for evidence in known)
    aim = max(min(settings.aim * settings.tolerance, settings.tolerance - decidable), settings.tolerance / 2)
    # Where slow-down is proportional to share, this is as near as another turn would come.
    reached = good.share >= 1 or good.evidence.mean >= (1 - settings.resolution) * aim
    if good.share and (reached or (bad is not None and bad.share - good.share <= settings.resolution * bad.share)):
        return _settle(control)
    if bad is None:
        factor = aim / good.evidence.mean if good.evidence.mean > aim / 2 else 2.0
        return _begin(control, min(1.0, factor * good.share), settings)
    room, climb = bad.share - good.share, bad.evidence.mean - good.evidence.mean
    part = (aim - good.evidence.mean) / climb if climb > 0 else 0.5
    return _begin(control, good.share + min(max(part, 0.2), 0.9) * room, settings)


def _begin(control: ShareControl, share: float, settings: ControlSettings) -> ShareControl:
    """Try another share; none that is too small to train with."""
    if share < settings.least_share:
        return _settle(control)
    return _turn(dataclasses.replace(control, trial=Tried(share), settled=False, far=False))


def _settle(control: ShareControl) -> ShareControl:
    """Stay at the largest share that is known to be within the tolerance."""
    return _turn(dataclasses.replace(control, trial=control.good, settled=True))


def _turn(control: ShareControl) -> ShareControl:
    """Another turn of the same trial begins, at share 0."""
    return dataclasses.replace(control, share=0.0, base=Steps(), beside=Steps(), periods=0)
