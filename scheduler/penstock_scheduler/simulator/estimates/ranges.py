"""Ranges of times, from what happens in several futures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

CHANCE = 0.8
"""Probability with which a range is meant to contain what happens."""

FUTURES = 19
"""With so many futures, the second and the last but one are the ends of a range of 80 %: a further future falls into each of
the 20 gaps with the same probability."""

SOON_S = 60.0
"""Time from now on to which a range of a few seconds is as wide as one of a minute."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of times from now on, s."""

    low_s: float
    middle_s: float
    """The median."""
    high_s: float
    """Infinite, as the median may be: after the end of the futures."""

    def holds(self, after_s: float) -> bool:
        """Whether it contains a time."""
        return self.low_s <= after_s <= self.high_s

    def widened(self, width: float) -> Range:
        """A range whose ends are `width` times as far from the median, on a logarithmic scale."""
        if not math.isfinite(self.middle_s):
            return replace(self, low_s=self.low_s / max(width, 1.0))
        scale_s = self.middle_s + SOON_S
        low_s = max(scale_s * ((self.low_s + SOON_S) / scale_s) ** width - SOON_S, 0.0)
        if not math.isfinite(self.high_s):
            return replace(self, low_s=low_s)
        return replace(self, low_s=low_s, high_s=scale_s * ((self.high_s + SOON_S) / scale_s) ** width - SOON_S)


def range_of(after_s: Sequence[float]) -> Range | None:
    """The range of `CHANCE` for one time, from the same time in each future; None: even its beginning is after their end.

    Args:
        after_s: s from now on.
    """
    ordered = np.sort(np.asarray(after_s, dtype=np.float64))
    rank = (len(ordered) + 1) * (1 - CHANCE) / 2 - 1
    low_s, middle_s, high_s = (_at(ordered, place) for place in (rank, (len(ordered) - 1) / 2, len(ordered) - 1 - rank))
    return Range(low_s, middle_s, high_s) if math.isfinite(low_s) else None


def _at(ordered: np.ndarray[tuple[int], np.dtype[np.float64]], place: float) -> float:
    """The value at a place between two, in proportion; infinite if one of the two is."""
    place = min(max(place, 0.0), len(ordered) - 1.0)
    below, share = int(place), place - int(place)
    if share == 0:
        return float(ordered[below])
    return float(ordered[below] * (1 - share) + ordered[below + 1] * share)
