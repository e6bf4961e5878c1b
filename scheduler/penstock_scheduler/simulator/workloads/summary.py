"""A workload in a few numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob

PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class Summary:
    """A workload as its users asked for it: each job on its `gpus` GPUs."""

    jobs: int
    users: int
    span_s: float
    """From the first submission to the last."""
    sizes: Mapping[int, int]
    """Number of GPUs -> jobs that ask for it."""
    models: Mapping[str, int]
    """Model -> jobs that train it."""
    durations_s: Mapping[int, float]
    """Percentile -> duration, over the jobs of known duration; empty if there are none."""
    timed: int
    """Number of jobs of known duration."""
    gpu_hours: float
    """GPU-hours of the jobs of known duration."""
    left_out: Mapping[str, int]
    """Reason -> rows of the file that were left out."""

    @property
    def load_gpus(self) -> float:
        """Mean number of GPUs that its jobs keep busy from the first submission to the last; NaN for a single
        instant."""
        return self.gpu_hours * 3600 / self.span_s if self.span_s else float("nan")


def summarise(workload: Workload, duration_s: Callable[[WorkloadJob], float | None] | None = None) -> Summary:
    """Summarise a workload. `duration_s` returns a job's duration as requested; without it only recorded durations
    count."""
    timed = [(job.gpus, duration_s(job) if duration_s else job.duration_s) for job in workload.jobs]
    known = [(gpus, seconds) for gpus, seconds in timed if seconds is not None]
    seconds = [duration for _, duration in known]
    return Summary(
        jobs=len(workload.jobs),
        users=len({job.user for job in workload.jobs}),
        span_s=workload.span_s,
        sizes=dict(sorted(Counter(job.gpus for job in workload.jobs).items())),
        models=dict(sorted(Counter(job.model for job in workload.jobs if job.model is not None).items())),
        durations_s=dict(zip(PERCENTILES, map(float, np.percentile(seconds, PERCENTILES)), strict=True))
        if known
        else {},
        timed=len(known),
        gpu_hours=sum(gpus * duration for gpus, duration in known) / 3600,
        left_out=dict(workload.left_out),
    )
