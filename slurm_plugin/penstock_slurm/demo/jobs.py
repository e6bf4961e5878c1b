"""The demo's twelve jobs: the job spec of each for Penstock, and its request for plain Slurm.

Both clusters get the same work at the same times. Under plain Slurm each job has one request for its whole life, as users usually
make them: a fast GPU type and a round count, so that few request T4s. The batch size follows the allocation on both clusters,
so that only the scheduling differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_profiles.estimators import AnyEstimator, TableEstimator
from penstock_profiles.families import Families

TIME_SCALE = 20.0
"""Emulated seconds in one real second."""

ARRIVALS_S = 120.0
"""Real seconds over which the jobs are submitted."""


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One job."""

    name: str
    family: str
    t4_hours: float
    """Work, as hours on one T4."""
    spec: dict[str, Any]
    plain: tuple[str, int, int]
    """(GPU type, nodes, GPUs on each): the request under plain Slurm."""
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


JOBS = (
    DemoJob("imagenet-a", "resnet50-imagenet", 10, {"max_gpus": 16}, ("a100", 1, 8)),
    DemoJob("cifar-a", "resnet18-cifar10", 2.5, {"max_gpus": 16}, ("rtx", 1, 4)),
    DemoJob("bert-a", "bert-squad", 12, {"max_gpus": 16}, ("a100", 1, 4)),
    DemoJob("speech-a", "deepspeech2", 1.5, {"max_gpus": 16}, ("t4", 1, 4)),
    DemoJob("yolo", "yolov3", 1.2, {"max_gpus": 8}, ("t4", 1, 4)),
    DemoJob("ncf", "ncf", 0.4, {"max_gpus": 1, "adaptivity": "fixed"}, ("t4", 1, 1)),
    DemoJob(
        "imagenet-rigid", "resnet50-imagenet", 3, {"min_gpus": 4, "max_gpus": 4, "adaptivity": "rigid"}, ("rtx", 1, 4)
    ),
    DemoJob("bert-scaling", "bert-squad", 2, {"max_gpus": 4, "adaptivity": "strong-scaling"}, ("a100", 1, 1)),
    DemoJob("cifar-b", "resnet18-cifar10", 4, {"max_gpus": 16}, ("rtx", 1, 8)),
    DemoJob("speech-b", "deepspeech2", 2.5, {"max_gpus": 16}, ("rtx", 1, 8)),
    DemoJob("bert-b", "bert-squad", 8, {"min_gpus": 2, "max_gpus": 16}, ("rtx", 1, 8)),
    DemoJob(
        "imagenet-pinned", "resnet50-imagenet", 6, {"min_gpus": 2, "max_gpus": 8, "preemptible": False}, ("a100", 1, 8)
    ),
)
"""In the order of their submission."""
