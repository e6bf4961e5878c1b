"""What happened on a cluster, for a report: the jobs, the GPUs that they ran on, and their speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a job on its GPUs. Times in s since 1970."""

    start_s: float
    end_s: float
    gpu_type: str
    gpu_ids: dict[str, tuple[int, ...]]
    """Node -> indices of the GPUs on it."""

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return sum(map(len, self.gpu_ids.values()))


@dataclass(frozen=True, slots=True)
class JobHistory:
    """A job from submission to end.

    `start_s` is None if the job never started, `end_s` if it has not ended.
    """

    id: str
    name: str
    asks: str
    submit_s: float
    start_s: float | None
    end_s: float | None
    state: str
    spans: tuple[Span, ...]
    goodput: tuple[tuple[float, float], ...]
    """(time, share of the job's whole work that it does per second from then on), in ascending order."""
    restarts: int

    @property
    def jct_s(self) -> float | None:
        """Job completion time: seconds from submission to end."""
        return None if self.end_s is None else self.end_s - self.submit_s


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node and its GPUs."""

    name: str
    gpu_type: str
    gpus: int


@dataclass(frozen=True, slots=True)
class History:
    """What happened on one cluster. Times in s since 1970."""

    title: str
    nodes: tuple[NodeShape, ...]
    jobs: tuple[JobHistory, ...]
    start_s: float
    end_s: float
    note: str = ""
    held: tuple[tuple[float, float], ...] | None = None
    """(time, GPUs in use from then on), where jobs share GPUs; None: the jobs' spans give it."""

    @property
    def average_jct_s(self) -> float | None:
        """Mean completion time of the jobs that have ended; None if no job has."""
        times = [job.jct_s for job in self.jobs if job.jct_s is not None]
        return sum(times) / len(times) if times else None

    @property
    def longest_jct_s(self) -> float | None:
        """Longest completion time of the jobs that have ended; None if no job has."""
        return max((job.jct_s for job in self.jobs if job.jct_s is not None), default=None)

    @property
    def makespan_s(self) -> float | None:
        """Seconds from the first submission to the last end; None if a job has not ended."""
        ends = [job.end_s for job in self.jobs if job.end_s is not None]
        return max(ends) - min(job.submit_s for job in self.jobs) if ends and len(ends) == len(self.jobs) else None

    @property
    def average_wait_s(self) -> float | None:
        """Mean seconds from submission to the first start, of the jobs that have started."""
        waits = [job.start_s - job.submit_s for job in self.jobs if job.start_s is not None]
        return sum(waits) / len(waits) if waits else None

    @property
    def gpu_seconds(self) -> dict[str, float]:
        """GPU type -> GPU-seconds that jobs held."""
        total = dict.fromkeys(sorted({node.gpu_type for node in self.nodes}), 0.0)
        for job in self.jobs:
            for span in job.spans:
                total[span.gpu_type] = total.get(span.gpu_type, 0.0) + span.gpus * (span.end_s - span.start_s)
        return total

    def queue(self) -> list[tuple[float, float]]:
        """(time, number of jobs from then on) that are submitted, have not ended and hold no GPU."""
        changes: dict[float, int] = {}
        for job in self.jobs:
            changes[job.submit_s] = changes.get(job.submit_s, 0) + 1
            for span in job.spans:
                changes[span.start_s] = changes.get(span.start_s, 0) - 1
                changes[span.end_s] = changes.get(span.end_s, 0) + 1
            if job.end_s is not None:
                gone_s = max([job.end_s, *(span.end_s for span in job.spans)])
                changes[gone_s] = changes.get(gone_s, 0) - 1
        return _running_sum(changes)

    def utilisation(self) -> list[tuple[float, float]]:
        """(time, held GPUs from then on), in percent of all GPUs."""
        each = 100 / max(sum(node.gpus for node in self.nodes), 1)
        if self.held is not None:
            return [(at_s, gpus * each) for at_s, gpus in self.held]
        changes: dict[float, float] = {}
        for job in self.jobs:
            for span in job.spans:
                changes[span.start_s] = changes.get(span.start_s, 0.0) + span.gpus * each
                changes[span.end_s] = changes.get(span.end_s, 0.0) - span.gpus * each
        return _running_sum(changes)

    def goodput(self) -> list[tuple[float, float]]:
        """(time, work done per minute from then on). The unit of work is one whole job."""
        changes: dict[float, float] = {}
        for job in self.jobs:
            before = 0.0
            for at_s, rate in job.goodput:
                changes[at_s] = changes.get(at_s, 0.0) + (rate - before) * 60
                before = rate
        return _running_sum(changes)


def _running_sum(changes: dict[float, int] | dict[float, float]) -> list[tuple[float, float]]:
    series, now = [], 0.0
    for at_s in sorted(changes):
        now += changes[at_s]
        series.append((at_s, max(now, 0.0)))
    return series
