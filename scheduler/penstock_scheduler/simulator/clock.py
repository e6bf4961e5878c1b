"""A clock that jumps."""

from __future__ import annotations


class SimulatedClock:
    """Time that passes only by `sleep`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds since the start of the simulation, plus its start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Jump ahead."""
        self._now_s += seconds
