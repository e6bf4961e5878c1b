"""What the agent has observed of a job lately. It is not saved: an agent that starts again observes again."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_profiles.node_channel import JobStatus
from penstock_scheduler.rounds.sharing.control import Steps
from penstock_slurm.agent.gpu_time import Meter

MAX_RATE = 1e9
"""Rates beyond this many samples or steps per second, or below its inverse, are not believed."""


@dataclass(slots=True)
class Observed:
    """Recent observations of one job."""

    statuses: dict[int, JobStatus] = field(default_factory=dict)
    """Newest status of each process, by rank."""
    mark: JobStatus | None = None
    """Status of its first process when the present measurement began; None: it has not begun."""
    obeyed: tuple[int, float] = (-1, 0.0)
    """Number of the last control message that all its processes carry out, and since when."""
    alone_since_s: float = 0.0
    """Since when it has had its GPUs to itself; 0: it has not."""
    busy: list[float] = field(default_factory=list)
    """Utilisation of its GPUs in each sample of the present measurement."""
    used_mb: float | None = None
    """Most memory that it uses on one GPU now, by NVML, MB; None: unknown."""
    cpu: tuple[float, float, float] | None = None
    """At the last observation: time, processor time of its processes, and cores that they used since the one before."""
    wrong_since_s: dict[str, float] = field(default_factory=dict)
    """Since when it has done what it must not, by cause."""
    meter: Meter = field(default_factory=Meter)
    """Its GPU time beside a guaranteed job."""
    metered_s: float = 0.0
    """When that was last read."""
    credit_s: float = 0.0
    """GPU time that it may use beside a guaranteed job before it has used up its share, s; negative: it has used more."""
    escaped_s: float = 0.0
    """GPU time that it has used since it was frozen for that, s."""
    had_share: float = 0.0
    """Its share at the last look."""
    counted: JobStatus | None = None
    """Its status when its reported steps were last counted beside a guaranteed job."""
    step_s: float = 0.0
    """How long its steps take there, s: the shortest between two such looks, because those in which it was frozen take
    long. 0: unknown."""

    @property
    def first(self) -> JobStatus | None:
        """Status of its first process."""
        return self.statuses[min(self.statuses)] if self.statuses else None

    @property
    def usual_s(self) -> float:
        """Mean duration of its steps."""
        return self.first.seconds / max(self.first.steps, 1) if self.first is not None else 0.0

    @property
    def memory_mb(self) -> float:
        """Most memory that it uses on one GPU, MB: by NVML or, without NVML, by its own account."""
        reported = max((each.memory_mb for each in self.statuses.values()), default=0.0)
        return reported if self.used_mb is None else self.used_mb

    @property
    def state_mb(self) -> float:
        """Host memory that its state would take, MB."""
        if self.used_mb is not None:
            return self.used_mb * max(len(self.statuses), 1)
        return sum(each.memory_mb for each in self.statuses.values())

    @property
    def rate(self) -> float:
        """Samples or steps per second since the mark; 0: unknown."""
        first, mark = self.first, self.mark
        if first is None or mark is None or first.time_s <= mark.time_s or first.pid != mark.pid:
            return 0.0
        return rate_between(mark, first, first.time_s - mark.time_s)

    def begin_measuring(self) -> None:
        """Start a new measurement."""
        self.mark, self.busy = None, []

    def makes_steps(self) -> bool:
        """Whether it reports more steps than when it said that it stands still."""
        first = self.first
        if first is None:
            return False
        if self.mark is None or self.mark.suspended != first.suspended:
            self.mark = first
        return first.steps > self.mark.steps

    def set_back(self, now_s: float) -> None:
        """Move times that lie in the future to now."""
        self.obeyed = (self.obeyed[0], min(self.obeyed[1], now_s))
        self.alone_since_s = min(self.alone_since_s, now_s)
        self.metered_s = min(self.metered_s, now_s)
        self.wrong_since_s = {cause: min(since_s, now_s) for cause, since_s in self.wrong_since_s.items()}


def rate_between(before: JobStatus, after: JobStatus, seconds: float) -> float:
    """Samples or steps per second from one status of a process to another one; 0: none, or impossible."""
    rate = (after.samples - before.samples or after.steps - before.steps) / seconds
    return rate if 1 / MAX_RATE < rate < MAX_RATE else 0.0


def steps_between(before: JobStatus | None, after: JobStatus | None) -> Steps:
    """The steps that a process made between two of its statuses.

    There are none if a status is missing, the statuses are of two processes, or the reported durations are impossible.
    """
    if before is None or after is None or before.pid != after.pid or after.steps <= before.steps:
        return Steps()
    count, seconds = after.steps - before.steps, after.seconds - before.seconds
    mean_s = seconds / count
    if not 1 / MAX_RATE < mean_s < MAX_RATE:
        return Steps()
    return Steps(count, mean_s, max(after.squares - before.squares - count * mean_s**2, 0.0))
