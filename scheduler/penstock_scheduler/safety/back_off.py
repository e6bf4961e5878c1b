"""How long to leave alone what has failed several times in a row."""

from __future__ import annotations

MOST_DOUBLINGS = 20
"""A larger power of two could be too large for a float."""


def back_off_s(first_s: float, times: int, longest_s: float) -> float:
    """The pause after `times` (>= 1) failures in a row, s: `first_s`, twice as long each time, up to the larger of the two."""
    return min(first_s * 2.0 ** min(times - 1, MOST_DOUBLINGS), max(longest_s, first_s))
