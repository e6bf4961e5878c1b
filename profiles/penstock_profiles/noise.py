"""Estimates how noisy a job's gradients are: `grad_sqr` and `grad_var`, from the gradients of every step.

The gradients g_1 … g_n of one optimiser step, each over m samples, are independent draws around the true gradient mu
with covariance C_m. With g_bar their mean,

    E mean|g_i|^2 = |mu|^2 + tr C_m        and        E |g_bar|^2 = |mu|^2 + tr C_m / n,

so both unknowns follow from two norms, without bias (AdaScale, Johnson et al. 2020; McCandlish et al. 2018, appendix
A):

    |mu|^2 = (n |g_bar|^2 - mean|g_i|^2) / (n - 1)        tr C_m = n (mean|g_i|^2 - |g_bar|^2) / (n - 1).

Penstock states the noise at the initial batch size M0. A covariance falls as one over the batch, and m = S M0 / n with
S = M / M0 the *scale* of the step, so

    grad_sqr = |mu|^2        and        grad_var = tr C_M0 = (m / M0) tr C_m = S (mean|g_i|^2 - |g_bar|^2) / (n - 1).

With n = 1, the gradients of two steps take the place of the n. Each of them is over the whole batch, so m = S M0, and
the factor is 2 S, where it is S for two replicas. The parameters move between the two steps, which biases such an
estimate.

Axes: N gradients, P parameters (all parameters of a model, or of one parameter group, flattened).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from penstock_profiles.throughput import FloatArray, check_noise

SMOOTHING = 0.999
"""Weight that a step at the initial batch size leaves to the average before it, as in Pollux: a memory of 1,000
steps."""

ROUNDING = 0.01
"""How far |g_bar|^2 may exceed mean|g_i|^2, relative. In exact numbers it never does; bfloat16 rounds norms by up to
0.8 %."""


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """An estimate, as `efficiency` and `gain` take it and an `Observation` reports it.

    Raises:
        ValueError: a value is negative or not finite, or both are 0.
    """

    grad_sqr: float
    """Squared norm of the true gradient, in any unit, the same as that of `grad_var`."""
    grad_var: float
    """Trace of the gradient's covariance at the initial batch size."""

    def __post_init__(self) -> None:
        check_noise(self.grad_sqr, self.grad_var)


@dataclass(frozen=True, slots=True)
class Moments:
    """Squared norms of the gradients of one step. `+` joins those of disjoint parameters, such as two groups or shards.

    A library that has its gradients on a device passes reduced scalars: for each group, each replica sums the squared
    norms of its micro-steps' gradients, an all-reduce adds them up, and the mean gradient is computed anyway. All
    gradients are means over their samples, not sums, without the loss scale of mixed precision.

    Raises:
        ValueError: a norm is negative or not finite, `count` is below 2, or `mean_sqr` is above `local_sqr`.
    """

    local_sqr: float
    """mean|g_i|^2 over all replicas and their accumulated micro-steps."""
    mean_sqr: float
    """|g_bar|^2, of the mean gradient."""
    count: int
    """n = replicas x micro-steps, at least 2."""
    consecutive: bool = False
    """Whether each gradient is that of a whole step, and the steps followed one another."""

    def __post_init__(self) -> None:
        for name in ("local_sqr", "mean_sqr"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{name}={value!r} is not a finite number >= 0; leave out steps whose gradients overflowed"
                )
        if not self.count >= 2:
            raise ValueError(
                f"count={self.count!r} gradients have no spread; with one gradient per step, pair it with that of the"
                " step"
                " before and set consecutive=True"
            )
        if self.mean_sqr > self.local_sqr * (1 + ROUNDING):
            raise ValueError(
                f"mean_sqr={self.mean_sqr!r} is above local_sqr={self.local_sqr!r}, which is impossible for a mean of"
                " gradients; divide summed gradients and summed squared norms by their count"
            )

    def __add__(self, other: Moments) -> Moments:
        if (self.count, self.consecutive) != (other.count, other.consecutive):
            raise ValueError(f"{self} and {other} belong to different gradients; add up only the parts of one step")
        return Moments(
            self.local_sqr + other.local_sqr, self.mean_sqr + other.mean_sqr, self.count, consecutive=self.consecutive
        )


def moments(gradients_NP: ArrayLike, preconditioner_P: ArrayLike = 1.0, *, consecutive: bool = False) -> Moments:
    """`Moments` of gradients that are NumPy arrays.

    Args:
        gradients_NP: one row per replica and micro-step or, with `consecutive`, per step; N >= 2.
        preconditioner_P: what the optimiser multiplies a gradient by, besides the learning rate; for SGD, 1.
        consecutive: as in `Moments`.

    Raises:
        ValueError: the shapes do not fit, or as `Moments`.
    """
    gradients_NP = _gradients(gradients_NP) * _preconditioner(preconditioner_P)
    return Moments(
        local_sqr=float(np.mean(np.sum(gradients_NP**2, axis=1))),
        mean_sqr=float(np.sum(np.mean(gradients_NP, axis=0) ** 2)),
        count=len(gradients_NP),
        consecutive=consecutive,
    )


def adam_preconditioner(exp_avg_sq_P: ArrayLike, step: int, beta2: float = 0.999, eps: float = 1e-8) -> FloatArray:
    """1 / (sqrt(v_hat) + eps), shape (P,). With it, the noise is that of Adam's steps and not of the raw gradients.

    v_hat = v / (1 - beta2^step). Use Adam's state from before the step whose gradients it multiplies: a preconditioner
    that already contains them is not independent of them, and biases the estimates. AdaptDL uses 1 for the first 5
    steps. Here the caller must wait instead, since 1 has another unit and would stay in the average for long.

    Args:
        exp_avg_sq_P: Adam's v, >= 0, without the correction for its start at 0.
        step: number of optimiser steps in `exp_avg_sq_P`, >= 1.
        beta2: Adam's, in [0, 1).
        eps: Adam's, >= 0.

    Raises:
        ValueError: an argument is out of its range, or some v_hat and `eps` are both 0.
    """
    v_P = np.asarray(exp_avg_sq_P, dtype=np.float64)
    if not np.all((v_P >= 0) & (v_P < np.inf)):
        raise ValueError(
            "exp_avg_sq_P contains a negative or infinite value or a NaN; pass Adam's exp_avg_sq unchanged"
        )
    if not step >= 1:
        raise ValueError(f"step={step!r} is below 1, and Adam has no state yet; begin after its first step")
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2={beta2!r} is not in [0, 1); pass the second of Adam's betas")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps={eps!r} is not a finite number >= 0; pass Adam's eps")
    divisor_P = np.sqrt(v_P / (1 - beta2**step)) + eps
    if not np.all(divisor_P > 0):
        raise ValueError("eps=0 with a 0 in exp_avg_sq_P would divide by 0; use Adam's eps, such as 1e-8")
    return np.asarray(1.0 / divisor_P)


class NoiseEstimator:
    """Running estimate of one job's gradient noise. Use one per parameter group if their learning rates differ.

    Call `update` (scalars) or `feed` (arrays) once for every optimiser step, and read `noise`. The two estimates of
    each step enter averages with weight 1 - 0.999^S, so that the memory is counted in samples, whatever the batch. Both
    averages are divided by the total weight so far, so that the first step counts fully.

    A step's estimate of |mu|^2 is unbiased. If the noise is much larger than the gradient, about half of these
    estimates are negative. They enter the average unchanged, since leaving them out would bias it; only an average
    below 0 is read as 0.

    Departures from AdaptDL (its `gradient_noise_scale.py`, which Pollux and Sia use):

    * A pair of consecutive gradients counts as one step, with weight 1 - 0.999^S. AdaptDL uses 2 S, although one of the
      two gradients was already in the pair before.
    * grad_var has no floor of 1e-6: its unit differs here, and grad_var = 0 is valid with a positive grad_sqr.
    * The parts of a model are added up before the sum is bounded by 0. AdaptDL bounds each part, which favours large
      batches less.
    """

    def __init__(self) -> None:
        self._sqr = self._var = self._weight = 0.0
        self._paired = False
        self._previous_P: FloatArray | None = None

    @property
    def weight(self) -> float:
        """How full the memory is: 1 - 0.999^(sum of S), in [0, 1]. At the initial batch size, it is 0.1 after 105
        steps."""
        return self._weight

    @property
    def noise(self) -> GradientNoise | None:
        """The present estimate; None before the first step, and if all gradients were 0.

        A grad_sqr of 0 means that any batch is as efficient as the initial one. With a small `weight`, it means only
        that the gradient cannot yet be told from the noise.
        """
        if not self._weight:
            return None
        sqr, var = max(self._sqr / self._weight, 0.0), self._var / self._weight
        return GradientNoise(sqr, var) if sqr + var > 0 else None

    def update(self, moments: Moments, scale: float) -> None:
        """Add one optimiser step.

        The first step with n > 1 after consecutive ones drops the average, as in AdaptDL: the moves between steps,
        which go against the gradient and its noise, have biased it.

        Args:
            moments: of the step, over all parameters of this estimator.
            scale: S > 0, total batch of the step (all replicas and micro-steps) / initial batch size.

        Raises:
            ValueError: `scale` is not a positive number, or an estimate overflows.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale!r} is not a positive number; pass the total batch / the initial batch")
        n = moments.count
        part = scale if moments.consecutive else scale / n  # m / M0
        spread = max(moments.local_sqr - moments.mean_sqr, 0.0)
        sqr = moments.mean_sqr - spread / (n - 1)
        var = part * n / (n - 1) * spread
        if not math.isfinite(var):
            raise ValueError(f"{moments} at scale={scale!r} overflows; divide the gradients by the loss scale first")
        if self._paired and not moments.consecutive:
            self._sqr = self._var = self._weight = 0.0
        self._paired = moments.consecutive
        new = -math.expm1(scale * math.log(SMOOTHING))
        self._sqr += new * (sqr - self._sqr)
        self._var += new * (var - self._var)
        self._weight += new * (1 - self._weight)

    def feed(self, gradients_NP: ArrayLike, scale: float, preconditioner_P: ArrayLike = 1.0) -> None:
        """`update` with the step's gradients as arrays, one row per replica and micro-step.

        A single row is paired with the single row of the step before; the first one is only kept.

        Raises:
            ValueError: as `moments` and `update`; the step is then not added.
        """
        gradients_NP = _gradients(gradients_NP)
        if len(gradients_NP) > 1:
            self.update(moments(gradients_NP, preconditioner_P), scale)
            self._previous_P = None
            return
        if self._previous_P is not None:
            if self._previous_P.shape != gradients_NP[0].shape:
                raise ValueError(
                    f"gradients_NP has {gradients_NP.shape[1]} parameters, but the step before had"
                    f" {len(self._previous_P)}; use a new estimator when the model changes"
                )
            pair_NP = np.stack([self._previous_P, gradients_NP[0]])
            self.update(moments(pair_NP, preconditioner_P, consecutive=True), scale)
        self._previous_P = gradients_NP[0].copy()

    def state_dict(self) -> dict[str, float | bool]:
        """The state for a checkpoint, as JSON can hold it.

        The previous gradient is left out, since it is as large as the model. With n = 1, a restart so loses one step.
        """
        return {"sqr": self._sqr, "var": self._var, "weight": self._weight, "paired": self._paired}

    def load_state_dict(self, state: Mapping[str, float | bool]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of its range.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"state has the keys {sorted(state)}; it must have exactly the keys {sorted(self.state_dict())}"
            )
        for name, low, high in (("sqr", -math.inf, math.inf), ("var", 0.0, math.inf), ("weight", 0.0, 1.0)):
            value = state[name]
            if not (low <= value <= high and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} is not in [{low:g}, {high:g}]; leave the state out to begin again")
        self._sqr, self._var, self._weight = float(state["sqr"]), float(state["var"]), float(state["weight"])
        self._paired = bool(state["paired"])
        self._previous_P = None


def _gradients(gradients_NP: ArrayLike) -> FloatArray:
    array = np.asarray(gradients_NP, dtype=np.float64)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"gradients_NP has shape {array.shape}, but must be (gradients, parameters) with at least one of each;"
            " pass one flat row per replica and micro-step"
        )
    if not np.all(np.isfinite(array)):
        raise ValueError("gradients_NP contains a NaN or an infinite value; leave out steps whose gradients overflowed")
    return array


def _preconditioner(preconditioner_P: ArrayLike) -> FloatArray:
    array = np.asarray(preconditioner_P, dtype=np.float64)
    if not np.all((array > 0) & (array < np.inf)):
        raise ValueError("preconditioner_P must contain only positive numbers; use `adam_preconditioner`, or 1 for SGD")
    return array
