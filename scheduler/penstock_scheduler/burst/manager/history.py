"""The site's recorded history, as the waiting policy needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock_scheduler.burst.deciding.history import averages, by_script, histories
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import Job, JobId
from penstock_scheduler.model.waiting import Averages, EndedJob, Wait, WaitingPolicy, by_budget
from penstock_scheduler.store.cloud_runs import RunStore

HISTORY_S = 300.0
"""How often the recorded history is read again."""

NEWEST = 2000
"""Number of ended jobs that it covers."""


class SiteHistory:
    """Ended jobs, oldest first, and the waiting policy that follows from them and the settings."""

    def __init__(self, settings: BurstSettings, store: RunStore) -> None:
        self._settings, self._store = settings, store
        self._read_s = -1e18
        self._past: list[EndedJob] = []
        self._by_script: Mapping[tuple[str, str], Sequence[float]] = {}
        self.waiting = self._policy()

    @property
    def learns_s(self) -> float:
        """When the history is read next, s since 1970."""
        return self._read_s + HISTORY_S

    def learn(self, now_s: float) -> None:
        """Read the history again if it is time."""
        if now_s < self.learns_s:
            return
        self._read_s = now_s
        self._past = [view for _, view in reversed(self._store.jobs(states=("ended",), limit=NEWEST))]
        self._by_script = by_script(self._past)
        self.waiting = self._policy()

    def running_times(self, jobs: Sequence[Job]) -> dict[JobId, tuple[float, ...]]:
        """See `CloudState.history_s`."""
        return histories(jobs, self._by_script)

    def _policy(self) -> WaitingPolicy:
        settings = self._settings
        return by_budget(
            Wait(settings.wait),
            settings.waiting_budget_percent,
            averages(self._past, Averages(1.0, settings.mean_runtime_h, settings.mean_gpus)),
            short_h=settings.short_h,
            t_max_h=settings.t_max_h,
            patience=settings.patience,
        )
