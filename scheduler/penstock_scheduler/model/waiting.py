"""How long a job waits for GPUs on site before it goes to the cloud: Starburst's waiting policies.

After *Starburst: A Cost-aware Scheduler for Hybrid Cloud* (Luo et al., USENIX ATC '24). A job that the site cannot run at once
waits in proportion to what it would cost in the cloud. So small jobs leave, and the GPUs that they do not use serve the jobs
that would be expensive in the cloud.

Times are in hours and costs in GPU-hours, as in the paper, so that its constants and results apply without conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock_scheduler.people.errors import ConfigError

CPUS_PER_GPU = 53.0
"""CPUs that cost as much as one GPU in the cloud. The value of the authors' generator; the paper's text has 50."""


class Wait(StrEnum):
    """What the wait is proportional to."""

    NONE = "no-wait"
    """Nothing: a job that does not fit at once leaves."""
    CONSTANT = "constant-wait"
    """Nothing: all jobs wait equally long."""
    RUNTIME = "runtime-wait"
    """The running time."""
    RESOURCE = "resource-wait"
    """The number of GPUs. Needs no estimate of the running time."""
    COMPUTE = "compute-wait"
    """The number of GPUs times the running time: what the cloud would cost. Starburst's choice."""
    STAR = "star-wait"
    """Needs no estimate: each job goes to the cloud at once. After `t_max_h` there, it comes back and waits by its GPUs."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The facts about a job that a waiting policy uses.

    Attributes:
        gpus: GPUs that it asks for; 0: it needs only CPUs.
        runtime_h: expected running time on these GPUs, h; None: unknown.
        cpus: CPUs that count in addition to the GPUs.
    """

    gpus: int
    runtime_h: float | None
    cpus: float = 0.0

    @property
    def cost_gpu_h(self) -> float | None:
        """What it would cost in the cloud, in GPU-hours; None: unknown."""
        if self.runtime_h is None:
            return None
        return (self.gpus + self.cpus / CPUS_PER_GPU if self.cpus else self.gpus) * self.runtime_h


@dataclass(frozen=True, slots=True)
class WaitingPolicy:
    """A waiting policy and its parameters.

    Attributes:
        kind: what the wait is proportional to.
        factor: h (constant), h/h (runtime), h per GPU (resource, star) or h per GPU-hour (compute); >= 0.
        short_h: "no short jobs": jobs that run for less time go to the cloud at once, even if GPUs are free; None: no such rule.
        t_max_h: star: longest first run in the cloud, h.
        patience: star: a job that has come back waits this many times the resource wait.

    Raises:
        ConfigError: a number is out of its range.
    """

    kind: Wait
    factor: float = 0.0
    short_h: float | None = None
    t_max_h: float = 0.25
    patience: float = 3.0

    def __post_init__(self) -> None:
        if not self.factor >= 0:
            raise ConfigError(f"the factor {self.factor} of {self.kind} must be at least 0; a budget of 25 % sets it")
        if not (self.t_max_h > 0 and self.patience >= 0):
            raise ConfigError(
                f"t_max_h={self.t_max_h} must be above 0, patience={self.patience} at least 0; the paper has 0.25 and 3"
            )

    def wait_h(self, ask: Ask, *, returned: bool = False) -> float | None:
        """Longest wait for GPUs on site, h; None: the job goes to the cloud at once, even if GPUs are free.

        If the running time is unknown, the rules that need it assume one hour. They are then `resource-wait` with the same
        factor.

        Args:
            ask: the job.
            returned: whether it has come back from the cloud (`star-wait`).
        """
        if ask.gpus == 0:
            return None
        if self.short_h is not None and ask.runtime_h is not None and ask.runtime_h < self.short_h:
            return None
        runtime_h = 1.0 if ask.runtime_h is None else ask.runtime_h
        cost_gpu_h = float(ask.gpus) if ask.cost_gpu_h is None else ask.cost_gpu_h
        match self.kind:
            case Wait.NONE:
                return 0.0
            case Wait.CONSTANT:
                return self.factor
            case Wait.RUNTIME:
                return self.factor * runtime_h
            case Wait.RESOURCE:
                return self.factor * ask.gpus
            case Wait.COMPUTE:
                return self.factor * cost_gpu_h
            case Wait.STAR:
                return self.patience * (self.factor * ask.gpus) if returned else 0.0


@dataclass(frozen=True, slots=True)
class Averages:
    """Running averages over a site's own jobs. They convert a waiting budget into a waiting policy.

    Attributes:
        jobs: weight of the averages, in jobs.
        runtime_h: mean running time, h.
        gpus: mean number of GPUs of a job.
    """

    jobs: float = 0.0
    runtime_h: float = 0.0
    gpus: float = 0.0

    def with_job(self, runtime_h: float, gpus: int, memory: float = 5000.0) -> Averages:
        """The averages with one more ended job. The weight of a job fades as about `memory` more jobs end."""
        jobs = min(self.jobs + 1.0, memory)
        share = 1.0 / jobs
        return Averages(
            jobs, self.runtime_h + (runtime_h - self.runtime_h) * share, self.gpus + (gpus - self.gpus) * share
        )


def by_budget(
    kind: Wait,
    percent: float,
    averages: Averages,
    *,
    short_h: float | None = None,
    t_max_h: float = 0.25,
    patience: float = 3.0,
) -> WaitingPolicy:
    """The policy under which jobs wait for about `percent` of their mean running time, on average.

    This assumes that the number of GPUs and the running time of a job are independent.

    Constant: P T. Runtime: P. Compute: alpha = P / E[r]. Resource and star: beta = P T / E[r], with T the mean running time and
    E[r] the mean number of GPUs. 0 % is no-wait in all but star.

    Raises:
        ConfigError: the budget is negative, or there are no averages yet.
    """
    if not percent >= 0:
        raise ConfigError(f"a waiting budget of {percent} % must be at least 0; the paper's is 25")
    if kind is not Wait.NONE and not (averages.gpus > 0 and averages.runtime_h > 0):
        raise ConfigError(
            "a waiting budget needs averages of the site's jobs, and there are none; give mean_runtime_h and mean_gpus"
        )
    share = percent / 100
    factor = {
        Wait.NONE: lambda: 0.0,
        Wait.CONSTANT: lambda: share * averages.runtime_h,
        Wait.RUNTIME: lambda: share,
        Wait.COMPUTE: lambda: share / averages.gpus,
        Wait.RESOURCE: lambda: share * averages.runtime_h / averages.gpus,
        Wait.STAR: lambda: share * averages.runtime_h / averages.gpus,
    }[kind]()
    return WaitingPolicy(kind, factor, short_h, t_max_h, patience)


class EndedJob(Protocol):
    """A record of a job that has ended."""

    @property
    def user(self) -> str:
        """Its user."""
        ...

    @property
    def name(self) -> str:
        """The name with which it was submitted, by default its script's."""
        ...

    @property
    def ended(self) -> str:
        """Slurm's final state. Only COMPLETED shows how long such a job runs."""
        ...

    @property
    def start_s(self) -> float | None:
        """When it first held GPUs."""
        ...

    @property
    def end_s(self) -> float | None:
        """When it ended."""
        ...

    @property
    def gpu_seconds(self) -> dict[str, float]:
        """GPU type -> GPU-seconds."""
        ...
