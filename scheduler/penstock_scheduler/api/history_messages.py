"""The bodies of the API's answers about what was: who held which GPUs when. `messages` has the other bodies."""

from __future__ import annotations

from typing import Literal

from penstock_scheduler.api.estimate_messages import JobEstimate
from penstock_scheduler.api.messages import Body


class AllocationSpan(Body):
    """A time in which a job held the same GPUs. The spans of a job follow each other without overlap."""

    job: str
    user: str
    account: str = ""
    partition: str = ""
    gpu_type: str
    nodes: dict[str, int]
    """Node -> GPUs of the job on it."""
    gpu_ids: dict[str, tuple[int, ...]] | None = None
    """Node -> indices of these GPUs, as Slurm counts them; None: not known."""
    where: Literal["site", "cloud"] = "site"
    shared: bool = False
    """Whether other jobs had the same GPUs, by the plan."""
    run_s: float
    """When the run began of which this span is a part."""
    restarts: int = 0
    """Restarts of the job before this run."""
    from_s: float
    to_s: float | None = None
    """None: the job holds them now, as far as penstockd has seen."""
    exact: bool = True
    """Whether the end is the cluster's own. Otherwise it is an estimate, until the cluster's accounts tell it."""
    suspended_s: float = 0.0
    """For how long the run had been suspended by its end."""
    cause: str = ""
    """Why the plan gave the job these GPUs, as code and sentence; empty: no plan did, or it is not known any more."""
    end: str = ""
    """What ended the span: the code of a stop (see docs/admin/safety.md), `ended`, `requeued`, `resized` or `unknown`."""
    end_text: str = ""
    """The same as a sentence."""

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return sum(self.nodes.values())


class Allocations(Body):
    """Allocation spans, by job and beginning."""

    spans: list[AllocationSpan]
    next: str | None = None
    """Value of `after` for the next page; None: this is the last page."""


class QueueEntry(Body):
    """A job that holds no GPUs, and why."""

    position: int | None
    """1: submitted first of those that wait for GPUs. The policy may start a later one before it. None: it does not wait for
    GPUs, but for something that a person has to do, such as a release."""
    job: str
    name: str = ""
    user: str
    account: str = ""
    partition: str = ""
    submit_s: float
    since_s: float
    """Since when it has waited for this reason."""
    code: str
    """Code of the reason, such as `waiting-capacity`, `held` or `refused`; `plain` for a plain job."""
    text: str = ""
    """The reason as a sentence. Shown for own jobs."""
    needs: str = ""
    """The fewest GPUs that it needs, in words; empty: not known."""
    estimated_start_s: float | None = None
    """When the policy plans to start it, or makes room for a plain job; None: no time is planned."""
    estimate: JobEstimate | None = None
    """When it is expected to start and end; None: this has not been estimated yet."""


class Queue(Body):
    """A page of the queue."""

    entries: list[QueueEntry]
    waiting: int
    """Jobs in the whole queue, also those of users whose jobs the caller may not see."""
    next: int | None = None
    """Value of `after` for the next page; None: this is the last page."""


class JobSample(Body):
    """What a job reported about its speed at some time, or on average over some time."""

    time_s: float
    span_s: float
    """Length of the time that the figures are the averages of; 0: as reported."""
    gpus: int
    progress: float
    """Samples so far, at the end of this time."""
    goodput: float | None = None
    """Measured, in the job's own unit per second."""
    expected: float | None = None
    """Expected by the round at that time, in the same unit."""
    batch: int | None = None
    """Samples in an optimiser step."""
    utilisation: float | None = None
    """Share of the time in which its GPUs were busy."""
    memory_mb: int | None = None
    """Peak memory on one GPU, MiB."""


class JobSeries(Body):
    """How a job ran, oldest first."""

    job: str
    step_s: float
    """Time from one sample to the next."""
    samples: list[JobSample]


class Series(Body):
    """Figures of the cluster over time."""

    step_s: float
    """Time from one point to the next."""
    series: dict[str, list[tuple[float, float]]]
    """Name -> (time, value), oldest first. docs/user/api.md lists the names."""
