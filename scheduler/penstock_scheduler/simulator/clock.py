"""A clock that jumps."""

from __future__ import annotations

import math
from collections.abc import Callable


class SimulatedClock:
    """Time that passes only in `sleep`.

    `next_event_s` tells when something happens that ends a sleep early; None: sleeps are never cut short.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self.next_event_s: Callable[[], float] | None = None

    def now_s(self) -> float:
        """Seconds since the start of the simulation, plus its start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Jump ahead. An infinite sleep in which nothing ever happens takes no time."""
        until_s = self._now_s + seconds
        if self.next_event_s is not None:
            until_s = min(until_s, max(self.next_event_s(), self._now_s))
        if math.isfinite(until_s):
            self._now_s = until_s
