"""The demo's jobs, drawn from a published workload: the job spec of each for Penstock, and its request for plain Slurm.

Both clusters get the same work at the same times. Half of the jobs are rigid: they have the GPUs that their user asked for, from
their start to their end. Penstock may give each of the others any number from one GPU to four times what its user asked for. As
in the workload, no job names a GPU type. Under plain Slurm all jobs are rigid. The batch size follows the allocation on both
clusters, so that only the scheduling differs.

Source: the workload with which Starburst (Luo et al., USENIX ATC 2024) compares its simulator with a real cluster of four nodes
of eight GPUs: 32 jobs an hour at random, 45 minutes on average (exponential), for 1, 2, 4 or 8 GPUs. The share of elastic jobs,
the models and the GPU types are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_profiles.estimators import AnyEstimator, TableEstimator
from penstock_profiles.families import Families

TIME_SCALE = 32.0
"""Emulated seconds in one real second."""

DEMO_ROUND_S = 60.0 / TIME_SCALE
"""Real seconds between two rounds: penstockd's default in emulated time."""

NODES = "t4:2x8,rtx:1x8,a100:1x8"

JOBS = 28
JOBS_PER_HOUR = 32.0
MEAN_S = 45 * 60.0
SHORTEST_S, LONGEST_S = 5 * 60.0, 120 * 60.0
"""Lengths beyond these are drawn again, so that the demo ends within some minutes."""
SIZES = {1: 0.7, 2: 0.15, 4: 0.1, 8: 0.05}
"""GPUs that a user asks for, and the share of such jobs."""
FAMILIES = ("bert-squad", "deepspeech2", "ncf", "resnet18-cifar10", "resnet50-imagenet", "yolov3")
LENGTH_ON = "rtx"
"""A length is that on so many GPUs of this type, the middle one of the three."""


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One job."""

    name: str
    family: str
    t4_hours: float
    """Work, as hours on one T4."""
    spec: dict[str, Any]
    plain: tuple[str, int, int]
    """(GPU type, nodes, GPUs on each): the request under plain Slurm. Without a type, Slurm chooses."""
    rates: Mapping[str, dict[int, float]] | None = None
    """Measured samples/s by GPU type and count, which replace the model family if given."""
    limit_min: int | None = None
    """Time limit under plain Slurm in real minutes. None: no limit."""

    def spec_fields(self) -> dict[str, Any]:
        """The job spec for the comment."""
        known = {"model_family": self.family} if self.rates is None else {"goodput_table": self.rates}
        return self.spec | known

    def estimator(self, families: Families) -> AnyEstimator:
        """The model of the job's speed."""
        if self.rates is not None:
            return TableEstimator({gpu_type: dict(rates) for gpu_type, rates in self.rates.items()})
        return families[self.family].estimator(fixed_batch=self.fixed_batch())

    def fixed_batch(self) -> bool:
        """Whether the total batch size is fixed."""
        return bool(self.spec.get("adaptivity", "adaptive") != "adaptive")

    def work(self, families: Families) -> float:
        """The job's work, as progress in samples."""
        one_t4 = float(self.estimator(families).goodput("t4", np.array([1]), np.array([1]))[0])
        return self.t4_hours * 3600 * one_t4


def draw(seed: int, families: Families) -> list[tuple[DemoJob, float]]:
    """The jobs of a seed with the times of their submission, real seconds since the first one."""
    random = np.random.default_rng(seed)
    times_s = np.cumsum(random.exponential(3600 / JOBS_PER_HOUR, JOBS)) / TIME_SCALE
    elastic = random.permutation(JOBS) < JOBS // 2
    jobs = []
    for number in range(JOBS):
        gpus = int(random.choice([*SIZES], p=[*SIZES.values()]))
        length_s = 0.0
        while not SHORTEST_S <= length_s <= LONGEST_S:
            length_s = random.exponential(MEAN_S)
        family = str(random.choice(FAMILIES))
        least, most = (1, min(4 * gpus, 16)) if elastic[number] else (gpus, gpus)
        spec = {"min_gpus": least, "max_gpus": most} | ({} if elastic[number] else {"preemptible": False})
        speed, on_t4, slowest = (
            float(families[family].estimator().goodput(gpu_type, np.array([1]), np.array([count]))[0])
            for gpu_type, count in ((LENGTH_ON, gpus), ("t4", 1), ("t4", gpus))
        )
        jobs.append(
            DemoJob(
                f"{family.split('-')[0]}-{number + 1}",
                family,
                length_s * speed / on_t4 / 3600,
                spec,
                ("", 1, gpus),
                limit_min=math.ceil(2 * length_s * speed / slowest / TIME_SCALE / 60),
            )
        )
    return [(job, at_s - times_s[0]) for job, at_s in zip(jobs, times_s.tolist(), strict=True)]
