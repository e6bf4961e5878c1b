"""When rounds come: by period (the daemon's default, as in Sia) or at the instants of events (queueing policies)."""

from __future__ import annotations

from penstock_scheduler.model import ClusterState


class Period:
    """A round every `seconds`, the first at once. Rounds that were missed are not made up for; one that failed is
    tried again on the next tick."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_s = float("-inf")

    def due(self, now_s: float, state: ClusterState) -> bool:
        """Whether the period is over, or the clock was set back by more than one."""
        return not self._next_s - self._seconds <= now_s < self._next_s

    def decided(self, now_s: float, state: ClusterState) -> None:
        """Start the next period."""
        self._next_s = now_s + self._seconds


class OnEvent:
    """A round whenever a job came, ended or changed its hold on GPUs, or a node's capacity changed."""

    def __init__(self) -> None:
        self._decided: object = None

    def due(self, now_s: float, state: ClusterState) -> bool:
        """Whether something changed since the last round that was decided."""
        return _events(state) != self._decided

    def decided(self, now_s: float, state: ClusterState) -> None:
        """Wait for the next change."""
        self._decided = _events(state)


def _events(state: ClusterState) -> object:
    return (
        {(job.id, job.phase, job.allocation) for job in state.jobs},
        {(node.name, node.gpus_for_us) for node in state.nodes},
    )
