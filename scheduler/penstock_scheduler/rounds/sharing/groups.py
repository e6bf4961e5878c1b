"""Groups of trials: early results decide which trial of a search gets the next time slice, and which gets no more.

In Gandiva (OSDI '18, section 5.3), trials of a search give way to one another by their early results. Here this is
asynchronous successive halving (Li et al., *A system for massively parallel hyperparameter tuning*, MLSys '20):

1. A trial trains to a first *rung*. Each further rung is `eta` times as far.
2. Of the trials that have reached a rung, the best 1 in `eta` train on to the next one.
3. The others rest. They go on only if enough worse trials reach the rung after them.
4. When no trial is on its way to a rung any more, its best trial goes on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.model import JobId


class GroupSettings(BaseModel):
    """How early and how strictly trials are judged."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    first_s: float = Field(
        default=300.0, gt=0, description="Time for which a trial trains before it is first judged, seconds."
    )
    eta: int = Field(
        default=3,
        ge=2,
        description="One in this many trials trains on from each rung; the next rung is this many times as far.",
    )


@dataclass(frozen=True, slots=True)
class TrialSeen:
    """What is known about a trial."""

    job: JobId
    trained_s: float
    """Time that it has trained, s."""
    results: tuple[tuple[float, float], ...] = ()
    """(seconds trained, metric) in the order of their arrival. Higher metrics are better."""

    def metric(self, by_s: float) -> float:
        """Best result within this much training; -inf: none."""
        return max((metric for at_s, metric in self.results if at_s <= by_s), default=float("-inf"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of the trials of one group."""

    order: tuple[JobId, ...]
    """Trials that train on, first those that get the next time slice."""
    resting: tuple[JobId, ...]
    """Trials that rest for now."""
    judged: int = 0
    """Number of trials at the front of `order` that have reached a rung. Nothing distinguishes the others yet."""


def judge(trials: Sequence[TrialSeen], settings: GroupSettings) -> Verdict:
    """Judge the trials of a group.

    Args:
        trials: the trials that have not ended, in the order of their arrival.
        settings: the settings.
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
    """Number of rungs that the trial has reached. A trial that reports nothing is not judged."""
    level, threshold_s = 0, settings.first_s
    while trial.results and trial.trained_s >= threshold_s:
        level, threshold_s = level + 1, threshold_s * settings.eta
    return level
