"""The site's recorded history, as the waiting policy needs it."""

from __future__ import annotations

from penstock_scheduler.burst.history import averages
from penstock_scheduler.burst_manager.settings import BurstSettings
from penstock_scheduler.messages import JobView
from penstock_scheduler.model.waiting import Averages, Wait, WaitingPolicy, by_budget
from penstock_scheduler.store import SqlStore

HISTORY_S = 300.0
"""How often the recorded history is read again."""

NEWEST = 2000
"""Number of ended jobs that it covers."""


class SiteHistory:
    """Ended jobs, oldest first, and the waiting policy that follows from them and the settings."""

    def __init__(self, settings: BurstSettings, store: SqlStore) -> None:
        self._settings, self._store = settings, store
        self._read_s = -1e18
        self.past: list[JobView] = []
        self.waiting = self._policy()

    def learn(self, now_s: float) -> None:
        """Read the history again if it is time."""
        if now_s - self._read_s < HISTORY_S:
            return
        self._read_s = now_s
        self.past = [view for _, view in reversed(self._store.jobs(states=("ended",), limit=NEWEST))]
        self.waiting = self._policy()

    def _policy(self) -> WaitingPolicy:
        settings = self._settings
        return by_budget(
            Wait(settings.wait),
            settings.waiting_budget_percent,
            averages(self.past, Averages(1.0, settings.mean_runtime_h, settings.mean_gpus)),
            short_h=settings.short_h,
            t_max_h=settings.t_max_h,
            patience=settings.patience,
        )
