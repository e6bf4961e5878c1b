"""What all estimators have in common: they are plain data, and evaluate whole columns of configurations."""

from __future__ import annotations

import math
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


Table = dict[str, dict[int, float]]
"""GPU type -> count -> measured value."""


def check_measured(name: str, measured: Table, counted: str, *, zero_is_possible: bool) -> None:
    """Raise ValueError unless each type has a measurement, counts start at 1, and values are finite and positive.

    Args:
        name: of the field, for messages.
        measured: the field.
        counted: what the counts are of, for messages: GPUs or samples.
        zero_is_possible: whether a value may be 0. A rate may, a time may not.
    """
    if not measured:
        raise ValueError(f"{name}={{}} has no measurement; use a LinearEstimator if nothing is known")
    for gpu_type, values in measured.items():
        if not values:
            raise ValueError(f"{name}[{gpu_type!r}]={{}} has no measurement; leave the GPU type out")
        for count, value in values.items():
            if not count >= 1:
                raise ValueError(f"{name}[{gpu_type!r}] has an entry for {count} {counted}; counts start at 1")
            if not (math.isfinite(value) and (value > 0 or (zero_is_possible and value == 0))):
                low = "of at least" if zero_is_possible else "above"
                raise ValueError(
                    f"{name}[{gpu_type!r}][{count}]={value!r} is not a finite number {low} 0; leave it out"
                )


def interpolate(measured: Table, gpu_type: str, nodes: IntArray, gpus: IntArray, outside: float) -> FloatArray:
    """The measured values for numbers of GPUs of one type, interpolated linearly; shape broadcast(nodes, gpus).

    Below the smallest measured count, above the largest, and on other GPU types, the value is `outside`. How the GPUs
    are distributed over nodes does not matter.
    """
    shape = np.broadcast_shapes(np.shape(nodes), np.shape(gpus))
    if gpu_type not in measured:
        return np.full(shape, outside)
    known = sorted(measured[gpu_type].items())
    counts, values = [count for count, _ in known], [value for _, value in known]
    return np.asarray(np.interp(np.broadcast_to(gpus, shape), counts, values, left=outside, right=outside))
