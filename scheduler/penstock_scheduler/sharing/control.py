"""AntMan's control of one GPU: a guaranteed job keeps its speed, opportunistic jobs get what is left over.

After *AntMan: Dynamic scaling on GPU clusters for deep learning* (OSDI '20), section 4.2. The compute share of the
opportunistic jobs is the part of the time, 0 to 1, in which they may train (a duty cycle between their steps). When a guaranteed
job comes, it is 0, and the guaranteed job's step time is taken as its base. Then the share is raised until steps take
longer than the tolerance allows.

The paper raises it step by step. Here the step doubles, then halves the interval between the largest share that was seen
to be within the tolerance and the smallest that was not; a share counts as within only if the step time's confidence interval
is. Once settled, the share goes up only when the guaranteed job has become less sensitive, and down, within one period,
as soon as its steps are too slow.

`advance` is one control period; a `Control` is all that is remembered from one to the next.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

LEAST_STEPS = 10
"""Of fewer steps the spread is not known well enough to rest anything on."""


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
    z: float = Field(default=3.3, gt=0, description="Standard errors within which a step time is taken to be known.")
    base_error: float = Field(
        default=0.03,
        gt=0,
        description="The base is known when it is uncertain by no more than this part of the tolerance.",
    )
    patience: int = Field(
        default=30, ge=1, description="Most periods for measuring the base, or a share before it counts as too much."
    )


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
        """Standard error of the mean; infinite for fewer than `LEAST_STEPS`."""
        if self.count < LEAST_STEPS:
            return math.inf
        return math.sqrt(self.squares / (self.count - 1) / self.count)


@dataclass(frozen=True, slots=True)
class Control:
    """What is known about one guaranteed job and the opportunistic ones beside it; when one comes or goes, a new one begins."""

    share: float = 0.0
    """Compute share of all opportunistic jobs together, now."""
    base: Steps = field(default_factory=Steps)
    """Steps at share 0."""
    based: bool = False
    """Whether the base is known."""
    good: float = 0.0
    """Largest share that was seen to be within the tolerance."""
    good_slowdown: float = 0.0
    """Slow-down that was seen there, as a part of the base."""
    bad: float = math.inf
    """Smallest share that was not."""
    seen: Steps = field(default_factory=Steps)
    """Steps at the present share."""
    periods: int = 0
    """Control periods at the present share."""
    settled_at: float | None = None
    """Slow-down at which it settled; None: it is still looking."""

    @property
    def settled(self) -> bool:
        """Whether the share stays as it is unless the guaranteed job's steps change."""
        return self.settled_at is not None


def advance(control: Control, steps: Steps, settings: ControlSettings) -> Control:
    """The control for the next period.

    Args:
        control: that of the period which is over.
        steps: the guaranteed job's steps in it; none if it made no step, and then the share stays.
        settings: see there.
    """
    if steps.count == 0:
        return control
    if not control.based:
        base, periods = control.base + steps, control.periods + 1
        certain = settings.z * base.error_s <= settings.base_error * settings.tolerance * base.mean_s
        measured = dataclasses.replace(
            control, base=base, periods=periods, based=certain or periods >= settings.patience
        )
        return _try(measured, settings) if measured.based else measured
    if control.settled:
        return _watch(control, steps, settings)
    seen = dataclasses.replace(control, seen=control.seen + steps, periods=control.periods + 1)
    least, most = _slowdown(seen.seen, seen.base, settings.z)
    if most <= settings.tolerance:
        slowdown = seen.seen.mean_s / seen.base.mean_s - 1
        return _try(dataclasses.replace(seen, good=seen.share, good_slowdown=slowdown), settings)
    if least > settings.tolerance or seen.periods >= settings.patience:
        return _try(dataclasses.replace(seen, bad=seen.share), settings)
    return seen


def _watch(control: Control, steps: Steps, settings: ControlSettings) -> Control:
    """One period at a settled share: cut it when the guaranteed job is too slow, look anew when it has got room."""
    assert control.settled_at is not None
    least, most = _slowdown(steps, control.base, settings.z)
    if least > settings.tolerance:
        if control.share == 0:
            return Control()  # it is slow all by itself: what it was compared with is out of date
        lower = dataclasses.replace(control, bad=control.share, good=0.0, good_slowdown=0.0, settled_at=None)
        return _at(lower, control.share / 2 if control.share / 2 >= settings.least_share else 0.0)
    if most < control.settled_at - settings.tolerance / 2:
        return _try(dataclasses.replace(control, bad=math.inf, settled_at=None), settings)
    return control


def _try(control: Control, settings: ControlSettings) -> Control:
    """The next share to try, or the settled one."""
    good, bad = control.good, control.bad
    if bad == math.inf:
        return _settle(control) if good >= 1 else _at(control, min(1.0, max(2 * good, settings.first_share)))
    share = (good + bad) / 2
    if bad - good <= settings.resolution * bad or share < settings.least_share:
        return _settle(control)
    return _at(control, share)


def _settle(control: Control) -> Control:
    """Stay at the largest share that is known to be within the tolerance."""
    return dataclasses.replace(_at(control, control.good), settled_at=control.good_slowdown)


def _at(control: Control, share: float) -> Control:
    return dataclasses.replace(control, share=share, seen=Steps(), periods=0)


def _slowdown(seen: Steps, base: Steps, z: float) -> tuple[float, float]:
    """Lower and upper end of how much longer steps take than the base, as a part of the base."""
    ratio = seen.mean_s / base.mean_s
    # First-order error of a ratio of two independent means.
    error = z * ratio * math.hypot(seen.error_s / seen.mean_s, base.error_s / base.mean_s)
    return ratio - error - 1, ratio + error - 1
