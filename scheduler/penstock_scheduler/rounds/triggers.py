"""When rounds are decided: periodically (the daemon's default, as in Sia), or whenever something changes (for queues)."""

from __future__ import annotations

from penstock_scheduler.model import ClusterState


class Period:
    """A round every `seconds`, the first one at once.

    Missed rounds are skipped. A failed round is tried again on the next tick.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_s = float("-inf")

    @property
    def next_s(self) -> float:
        """When the next round is due, s since 1970; minus infinity: at once."""
        return self._next_s

    def due(self, now_s: float, state: ClusterState) -> bool:
        """Whether the period is over, or the clock was set back by more than a period."""
        return not self._next_s - self._seconds <= now_s < self._next_s

    def decided(self, now_s: float, state: ClusterState) -> None:
        """Start the next period."""
        self._next_s = now_s + self._seconds


class OnEvent:
    """A round whenever a job arrives, ends or changes its GPUs, or the capacity of a node changes.

    A round is also due `at_latest_s` after the last one, because reports and the passing of time change no job and no node.
    """

    def __init__(self, at_latest_s: float = float("inf")) -> None:
        self._at_latest_s = at_latest_s
        self._decided: ClusterState | None = None
        self._decided_s = float("-inf")

    def due(self, now_s: float, state: ClusterState) -> bool:
        """Whether something has changed since the last decided round."""
        last = self._decided
        if last is None or not 0 <= now_s - self._decided_s < self._at_latest_s:
            return True
        if (len(last.jobs), len(last.nodes)) != (len(state.jobs), len(state.nodes)):
            return True
        # A cluster returns the same object for what has not changed, mostly in the same order.
        return any(
            old is not new and (old.id, old.phase, old.allocation) != (new.id, new.phase, new.allocation)
            for old, new in zip(last.jobs, state.jobs, strict=True)
        ) or any(
            old is not new and (old.name, old.gpus_for_us) != (new.name, new.gpus_for_us)
            for old, new in zip(last.nodes, state.nodes, strict=True)
        )

    def decided(self, now_s: float, state: ClusterState) -> None:
        """Wait for the next change."""
        self._decided, self._decided_s = state, now_s
