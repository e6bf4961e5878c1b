"""A site's recorded history: averages for the waiting policy, and running times of a user's earlier jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


ALIKE = 20
"""Number of newest running times of a user's script that count."""


def averages(ended: Iterable[EndedJob], prior: Averages) -> Averages:
    """Running averages over jobs that completed, oldest first, from `prior` on.

    The running time is from the first start to the end, and the GPUs are the mean number held in that time. Jobs that never
    held a GPU do not count, because they do not wait for GPUs.
    """
    now = prior
    for job in ended:
        runtime_s, gpu_seconds = _runtime_s(job), sum(job.gpu_seconds.values())
        if runtime_s is not None and gpu_seconds > 0:
            now = now.with_job(runtime_s / 3600, max(round(gpu_seconds / runtime_s), 1))
    return now


def by_script(ended: Iterable[EndedJob]) -> dict[tuple[str, str], tuple[float, ...]]:
    """(user, name) -> running times in s of the newest such jobs, oldest first."""
    of: dict[tuple[str, str], list[float]] = {}
    for each in ended:
        if (runtime_s := _runtime_s(each)) is not None:
            of.setdefault((each.user, each.name), []).append(runtime_s)
    return {script: tuple(times_s[-ALIKE:]) for script, times_s in of.items()}


def histories(jobs: Sequence[Job], known: Mapping[tuple[str, str], Sequence[float]]) -> dict[JobId, tuple[float, ...]]:
    """Job -> running times in s of earlier jobs of the same user and name; jobs without any are left out.

    Args:
        jobs: the jobs.
        known: see `by_script`.
    """
    return {job.id: tuple(known[job.user, job.name]) for job in jobs if (job.user, job.name) in known}


def _runtime_s(job: EndedJob) -> float | None:
    if job.ended != "COMPLETED" or job.start_s is None or job.end_s is None or job.end_s <= job.start_s:
        return None
    return job.end_s - job.start_s
