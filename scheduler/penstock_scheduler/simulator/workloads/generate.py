"""Generated workloads, with arrivals, sizes and durations like those of two published clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.families import load_families
from penstock_profiles.throughput import FloatArray
from penstock_scheduler.model import JobSpec
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator.workloads.workload import APPLICATIONS, Workload, WorkloadJob, rigid_spec

CLASSES_H = (("S", 1.0), ("M", 10.0), ("L", 100.0), ("XL", math.inf))
"""Class -> GPU-hours up to which a job belongs to it (Pollux, section 5.2). Each class trains other models."""

TUNED = (0.5, 0.8)
"""Range of scaling for a tuned request (Pollux, section 5.2): goodput on K GPUs over K times that on one GPU."""

TUNED_ON = "t4"


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Sizes and durations of the jobs of a published cluster."""

    about: str
    sizes: dict[int, float]
    """Number of GPUs -> share of jobs; the shares add up to 1."""
    shares: tuple[float, ...]
    """Shares of jobs, ascending from 0 to 1, to which `durations_s` belong."""
    durations_s: dict[int, tuple[float, ...]]
    """Least number of GPUs -> the durations that these shares of jobs do not exceed. In between, log duration is
    linear."""


_Z = tuple(step / 4 for step in range(-16, 17))
_Z_SHARES = tuple(NormalDist().cdf(z) for z in _Z)


def _lognormal(median_s: float, mean_s: float, longest_s: float) -> tuple[float, ...]:
    """Durations at `_Z_SHARES` of the lognormal distribution with this median and mean, from 1 s to the longest."""
    sigma = math.sqrt(2 * math.log(mean_s / median_s))
    return tuple(min(max(median_s * math.exp(sigma * z), 1.0), longest_s) for z in _Z)


CLUSTERS = {
    "philly": _Cluster(
        "as Philly (Jeon et al., ATC'19; CC-BY-4.0), the 82,247 jobs of Sia's reduction; quantiles are ours",
        {1: 0.932, 2: 0.022, 4: 0.023, 8: 0.02, 16: 0.002, 32: 0.001},
        (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1),
        {
            1: (1, 62, 120, 1100, 2700, 8500, 19e3, 140e3, 870e3, 3.3e6),
            2: (2, 11, 16, 21, 76, 73e3, 200e3, 520e3, 1.5e6, 2.6e6),
            4: (3, 140, 770, 17e3, 89e3, 180e3, 270e3, 910e3, 2.4e6, 2.8e6),
            8: (1, 200, 1300, 24e3, 170e3, 340e3, 510e3, 1.1e6, 2.7e6, 4.6e6),
        },
    ),
    "helios": _Cluster(
        "as Helios (Hu et al., SC'21), from its published averages",
        # Ours, with the published mean of 3.7 GPUs, most jobs on one.
        {1: 0.57, 2: 0.1, 4: 0.1, 8: 0.185, 16: 0.03, 32: 0.012, 64: 0.003},
        _Z_SHARES,
        {1: _lognormal(median_s=206, mean_s=6652, longest_s=50 * 86400)},
    ),
}
"""Value of `--like` -> cluster."""


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """What to generate. Raises ConfigError if a number is out of its range."""

    jobs: int
    rate_per_h: float
    """Mean number of submissions per hour."""
    like: Literal["philly", "helios"] = "philly"
    cv: float = 1.0
    """Standard deviation of the time between submissions over its mean: 1 is a Poisson process; with more, jobs come in
    bursts."""
    max_gpus: int = 64
    """Limit on the GPUs of a job."""
    max_duration_s: float = math.inf
    """Limit on the duration of a job."""
    models: bool = False
    """Adaptive trainings of the catalogue's models, chosen by GPU-hours, instead of rigid jobs of a given duration."""
    users: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.like not in CLUSTERS:
            raise ConfigError(f"like={self.like!r} is not a known cluster; use one of {', '.join(CLUSTERS)}")
        for name, least in (("jobs", 1), ("max_gpus", 1), ("users", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("rate_per_h", "cv", "max_duration_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")


def generate(settings: GeneratorSettings) -> Workload:
    """Generate a workload. Equal settings give equal workloads.

    Arrivals are a renewal process with gamma-distributed gaps (a Poisson process at `cv` 1). With `models`, the drawn
    GPU-hours choose a model whose whole training takes about as long (Pollux, section 5.2), and its request is a tuned
    one.
    """
    cluster = CLUSTERS[settings.like]
    arrivals, sizes, durations, choices, users = np.random.default_rng(settings.seed).spawn(5)
    submit_s = np.cumsum(arrivals.gamma(1 / settings.cv**2, settings.cv**2, settings.jobs)) * (
        3600 / settings.rate_per_h
    )
    weights = np.array(list(cluster.sizes.values()))
    drawn = sizes.choice(list(cluster.sizes), settings.jobs, p=weights / weights.sum())
    duration_s = np.minimum(_durations(cluster, drawn, durations.random(settings.jobs)), settings.max_duration_s)
    gpus = np.minimum(drawn, settings.max_gpus)
    user = users.integers(settings.users, size=settings.jobs)
    jobs = []
    for number in range(settings.jobs):
        common = {
            "id": f"{number:0{len(str(settings.jobs - 1))}d}",
            "submit_s": round(float(submit_s[number]), 3),
            "user": f"user-{user[number]:02d}",
        }
        if settings.models:
            jobs.append(_training(common, float(gpus[number] * duration_s[number] / 3600), settings.max_gpus, choices))
        else:
            count = int(gpus[number])
            seconds = round(float(duration_s[number]), 1)
            jobs.append(WorkloadJob(gpus=count, spec=rigid_spec(count), duration_s=seconds, **common))  # type: ignore[arg-type]
    about = f"generated {cluster.about}: {settings}"
    return Workload(f"{settings.like}-{settings.jobs}-seed-{settings.seed}", tuple(jobs), about)


def _durations(cluster: _Cluster, gpus: FloatArray, unit: FloatArray) -> FloatArray:
    """Durations of jobs with these numbers of GPUs at these quantiles, s; the same shape as both."""
    seconds = np.empty(len(unit))
    for least, quantiles in sorted(cluster.durations_s.items()):
        rows = gpus >= least
        seconds[rows] = np.exp(np.interp(unit[rows], cluster.shares, np.log(quantiles)))
    return seconds


def as_training(job: WorkloadJob, max_gpus: int, choices: np.random.Generator) -> WorkloadJob:
    """The job as an adaptive training that takes as long on the GPUs that its user asked for, and may have other numbers of them.

    Its GPU-hours choose one of the catalogue's models, as in Pollux, and its batch size is the best one on its GPUs.

    Args:
        job: a job of known duration.
        max_gpus: the most GPUs that it may have, at least its own.
        choices: random numbers.
    """
    model = _model((job.gpu_seconds or 0.0) / 3600, choices)
    known = APPLICATIONS[model]
    spec = JobSpec(
        max_gpus=max_gpus, gpu_types=job.spec.gpu_types, batch_size=known.initial_batch, max_batch_size=known.max_batch
    )
    return replace(job, spec=spec, model=model, batch_size=_best_total(model, job.gpus) or known.max_batch)


def _model(gpu_hours: float, choices: np.random.Generator) -> str:
    length = next(name for name, up_to in CLASSES_H if gpu_hours <= up_to)
    return str(choices.choice([name for name, known in APPLICATIONS.items() if known.hours == length]))


def _training(common: dict[str, object], gpu_hours: float, max_gpus: int, choices: np.random.Generator) -> WorkloadJob:
    model = _model(gpu_hours, choices)
    requests = [request for request in _tuned(model) if request[0] <= max_gpus]
    gpus, batch = requests[int(choices.integers(len(requests)))]
    known = APPLICATIONS[model]
    spec = JobSpec(max_gpus=max_gpus, batch_size=known.initial_batch, max_batch_size=known.max_batch)
    return WorkloadJob(gpus=gpus, spec=spec, batch_size=batch, model=model, name=model, **common)  # type: ignore[arg-type]


@cache
def _tuned(model: str) -> list[tuple[int, int]]:
    """Requests (GPUs, total batch size) of a user who has tuned the model on `TUNED_ON`, and always one for one GPU."""
    estimator = _estimator(model)
    found = []
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        goodput = _goodput(estimator, gpus) / (gpus * _goodput(estimator, 1))
        total = _best_total(model, gpus)
        if total is not None and (gpus == 1 or TUNED[0] <= goodput <= TUNED[1]):
            found.append((gpus, total))
    return found


@cache
def _estimator(model: str) -> TrainingEstimator:
    return load_families()[APPLICATIONS[model].family].estimator()


@cache
def _best_total(model: str, gpus: int) -> int | None:
    """The total batch size with which the model trains fastest on this number of `TUNED_ON`; None if it cannot."""
    estimator = _estimator(model)
    batch = estimator.best_batch(TUNED_ON, -(-gpus // 4), gpus)
    return (
        None if batch is None else min(gpus * batch.atomic_batch * (batch.accumulation_steps + 1), estimator.max_batch)
    )


def _goodput(estimator: TrainingEstimator, gpus: int) -> float:
    return float(estimator.goodput(TUNED_ON, np.array([-(-gpus // 4)]), np.array([gpus]))[0])
