"""How long one optimiser step takes, and its throughput: Sia's model, with one more parameter.

In the paper, synchronisation grows by the same time with each further replica. In measured all-reduces, each further
replica costs less than the one before. `growth` says by how much; with `growth` 1 the formula is the paper's.

The letters of the paper: N `nodes`, K `replicas` (one GPU each here), m `atomic_batch`, s `accumulation_steps`.

Statistical efficiency: how much progress a sample brings in a large batch, relative to the initial batch size.

Large batches average out the gradient's noise. That helps while the noise hides the true gradient (`grad_var` much
larger than `grad_sqr`), and is wasted once it does not.
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
    """The numbers that say how fast one model trains on one GPU type: the paper's seven, and `growth`.

    Raises:
        ValueError: a time is negative or not finite, `gamma` is below 1, `growth` is beyond -1 or 1, or computing would
            take no time.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    alpha_c: float
    """Compute time of a micro-step that does not depend on its batch, s."""
    beta_c: float
    """Compute time per sample on one GPU, s."""
    alpha_r: float
    """Synchronisation of two replicas on one node, s."""
    beta_r: float
    """About what the third replica adds to it, s. Each further replica adds less if `growth` is below 1."""
    alpha_n: float
    """Synchronisation of two replicas on two nodes, s."""
    beta_n: float
    """As `beta_r`, but across nodes, s."""
    gamma: float
    """Overlap of compute and synchronisation. 1: the times add up; towards infinity, the longer hides the shorter."""
    growth: float = 1.0
    """How synchronisation grows with replicas, in [-1, 1]. 1: linearly (the paper); 0: logarithmically; -1: to a
    limit."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = {"gamma": (1.0, math.inf), "growth": (-1.0, 1.0)}.get(field.name, (0.0, math.inf))
            if not (math.isfinite(value) and low <= value <= high):
                until = "" if high == math.inf else f" and at most {high:g}"
                raise ValueError(
                    f"{field.name}={value!r} is not a finite number of at least {low:g}{until}; fit the model again"
                )
        if self.alpha_c + self.beta_c <= 0:
            raise ValueError("alpha_c=0 and beta_c=0 mean that computing takes no time; one of them must be positive")


def compute_time(params: ThroughputParams, atomic_batch: ArrayLike) -> FloatArray:
    """Seconds that one GPU computes on one micro-step: T_acc = alpha_c + beta_c m. Shape of `atomic_batch`."""
    return params.alpha_c + params.beta_c * _at_least(1, "atomic_batch", atomic_batch)


def growth_factor(growth: ArrayLike, replicas: ArrayLike) -> FloatArray:
    """The factor of beta in the synchronisation time of K >= 2 replicas; 0 for fewer. The arguments broadcast.

    phi(K) = 2 ((K/2)^growth - 1) / growth, the Box-Cox transform of K/2: K - 2 at 1, 2 ln(K/2) at 0, 2 - 4/K at -1. Its
    slope at K = 2 is 1 for every `growth`, so that beta keeps its meaning.
    """
    log_K = np.log(np.maximum(np.asarray(replicas, dtype=np.float64), 2.0) / 2.0)
    power = np.asarray(growth, dtype=np.float64)
    power = np.where(np.abs(power) < 1e-9, 1e-9, power)  # within 1e-7 of its limit, the logarithm
    return np.asarray(2.0 * np.expm1(power * log_K) / power)


def sync_time(params: ThroughputParams, nodes: ArrayLike, replicas: ArrayLike) -> FloatArray:
    """Seconds that an all-reduce of the gradients takes alone, shape broadcast(nodes, replicas).

    T_net = 0 if K = 1; alpha_r + beta_r phi(K) on one node; alpha_n + beta_n phi(K) on more; phi is `growth_factor`.
    """
    N, K = _at_least(1, "nodes", nodes), _at_least(1, "replicas", replicas)
    if np.any(N > K):
        raise ValueError(f"nodes={nodes!r} is more than replicas={replicas!r}; each node needs a replica")
    further = growth_factor(params.growth, K)
    within, across = params.alpha_r + params.beta_r * further, params.alpha_n + params.beta_n * further
    return np.where(K == 1, 0.0, np.where(N == 1, within, across))


def overlapped(compute: FloatArray, sync: FloatArray, gamma: ArrayLike) -> FloatArray:
    """Seconds of computing (> 0) and synchronising (>= 0) that partly overlap: (T_acc^gamma + T_net^gamma)^(1/gamma).

    The arrays broadcast; single precision stays single.
    """
    longer = np.maximum(compute, sync)
    # As a ratio, a large gamma neither overflows nor loses the shorter term. NumPy's power takes twice as long.
    with np.errstate(divide="ignore"):
        ratio = np.log(np.minimum(compute, sync) / longer)
    return np.asarray(longer * np.exp(np.log(1.0 + np.exp(gamma * ratio)) / gamma))


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
    return np.asarray(
        _at_least(0, "accumulation_steps", accumulation_steps) * compute + overlapped(compute, sync, params.gamma)
    )


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


def gain(grad_sqr: float, grad_var: float, batch: ArrayLike, initial_batch: float) -> FloatArray:
    """AdaScale's gain: the number of steps at the initial batch size that one step at `batch` is worth. Shape of
    `batch`.

    r = (var + sqr) / (var / S + sqr) with S = batch / initial_batch (Sia section 3.3; AdaScale, equation 4).
    It is in [1, S].

    Args:
        grad_sqr: squared norm of the true gradient, >= 0, in any unit, the same as that of `grad_var`.
        grad_var: trace of the gradient's covariance at the initial batch size, >= 0. Not both may be 0.
        batch: total batch sizes in samples, >= `initial_batch`.
        initial_batch: samples, > 0.

    Raises:
        ValueError: an argument is out of its range or not a number.
    """
    scale = _scale(grad_sqr, grad_var, batch, initial_batch)
    return np.asarray(scale * efficiency(grad_sqr, grad_var, batch, initial_batch))


def efficiency(grad_sqr: float, grad_var: float, batch: ArrayLike, initial_batch: float) -> FloatArray:
    """Progress per sample at `batch` relative to the initial batch size, in (0, 1]; 1 at the initial batch size.

    efficiency = r / S = (var + sqr) / (var + S sqr); non-increasing in `batch`. Arguments, shape and errors of `gain`.
    """
    scale = _scale(grad_sqr, grad_var, batch, initial_batch)
    # In this form, 1 / (1 + (S - 1) sqr / (var + sqr)), rounding cannot leave (0, 1].
    return np.asarray(1.0 / (1.0 + (scale - 1.0) * (grad_sqr / (grad_var + grad_sqr))))


def check_noise(grad_sqr: float, grad_var: float) -> None:
    """Raise ValueError unless both values are finite and not negative, and one of them is positive."""
    for name, value in (("grad_sqr", grad_sqr), ("grad_var", grad_var)):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name}={value!r} is not a finite number of at least 0; leave out such estimates")
    if grad_sqr + grad_var <= 0:
        raise ValueError("grad_sqr=0 and grad_var=0 say that there is no gradient; use grad_sqr=1 if nothing is known")


def _scale(grad_sqr: float, grad_var: float, batch: ArrayLike, initial_batch: float) -> FloatArray:
    check_noise(grad_sqr, grad_var)
    if not 0 < initial_batch < np.inf:
        raise ValueError(f"initial_batch={initial_batch!r} is not a positive number of samples")
    array = np.asarray(batch, dtype=np.float64)
    if not np.all((array >= initial_batch) & (array < np.inf)):
        raise ValueError(f"batch={batch!r} is below initial_batch={initial_batch}, the smallest that a job trains with")
    return np.asarray(array / initial_batch)
