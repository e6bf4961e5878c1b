"""What a site's recorded history tells: averages for the waiting budget, and running times of a user's earlier jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock_scheduler.model import Job, JobId
from penstock_scheduler.model.waiting import Averages, EndedJob

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
