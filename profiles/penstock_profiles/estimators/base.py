"""What all estimators have in common: they are plain data, and evaluate whole columns of configurations."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from penstock_profiles.throughput import FloatArray

IntArray = NDArray[np.int64]

STRICT = ConfigDict(extra="forbid")
"""For `__pydantic_config__` of an estimator: an unknown field is an error."""


class Batch(NamedTuple):
    """How a total batch is divided over GPUs and time."""

    atomic_batch: int
    """Samples per GPU in one micro-step, on the GPU with the most; per replica if several GPUs hold one."""
    accumulation_steps: int
    """Micro-steps whose gradients are added up before the last one of a step."""


class Estimator(Protocol):
    """How fast a job progresses on each configuration."""

    @property
    def kind(self) -> str:
        """Name of the implementation, which is the discriminator in JSON."""
        ...

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """Progress on each configuration of one GPU type, in samples/s of the initial batch size.

        Shape broadcast(nodes, gpus); finite and >= 0, with 0 where the job cannot run or nothing is known of the type.
        `nodes` >= 1 and `gpus` >= `nodes` count the whole configuration.
        """
        ...

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """Batch that reaches that goodput; None if the goodput is 0, or if the estimator knows no batches."""
        ...
