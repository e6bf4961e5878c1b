"""The demo's jobs: the job spec of each for Penstock, and its request for plain Slurm.

Both clusters get the same work at the same times. For half of the time more jobs have come than fit. Under Penstock, jobs wait
because of `min_gpus`: without it, each would start on one GPU.

Under plain Slurm each job has one request for its whole life: a round count of GPUs of one type, and a time limit of about twice
its time. These users know their models: those that gain much from a fast GPU request one, and those that do not, which are a
quarter of the jobs, request T4s. The batch size follows the allocation on both clusters, so that only the scheduling differs.
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

ARRIVALS_S = 60.0
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


LIMITS_MIN = {"a100": 2, "rtx": 4, "t4": 4}
"""About twice what a job takes on these GPUs: its time limit under plain Slurm, in real minutes."""


def gpus(low: int, high: int, **more: Any) -> dict[str, Any]:
    """A job spec."""
    return {"min_gpus": low, "max_gpus": high} | more


JOBS = tuple(
    DemoJob(name, family, t4_hours, spec, plain, limit_min=LIMITS_MIN[plain[0]])
    for name, family, t4_hours, spec, plain in (
        ("imagenet-a", "resnet50-imagenet", 7.2, gpus(4, 16), ("a100", 1, 8)),
        ("bert-a", "bert-squad", 12, gpus(4, 16), ("a100", 1, 8)),
        ("cifar-a", "resnet18-cifar10", 4.8, gpus(4, 16), ("rtx", 1, 8)),
        ("bert-t4", "bert-squad", 3.6, gpus(8, 16, gpu_types=["t4"]), ("t4", 2, 4)),
        ("imagenet-b", "resnet50-imagenet", 7.2, gpus(8, 16), ("rtx", 1, 8)),
        ("speech-a", "deepspeech2", 1.8, gpus(4, 8), ("t4", 1, 4)),
        ("bert-b", "bert-squad", 12, gpus(4, 16), ("a100", 1, 8)),
        ("imagenet-rigid", "resnet50-imagenet", 1.8, gpus(4, 4, adaptivity="rigid"), ("rtx", 1, 4)),
        ("cifar-rtx-t4", "resnet18-cifar10", 3.6, gpus(4, 8, gpu_types=["rtx", "t4"]), ("rtx", 1, 8)),
        ("yolo-a", "yolov3", 1, gpus(4, 8), ("t4", 1, 4)),
        ("imagenet-c", "resnet50-imagenet", 7.2, gpus(4, 16), ("a100", 1, 8)),
        ("bert-scaling", "bert-squad", 2.4, gpus(2, 4, adaptivity="strong-scaling"), ("a100", 1, 2)),
        ("imagenet-pinned", "resnet50-imagenet", 3.6, gpus(4, 8, preemptible=False), ("rtx", 1, 8)),
        ("speech-b", "deepspeech2", 1.8, gpus(4, 8), ("t4", 2, 4)),
        ("bert-c", "bert-squad", 9.6, gpus(4, 16), ("a100", 1, 8)),
        ("ncf", "ncf", 0.4, gpus(1, 1, adaptivity="fixed"), ("t4", 1, 1)),
        ("cifar-b", "resnet18-cifar10", 3.6, gpus(4, 16), ("rtx", 1, 8)),
        ("imagenet-16", "resnet50-imagenet", 6, gpus(16, 16), ("a100", 2, 8)),
        ("speech-rtx", "deepspeech2", 1.8, gpus(4, 8, gpu_types=["rtx"]), ("rtx", 1, 8)),
        ("yolo-b", "yolov3", 1, gpus(4, 4), ("t4", 1, 4)),
        ("imagenet-d", "resnet50-imagenet", 4.8, gpus(4, 16), ("rtx", 1, 8)),
        ("cifar-c", "resnet18-cifar10", 2.4, gpus(4, 8), ("rtx", 1, 4)),
        ("bert-d", "bert-squad", 7.2, gpus(4, 16), ("a100", 1, 8)),
        ("speech-c", "deepspeech2", 1.8, gpus(4, 8), ("t4", 2, 4)),
        ("cifar-d", "resnet18-cifar10", 2.4, gpus(4, 8), ("rtx", 1, 4)),
        ("imagenet-e", "resnet50-imagenet", 3.6, gpus(4, 16), ("a100", 1, 8)),
        ("bert-e", "bert-squad", 4.8, gpus(4, 16), ("a100", 1, 4)),
        ("yolo-c", "yolov3", 0.7, gpus(4, 4), ("t4", 1, 4)),
    )
)
"""In the order of their submission."""
