"""What earlier jobs of the same kind have shown, and how far a new job is believed to be like them.

A new job starts with the model of its kin. Each of its own measurements raises or lowers the belief that it is one of them. Once
it is more likely a stranger, the kin's model is dropped and only its own measurements count, so that a wrong match costs the job
its first placement and not its later ones.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from penstock_profiles.estimators import TrainingEstimator

CERTAINTY = 0.8
"""Belief before the first measurement."""

STRANGERS_CERTAINTY = 0.6
"""The same for kin of another user or at another site, who may mean another program by the same name."""

NEAR, FAR = 0.1, 1.0
"""Scale of the error of a step's time, as the logarithm of measured over predicted: for kin, and for a stranger."""

MOST_ODDS = 4.0
"""Bound of the logarithm of the odds, so that a job that changes is noticed after two measurements that are far off."""


@dataclass(frozen=True, slots=True)
class Kin:
    """What earlier jobs of one kind have shown together."""

    estimator: TrainingEstimator
    most_gpus: int
    """Most GPUs on which one of them was measured."""
    work: tuple[float, ...] = ()
    """Whole work of those whose work is known, in samples at the estimator's initial batch size."""
    certainty: float = CERTAINTY
    """Belief that a new job is like them, in (0, 1)."""


class Belief:
    """The probability that a job is like its kin."""

    def __init__(self, certainty: float = CERTAINTY) -> None:
        self._log_odds = math.log(certainty / (1 - certainty))

    def saw(self, predicted_s: float, measured_s: float) -> None:
        """Compare a step of the job with what its kin's model predicts. Both densities are Laplace's."""
        off = abs(math.log(measured_s / predicted_s))
        gained = (math.log(1 / NEAR) - off / NEAR) - (math.log(1 / FAR) - off / FAR)
        self._log_odds = min(max(self._log_odds + gained, -MOST_ODDS), MOST_ODDS)

    @property
    def probability(self) -> float:
        """In (0, 1)."""
        return 1 / (1 + math.exp(-self._log_odds))

    @property
    def holds(self) -> bool:
        """Whether the job is more likely kin than a stranger."""
        return self._log_odds > 0


def kind_by_name(name: str) -> str:
    """A job's name without the numbers in it: `train-lr0.1-17` and `train-lr0.3-18` are one kind."""
    return re.sub(r"\d+(?:\.\d+)?", "#", name)
