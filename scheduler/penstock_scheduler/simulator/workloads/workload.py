"""A workload: jobs to simulate, when they arrive, what they ask for, and how much work they have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock_scheduler.model import Adaptivity, JobSpec
from penstock_scheduler.simulator.workloads.table import Wrong

AMOUNTS = ("duration_s", "samples", "epochs")
"""Fields that give a job's amount of work. A job has one of them, or it is one whole training of its model."""

POSITIVE = (*AMOUNTS, "batch_size", "time_limit_s", "cpus", "mem_mb", "data_gb", "gpu_utilisation", "gpu_mem_mb")
"""Numbers that are above 0 where they are given; `data_gb` may be 0."""


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """A job: what its user asked for, and the truth about its work, which no policy sees.

    Raises:
        Wrong: a number out of its range, two amounts of work or none.
    """

    id: str
    submit_s: float
    """Seconds since the start of the workload, >= 0."""
    gpus: int
    """GPUs that its user asked for. Rigid policies allocate exactly these; others may allocate what `spec` allows."""
    spec: JobSpec
    """Its job spec, as in the comment of an sbatch."""
    name: str = ""
    user: str = "user"
    account: str = ""
    gpu_type: str | None = None
    """Type on which `duration_s` was recorded; None: unknown, and any type takes that time."""
    batch_size: int | None = None
    """Total batch size that its user asked for, samples; None: the model's initial batch size."""
    model: str | None = None
    """Model that it trains: a folder of measured tables, or a family of the catalogue. None: `duration_s` tells its
    speed."""
    duration_s: float | None = None
    """Work as the seconds that it takes on its `gpus` GPUs, > 0, without restarts and waiting."""
    samples: float | None = None
    """Work as samples of training at the model's initial batch size, > 0."""
    epochs: float | None = None
    """Work as epochs of training, > 0. A job without any amount is a whole training of its model."""
    time_limit_s: float | None = None
    """Time limit after which Slurm would kill it, and with which backfill plans; None: unknown."""
    cpus: int | None = None
    """CPUs in total; None: unknown."""
    mem_mb: float | None = None
    """Memory in total, MiB; None: unknown."""
    data_gb: float | None = None
    """Size of its data set, GB; None: unknown."""
    sensitivity: str | None = None
    """Name of its profile of CPU and memory; None: that of its model, if there is one."""
    kind: str | None = None
    """Its kind in a table of pairs of co-located jobs; None: its model, or its name."""
    gpu_utilisation: float | None = None
    """Share of its GPUs that it uses when it runs alone, in (0, 1]; None: unknown."""
    gpu_mem_mb: float | None = None
    """Memory that it needs on each GPU, MiB; None: unknown."""

    def __post_init__(self) -> None:
        if not self.id:
            raise Wrong("an empty id", "a text that no other job has")
        if not (math.isfinite(self.submit_s) and self.submit_s >= 0):
            raise Wrong(f"submit_s={self.submit_s!r}", "seconds of at least 0 since the start of the workload")
        if self.gpus < 1:
            raise Wrong(f"gpus={self.gpus}", "at least 1; leave out jobs that use no GPU")
        if (self.duration_s, self.samples, self.epochs).count(None) < 2:
            amounts = [name for name in AMOUNTS if getattr(self, name) is not None]
            raise Wrong(f"both {' and '.join(amounts)}", f"one of {', '.join(AMOUNTS)}")
        if self.model is None and self.duration_s is None:
            raise Wrong("neither a model nor duration_s", "duration_s, or a model with samples, epochs or none of them")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf or (value == 0 and name == "data_gb")):
                raise Wrong(f"{name}={value!r}", "a number above 0, or nothing")
        if self.gpu_utilisation is not None and self.gpu_utilisation > 1:
            raise Wrong(f"gpu_utilisation={self.gpu_utilisation!r}", "a share of the GPU, above 0 and up to 1")

    @property
    def gpu_seconds(self) -> float | None:
        """GPU-seconds on the GPUs that its user asked for; None if the work is not given as a duration."""
        return None if self.duration_s is None else self.duration_s * self.gpus

    @property
    def as_requested(self) -> JobSpec:
        """The job spec for a policy that gives every job exactly what its user asked for. Class and trial group
        stay."""
        spec = rigid_spec(self.gpus, self.spec.gpu_types, self.batch_size)
        if self.spec.gpu_class is None and self.spec.trial_group is None:
            return spec
        return spec.model_copy(update={"gpu_class": self.spec.gpu_class, "trial_group": self.spec.trial_group})


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order in which they arrive. Raises Wrong if two have the same id, or if they are in another order."""

    name: str
    jobs: tuple[WorkloadJob, ...]
    source: str = ""
    """Its origin, for people."""
    left_out: tuple[tuple[str, int], ...] = ()
    """(reason, number) of the rows that a reader left out."""

    def __post_init__(self) -> None:
        if len({job.id for job in self.jobs}) < len(self.jobs):
            twice = next(name for name, count in Counter(job.id for job in self.jobs).items() if count > 1)
            raise Wrong(f"job {twice!r} twice", "ids that differ")
        if any(later.submit_s < job.submit_s for job, later in zip(self.jobs, self.jobs[1:], strict=False)):
            raise Wrong("jobs out of order", "jobs sorted by submit_s")

    @property
    def span_s(self) -> float:
        """Seconds from the first submission to the last."""
        return self.jobs[-1].submit_s - self.jobs[0].submit_s if self.jobs else 0.0

    def window(self, begin_s: float, length_s: float) -> Workload:
        """The jobs that arrive within `length_s` from `begin_s` on. Time 0 of the window is `begin_s`."""
        jobs = (job for job in self.jobs if begin_s <= job.submit_s < begin_s + length_s)
        return replace(self, jobs=tuple(replace(job, submit_s=job.submit_s - begin_s) for job in jobs))


def jittered(workload: Workload, seed: int, most_s: float = 60.0) -> Workload:
    """The same jobs, each delayed at random by up to `most_s` seconds. Seed 0 leaves the workload as it is."""
    if seed == 0:
        return workload
    later_s = np.random.default_rng(seed).uniform(0, most_s, len(workload.jobs)).tolist()
    jobs = [replace(job, submit_s=job.submit_s + late) for job, late in zip(workload.jobs, later_s, strict=True)]
    return replace(workload, jobs=in_order(jobs))


def in_order(jobs: list[WorkloadJob]) -> tuple[WorkloadJob, ...]:
    """Jobs sorted by submission. Jobs that arrive at the same instant keep their order."""
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


@lru_cache(maxsize=4096)
def rigid_spec(gpus: int, gpu_types: tuple[str, ...] | None = None, batch_size: int | None = None) -> JobSpec:
    """The job spec of a job that takes a fixed number of GPUs. Equal ones are one object, because a trace has many."""
    return JobSpec(
        adaptivity=Adaptivity.RIGID, min_gpus=gpus, max_gpus=gpus, gpu_types=gpu_types, batch_size=batch_size
    )


PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
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


def summarise(workload: Workload, duration_s: Callable[[WorkloadJob], float | None] | None = None) -> WorkloadSummary:
    """Summarise a workload. `duration_s` returns a job's duration as requested; without it only recorded durations
    count."""
    timed = [(job.gpus, duration_s(job) if duration_s else job.duration_s) for job in workload.jobs]
    known = [(gpus, seconds) for gpus, seconds in timed if seconds is not None]
    seconds = [duration for _, duration in known]
    return WorkloadSummary(
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


@dataclass(frozen=True, slots=True)
class Application:
    """A training as Pollux and Sia define it. Batch sizes are in samples; `epochs` is the number of epochs until it
    ends."""

    family: str
    """Name in the catalogue of model families."""
    initial_batch: int
    max_batch: int
    epochs: int
    epoch_samples: int
    """Samples of one epoch: the size of its training set. For deepspeech2 and ncf, as the recorded trainings
    counted."""
    hours: str
    """Class of GPU-hours for which Sia's authors draw it: S up to 1, M up to 10, L up to 100, XL above."""


APPLICATIONS = {
    "cifar10": Application("resnet18-cifar10", 128, 4096, 100, 50_000, "S"),
    "bert": Application("bert-squad", 12, 384, 2, 88_644, "M"),
    "deepspeech2": Application("deepspeech2", 20, 640, 80, 7_134, "M"),
    "yolov3": Application("yolov3", 8, 512, 50, 16_551, "L"),
    "imagenet": Application("resnet50-imagenet", 200, 12_800, 90, 1_281_167, "XL"),
    "ncf": Application("ncf", 256, 32_768, 10, 4_970_854, "S"),
}
"""Name in published workloads -> application. From petuum/adaptdl, branch osdi21-artifact, and Sia, sections 4 and
5."""

OF_FAMILY = {application.family: application for application in APPLICATIONS.values()}


def application_of(model: str) -> Application | None:
    """The application by its own or its family's name; None if no published workload trains it."""
    return APPLICATIONS.get(model) or OF_FAMILY.get(model)
