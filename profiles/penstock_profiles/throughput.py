"""How long one optimiser step takes, and how many samples it brings: Sia's throughput model.

The letters of the paper: N `nodes`, K `replicas` (one GPU each here), m `atomic_batch`, s `accumulation_steps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ThroughputParams:
    """The seven numbers that say how fast one model trains on one GPU type.

    Raises:
        ValueError: a parameter is negative or not finite, `gamma` is below 1, or computing would take no time.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    alpha_c: float
    """Compute time of a micro-step that does not depend on its batch, s."""
    beta_c: float
    """Compute time per sample on one GPU, s."""
    alpha_r: float
    """Synchronisation of two replicas on one node, s."""
    beta_r: float
    """More of it per further replica, s."""
    alpha_n: float
    """Synchronisation of two replicas on two nodes, s."""
    beta_n: float
    """More of it per further replica, s."""
    gamma: float
    """Overlap of compute and synchronisation: 1 adds the two, towards infinity the longer hides the shorter."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low = getattr(self, field.name), 1.0 if field.name == "gamma" else 0.0
            if not (math.isfinite(value) and value >= low):
                raise ValueError(f"{field.name}={value!r} is not a finite number of at least {low:g}; fit it again")
        if self.alpha_c + self.beta_c <= 0:
            raise ValueError("alpha_c=0 and beta_c=0 make computing free; at least one of them must be positive")


def compute_time(params: ThroughputParams, atomic_batch: ArrayLike) -> FloatArray:
    """Seconds that one GPU computes on one micro-step: T_acc = alpha_c + beta_c m. Shape of `atomic_batch`."""
    return params.alpha_c + params.beta_c * _at_least(1, "atomic_batch", atomic_batch)


def sync_time(params: ThroughputParams, nodes: ArrayLike, replicas: ArrayLike) -> FloatArray:
    """Seconds that an all-reduce of the gradients takes by itself; shape broadcast(nodes, replicas).

    T_net = 0 if K = 1; alpha_r + beta_r (K - 2) on one node; alpha_n + beta_n (K - 2) on more.
    """
    N, K = _at_least(1, "nodes", nodes), _at_least(1, "replicas", replicas)
    if np.any(N > K):
        raise ValueError(f"nodes={nodes!r} is more than replicas={replicas!r}; each node needs a replica")
    further = np.maximum(K - 2, 0)
    within, across = params.alpha_r + params.beta_r * further, params.alpha_n + params.beta_n * further
    return np.where(K == 1, 0.0, np.where(N == 1, within, across))


def step_time(
    params: ThroughputParams,
    nodes: ArrayLike,
    replicas: ArrayLike,
    atomic_batch: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> FloatArray:
    """Seconds of one optimiser step; the four arrays broadcast, and so does the result.

    T_iter = s T_acc + (T_acc^gamma + T_net^gamma)^(1/gamma): s micro-steps compute alone, the last one also
    synchronises (Sia section 3.3, after Pollux).

    Args:
        params: of the model on the GPU type.
        nodes: N >= 1, nodes that hold the replicas.
        replicas: K >= N.
        atomic_batch: m >= 1, samples per replica and micro-step.
        accumulation_steps: s >= 0, micro-steps before the one that synchronises.

    Raises:
        ValueError: an argument is below its range or not a number.
    """
    compute, sync = compute_time(params, atomic_batch), sync_time(params, nodes, replicas)
    longer, shorter = np.maximum(compute, sync), np.minimum(compute, sync)
    # As a ratio, a large gamma neither overflows nor loses the shorter term.
    last = longer * (1.0 + (shorter / longer) ** params.gamma) ** (1.0 / params.gamma)
    return np.asarray(_at_least(0, "accumulation_steps", accumulation_steps) * compute + last)


def throughput(
    params: ThroughputParams,
    nodes: ArrayLike,
    replicas: ArrayLike,
    atomic_batch: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> FloatArray:
    """Samples/s over all replicas: M / T_iter with M = K m (s + 1). Arguments, shape and errors of `step_time`."""
    seconds = step_time(params, nodes, replicas, atomic_batch, accumulation_steps)
    batch = np.asarray(replicas) * np.asarray(atomic_batch) * (np.asarray(accumulation_steps) + 1)
    return np.asarray(batch / seconds)


def _at_least(low: int, name: str, values: ArrayLike) -> FloatArray:
    """`values` as floats, if all of them are finite and at least `low`."""
    array = np.asarray(values, dtype=np.float64)
    if not np.all((array >= low) & (array < np.inf)):
        raise ValueError(
            f"{name}={values!r} is not all finite numbers of at least {low}; leave out what was not measured"
        )
    return array
