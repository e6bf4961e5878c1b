"""AntMan's control of one GPU: a guaranteed job keeps its speed, and opportunistic jobs get what is left.

After *AntMan: Dynamic scaling on GPU clusters for deep learning* (OSDI '20), section 4.2. The compute share of the
opportunistic jobs is the part of the time, from 0 to 1, in which they may train: a duty cycle between their steps. When
a guaranteed job comes, the share is 0. It is then raised until the guaranteed job's steps take longer than the
tolerance allows.

1. **Measure in cycles.** A *measuring cycle* is one control period at share 0, followed by some periods at the share
   that is tried. The slowdown of a cycle is how much longer the steps of the second part took than those of the first:
   total time over steps. So each cycle has its own reference, which is seconds old while searching and minutes old once
   settled. If the machine slows down for other reasons, both parts slow down, and the opportunistic jobs are not
   charged with it.

2. **Judge a share by how much cycles differ.** Steps beside another job are not independent: they wait for it or they
   do not, and other load comes in spells. So the uncertainty of the mean is taken from the differences between cycles.
   What the spread of single steps would explain counts as four more cycles, which matters while there are few.

   - A share is *good* if the upper bound of its slowdown is within the tolerance.
   - It is *bad* if the lower bound is beyond the tolerance, or if it is unlikely to prove good within `patience`
     periods.
   - If two cycles in a row have a period that is too slow beyond doubt, the second ends at once, and the share is bad.
   - Cycles are short at first, so that a bad share ends soon. At a share that stays in doubt they become longer, if it
     is the steps beside the other jobs that vary. So these jobs have most of what they will get while the control makes
     sure.
   - A cycle in which sharing seems to have made the job faster is left out, unless the one before it was.

3. **Choose the next share.** The paper raises the share step by step. Here the next share is where the slowdown,
   interpolated between the largest good and the smallest bad share, meets the aim. The aim is a little within the
   tolerance, and more where cycles differ much, because otherwise no patience would be enough. Until a share was bad,
   the next one is at most twice the last one.

4. **Settle.** The search ends when the limit is known to `resolution`. Cycles are then long, so that the periods at
   share 0 cost the opportunistic jobs a fiftieth (more where a period has fewer than `LEAST_STEPS` steps).

   - If one period is too slow beyond doubt, the share is 0 at once, and a new search begins from half the share.
   - If the cycle so far differs from what was known, up or down, the same share is measured anew, reference first. So
     the other jobs are neither blamed nor acquitted before both parts have been compared again.
   - If after a cycle the slowdown is surely less than the aim, the search goes on from there, up to the smallest bad
     share. What made that share bad may have been the machine. So it is forgotten as fast as what was known of the
     settled share, and is then tried again.
   - Settled at share 0, a new search begins after `patience` periods.

5. **Pay back.** What the guaranteed job loses beyond `BEARABLE` of the tolerance is added up, period by period. When it
   is more than chance explains, the share is 0 until that is made up for. So the job keeps its speed over a minute,
   whatever is tried meanwhile and whatever the other jobs do.

`advance` is one control period; a `ShareControl` is all that is kept from one to the next.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

LEAST_STEPS = 10
"""With fewer steps, their spread is too uncertain to be used."""

LEAST_CYCLES = 2
"""Least number of cycles before it is known how little a cycle's slowdown can be."""

LEAST_WEIGHT = 50
"""Least evidence before a share is good, as `weight_of` counts it: of 100 steps at share 0 and 100 beside the other jobs,
in one cycle or more. Fewer may have met the other jobs too seldom."""

PRIOR_CYCLES = 4
"""The spread of single steps counts as this many cycles."""

GROW_CYCLES = 3
"""After each this many cycles at one share, cycles become longer by the length of the first."""

FAR = 1.5
"""At this many times the tolerance, one period is enough evidence."""

KEEP = 0.9
"""Once settled, weight of what was known before a cycle: some ten cycles are remembered."""

FORGOTTEN = 0.5
"""A bad share with evidence of fewer cycles than this is forgotten."""

ALONE_KEEP = 0.9
"""Weight of what was known of the job alone before a period at share 0: some ten of them are remembered, and none from
before a new search, which begins because the job has changed."""

BEARABLE = 0.98
"""Part of the tolerance that is not made up for. The rest is for what is owed by chance, and for the latest period."""

CHANCE = 4.0
"""What is owed may reach this many standard errors of the mean of one period's steps by chance."""

LEAST_OWED = 0.4
"""The same, as a part of the tolerance, where steps hardly vary."""

MOST_OWED = 8.0
"""One period counts as at most this many times the tolerance: the machine may have stood still, or the job itself."""


class ControlSettings(BaseModel):
    """How much a guaranteed job may lose, and how eagerly the control searches for the largest share."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tolerance: float = Field(
        default=0.05, gt=0, lt=1, description="Largest slowdown of a guaranteed job's steps; 0.05 is 5 %."
    )

    # docs/measurements/sharing.md has what other values of these give.
    first_share: ClassVar[float] = 0.05
    """First share that is tried. The search goes up or down from it."""

    resolution: ClassVar[float] = 0.02
    """The search ends when the limit is known to this part of the share."""

    least_share: ClassVar[float] = 0.004
    """Smallest share. Below it, opportunistic jobs do not train at all."""

    z: ClassVar[float] = 3.3
    """Number of standard errors within which a slowdown is considered known: fewer than one comparison in a thousand errs."""

    aim: ClassVar[float] = 0.95
    """Part of the tolerance that is aimed at; less where measurements differ much. With 0.97, one of 2,000 scenarios settled
    beyond the tolerance."""

    search_periods: ClassVar[int] = 4
    """Control periods with opportunistic jobs for each period without, at first."""

    settled_periods: ClassVar[int] = 49
    """The same, once the search has ended, and the most until then: opportunistic jobs lose 2 % of their time."""

    patience: ClassVar[int] = 700
    """Control periods within which a share must prove good: two hours of periods of 10 s."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of the guaranteed job in one control period, or several."""

    count: int = 0
    mean_s: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean, s^2."""

    @classmethod
    def of(cls, durations_s: list[float]) -> Steps:
        """Summarise single steps."""
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

    def faded(self, keep: float) -> Steps:
        """The same with less weight."""
        return Steps(max(round(keep * self.count), min(self.count, 1)), self.mean_s, keep * self.squares)

    @property
    def error_s(self) -> float:
        """Standard error of the mean if steps were independent; infinite for fewer than `LEAST_STEPS`."""
        if self.count < LEAST_STEPS:
            return math.inf
        return math.sqrt(self.squares / (self.count - 1) / self.count)

    def slowdown(self, base: Steps) -> tuple[float, float]:
        """By which part of the base these take longer, and the standard error of that if steps were independent."""
        ratio = self.mean_s / base.mean_s
        # First-order error of a ratio of two independent means.
        return ratio - 1, ratio * math.hypot(self.error_s / self.mean_s, base.error_s / base.mean_s)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The slowdowns of several cycles at one share, each weighted by its number of steps.

    They are not weighted by the spread of their own steps: a cycle that happened to see little of the other jobs has
    both a small slowdown and a small spread.
    """

    cycles: float = 0.0
    """Number of cycles; old ones count less."""
    periods: float = 0.0
    """Number of their control periods; old ones count less."""
    mean: float = 0.0
    weight: float = 0.0
    """Sum of the cycles' weights, which are proportional to 1 / variance."""
    squares: float = 0.0
    """Weighted sum of squared distances from the mean."""
    variance: float = 0.0
    """Variance of a cycle of weight 1 if steps were independent: the mean over the cycles."""

    def plus(self, slowdown: float, error: float, weight: float = 1.0, periods: int = 1, keep: float = 1.0) -> Evidence:
        """Add a cycle.

        Args:
            slowdown: the cycle's slowdown.
            error: its standard error if its steps were independent.
            weight: see `weight_of`.
            periods: number of its control periods.
            keep: weight of what was known before.
        """
        before = self.faded(keep)
        cycles, both, apart = before.cycles + 1, before.weight + weight, slowdown - self.mean
        return Evidence(
            cycles,
            before.periods + periods,
            self.mean + apart * weight / both,
            both,
            before.squares + apart**2 * weight * before.weight / both,
            self.variance + (error**2 * weight - self.variance) / cycles,
        )

    def faded(self, keep: float = KEEP) -> Evidence:
        """The same evidence with less weight, as after a cycle at another share."""
        return dataclasses.replace(
            self,
            cycles=keep * self.cycles,
            periods=keep * self.periods,
            weight=keep * self.weight,
            squares=keep * self.squares,
        )

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite without a cycle."""
        if self.cycles == 0:
            return math.inf
        squares, freedom = self.squares + PRIOR_CYCLES * self.variance, self.cycles - 1 + PRIOR_CYCLES
        return math.sqrt(squares / freedom / self.weight)

    @property
    def spread(self) -> float:
        """Standard deviation of an average cycle; 0 without one."""
        return self.error * math.sqrt(self.cycles) if self.cycles else 0.0

    def least(self, settings: ControlSettings) -> float:
        """A lower bound of a cycle's slowdown."""
        if self.cycles < LEAST_CYCLES:
            return -FAR * settings.tolerance
        return self.mean - (settings.z + 1) * math.hypot(self.spread, self.error)

    def error_after(self, periods: float) -> float:
        """Expected error of the mean after this many periods, if they are like those so far; 0 without a cycle."""
        return self.error * math.sqrt(self.periods / periods) if self.cycles else 0.0


def weight_of(base: Steps, beside: Steps) -> float:
    """Weight of a cycle of these steps: proportional to 1 / variance of its slowdown if all steps vary alike."""
    return 1 / (1 / base.count + 1 / beside.count)


@dataclass(frozen=True, slots=True)
class Tried:
    """A share and its effect on the guaranteed job."""

    share: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class ShareControl:
    """The control of one guaranteed job and the opportunistic jobs beside it. When a job comes or leaves, a new one
    begins."""

    share: float = 0.0
    """Present compute share of each opportunistic job."""
    trial: Tried | None = None
    """The share of this cycle: `share`, except in the period at share 0. None: the first share."""
    base: Steps = field(default_factory=Steps)
    """Steps at share 0 in this cycle."""
    beside: Steps = field(default_factory=Steps)
    """Steps at the share of the trial in this cycle."""
    periods: int = 0
    """Control periods at the share of the trial. Settled at share 0: all control periods."""
    good: Tried = field(default_factory=Tried)
    """Largest share that is within the tolerance."""
    bad: Tried | None = None
    """Smallest share that is beyond it; None: none is known."""
    settled: bool = False
    """Whether the search has ended, so that the share stays unless the guaranteed job's steps change."""
    far: bool = False
    """Whether the cycle before was cut short, since the machine may have stood still. Of two in a row the second
    counts."""
    alone: Steps = field(default_factory=Steps)
    """Steps at share 0 in this cycle and the last ones."""
    owed: float = 0.0
    """Sum over control periods of slowdown less `BEARABLE` of the tolerance: what the job has lost and is owed."""
    repays: bool = False
    """Whether the share is 0 in the midst of a cycle, because of what is owed."""


def advance(control: ShareControl, steps: Steps, settings: ControlSettings) -> ShareControl:
    """The control for the next period.

    Args:
        control: the control of the period that is over.
        steps: the guaranteed job's steps in that period. Without steps, the control stays as it is.
        settings: the settings.
    """
    if steps.count == 0:
        return control
    trial = control.trial or Tried(settings.first_share)
    before, control = control, _counted(control, steps, settings)
    if before.repays:
        following = dataclasses.replace(control, share=trial.share, base=control.base + steps)
    elif before.share == 0:
        following = _alone(control, trial, steps, settings)
    else:
        following = _beside(control, trial, steps, settings)
    # A little is owed by chance. Once it is paid back, all of it is.
    by_chance = 0.0 if before.share == 0 else _by_chance(before, steps, settings)
    repays = following.share > 0 and control.owed > by_chance
    share = 0.0 if repays else following.share
    return dataclasses.replace(following, share=share, owed=control.owed, repays=repays)


def _counted(control: ShareControl, steps: Steps, settings: ControlSettings) -> ShareControl:
    """With what the job is owed after the period, and with what is known of it alone."""
    slowdown, alone = 0.0, control.alone
    if control.share == 0:
        alone = alone.faded(ALONE_KEEP) + steps
    else:
        slowdown = min(steps.slowdown(alone)[0], MOST_OWED * settings.tolerance)
    owed = control.owed + slowdown - BEARABLE * settings.tolerance
    return dataclasses.replace(control, alone=alone, owed=max(owed, 0.0))


def _by_chance(control: ShareControl, steps: Steps, settings: ControlSettings) -> float:
    """How much a job may be owed by chance: by how much the mean of its steps alone varies. How much they vary beside the
    other jobs is these jobs' doing."""
    alone = control.alone
    error = alone.error_s * math.sqrt(1 + alone.count / steps.count) / alone.mean_s
    return max(CHANCE * error, LEAST_OWED * settings.tolerance)


def _alone(control: ShareControl, trial: Tried, steps: Steps, settings: ControlSettings) -> ShareControl:
    """After a period at share 0."""
    if trial.share == 0 and control.base.count:  # settled at 0: no share is small enough, unless a job has changed
        slowdown, error = steps.slowdown(control.base)
        again = control.periods >= settings.patience  # a search costs the job a few periods
        if again or abs(slowdown) - settings.z * error > settings.tolerance:
            return ShareControl()
        control = dataclasses.replace(control, periods=control.periods + 1)
    base = control.base + steps
    share = trial.share if base.count >= LEAST_STEPS else 0.0
    return dataclasses.replace(control, share=share, trial=trial, base=base)


def _beside(control: ShareControl, trial: Tried, steps: Steps, settings: ControlSettings) -> ShareControl:
    """After a period at the share of the trial."""
    known = trial.evidence
    slowdown, error = steps.slowdown(control.base)
    if slowdown - (settings.z + 1) * max(error, known.spread) > FAR * settings.tolerance:
        if control.settled:
            return _begin(ShareControl(bad=control.bad), trial.share / 2, settings)
        if not control.far:  # the machine may have stood still
            return _new_cycle(dataclasses.replace(control, far=True))
        return _next(
            dataclasses.replace(
                control, bad=Tried(trial.share, known.plus(slowdown, error, weight_of(control.base, steps)))
            ),
            settings,
        )
    beside, periods = control.beside + steps, control.periods + 1
    slowdown, error = beside.slowdown(control.base)
    if not control.far and slowdown < min(0.0, known.least(settings)):
        # Sharing makes no job faster: the machine stood still while the job was alone.
        return _new_cycle(dataclasses.replace(control, far=True))
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
    """Number of periods at the share of the trial in this cycle."""
    if control.settled:
        return settings.settled_periods
    if beside.error_s <= control.base.error_s:  # the uncertain part is how long steps take at share 0
        return settings.search_periods
    return min(settings.search_periods * (1 + int(known.cycles) // GROW_CYCLES), settings.settled_periods)


def _judge(control: ShareControl, trial: Tried, settings: ControlSettings) -> ShareControl:
    """After a cycle."""
    seen, margin = trial.evidence, settings.z * trial.evidence.error
    if seen.mean - margin > settings.tolerance:
        good = Tried() if control.settled else control.good
        return _next(dataclasses.replace(control, good=good, bad=trial), settings)
    if control.settled:
        return _once_settled(control, trial, settings)
    if seen.weight >= LEAST_WEIGHT and seen.mean + margin <= settings.tolerance:
        return _next(dataclasses.replace(control, good=trial), settings)
    in_the_end = settings.z * seen.error_after(settings.patience)
    if seen.periods >= settings.patience or seen.mean - seen.error + in_the_end > settings.tolerance:
        return _next(dataclasses.replace(control, bad=trial), settings)
    return _new_cycle(control)


def _once_settled(control: ShareControl, trial: Tried, settings: ControlSettings) -> ShareControl:
    """After a cycle at the settled share: its slowdown, or that of a larger share, may have been overestimated."""
    bad = control.bad
    if bad is not None:
        bad = Tried(bad.share, bad.evidence.faded())
    if trial.evidence.mean + settings.z * trial.evidence.error >= settings.aim * settings.tolerance:
        return _new_cycle(dataclasses.replace(control, bad=bad))
    if bad is not None and bad.evidence.cycles < FORGOTTEN:
        return _begin(dataclasses.replace(control, good=trial, bad=None), bad.share, settings)
    return _next(dataclasses.replace(control, good=trial, bad=bad), settings)


def _next(control: ShareControl, settings: ControlSettings) -> ShareControl:
    """The next share to try, or the settled one."""
    good, bad = control.good, control.bad
    # Not by the bad share alone: a single stall of the machine may have made its cycles differ widely.
    known = [tried.evidence for tried in (good, bad) if tried is not None and tried.evidence.cycles]
    decidable = settings.z * min(evidence.error_after(settings.patience / 2) for evidence in known)
    aim = max(min(settings.aim * settings.tolerance, settings.tolerance - decidable), settings.tolerance / 2)
    # Where slowdown is proportional to share, another cycle would come no nearer.
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
    """Try another share, unless it is too small to train with."""
    if share < settings.least_share:
        return _settle(control)
    return _new_cycle(dataclasses.replace(control, trial=Tried(share), settled=False, far=False))


def _settle(control: ShareControl) -> ShareControl:
    """Stay at the largest good share."""
    return _new_cycle(dataclasses.replace(control, trial=control.good, settled=True))


def _new_cycle(control: ShareControl) -> ShareControl:
    """Begin another cycle of the same trial, at share 0."""
    return dataclasses.replace(control, share=0.0, base=Steps(), beside=Steps(), periods=0)
