"""Groups of trials: early results decide which trial of a search gets the next slice, and which gets none any more.

Gandiva (OSDI '18, section 5.3) lets trials of a search give way to one another by what they show early. Here that is asynchronous
successive halving (Li et al., *A system for massively parallel hyperparameter tuning*, MLSys '20). A trial trains to a first
*rung*; of those who have reached a rung the best 1 of `eta` train on to the next, which is `eta` times as far. The others rest:
they are hopeless, unless enough worse ones come after them. When nobody is on the way to a rung any more, the best of it goes
on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.model import JobId


class GroupSettings(BaseModel):
    """How early a trial is judged, and how hard."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    first_s: float = Field(default=300.0, gt=0, description="Seconds of training before a trial is first judged.")
    eta: int = Field(
        default=3, ge=2, description="One of so many trains on from each rung; the next is so many times as far."
    )


@dataclass(frozen=True, slots=True)
class TrialSeen:
    """What is known of a trial."""

    job: JobId
    trained_s: float
    """Seconds that it has trained."""
    results: tuple[tuple[float, float], ...] = ()
    """(seconds trained, metric), the higher the better, in the order in which they came."""

    def metric(self, by_s: float) -> float:
        """Best result in so many seconds of training; -inf: none."""
        return max((metric for at_s, metric in self.results if at_s <= by_s), default=float("-inf"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the trials of one group."""

    order: tuple[JobId, ...]
    """Who trains on, those who get the next slice first."""
    resting: tuple[JobId, ...]
    """Who does not, as things stand."""
    judged: int = 0
    """So many of the first of `order` have reached a rung; nothing tells the others apart yet."""


def judge(trials: Sequence[TrialSeen], settings: GroupSettings) -> Verdict:
    """Who of a group trains on.

    Args:
        trials: all of the group that have not ended, in the order in which they came.
        settings: see there.
    """
    levels = [_level(trial, settings) for trial in trials]
    going = {trial.job for trial, level in zip(trials, levels, strict=True) if level == 0}
    for rung in range(1, max(levels, default=0) + 1):
        by_s = settings.first_s * settings.eta ** (rung - 1)
        there = [index for index, level in enumerate(levels) if level >= rung]
        there.sort(key=lambda index: (-trials[index].metric(by_s), index))
        on_the_way = any(trials[i].job in going for i, level in enumerate(levels) if level < rung)
        best = there[: max(len(there) // settings.eta, 0 if on_the_way else 1)]
        going |= {trials[index].job for index in best if levels[index] == rung}
    ranked = sorted(
        (index for index, trial in enumerate(trials) if trial.job in going),
        key=lambda index: (-levels[index], -trials[index].metric(float("inf")) if levels[index] else 0.0, index),
    )
    return Verdict(
        tuple(trials[index].job for index in ranked),
        tuple(trial.job for trial in trials if trial.job not in going),
        sum(levels[index] > 0 for index in ranked),
    )


def _level(trial: TrialSeen, settings: GroupSettings) -> int:
    """Rungs that it has reached. Who reports nothing is not judged."""
    level, threshold_s = 0, settings.first_s
    while trial.results and trial.trained_s >= threshold_s:
        level, threshold_s = level + 1, threshold_s * settings.eta
    return level
