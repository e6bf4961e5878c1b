"""Fits the parameters of the throughput model to measured steps.

It is a robust least-squares fit in the logarithms of compute time and step time, as in Sia's section 3.3. Three
departures let it predict shapes that are larger than any measured one (docs/developer/profiles.md has the
measurements):

- Each shape (nodes, replicas) has the same weight, whatever the number of batch sizes measured on it. Large residuals
  count linearly instead of squared (soft L1), so that one bad point does not bend the curve.
- Weak ties to plausible values (`_TIES`) replace the paper's bounds. They decide what the data leave open, and are
  loosened if the data lie close to the model.
- `growth` is fitted too.

Levenberg-Marquardt on the logarithms of the times needs no bounds, and its Jacobian is analytic.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import leastsq
from scipy.special import expit, logit

from penstock_profiles.observations import Measured, check
from penstock_profiles.throughput import FloatArray, ThroughputParams, step_time

SOFT = 0.1
"""Relative error from which a residual counts linearly. The scatter of good measurements is well below it."""

SCATTER = 0.04
"""Relative error (root mean square) of a typical set of points about the model. The stiffness of the ties suits it."""

GROWTH = -0.3
"""Plausible `growth`: the median over published measurements of six models on four GPU types
(docs/developer/profiles.md)."""

GAMMA = 2.0
"""Plausible `gamma`: synchronisation that is half hidden."""

GAMMA_MAX = 10.0
"""Largest `gamma`, as in Sia. Beyond it, the shorter of compute and synchronisation is hidden completely."""

SLOWER_ACROSS = 1.1
"""Ratio of the synchronisation time across nodes to that within one, until it is measured (Sia's artifact)."""

_PLAUSIBLE_SYNC = np.array([0.1, 0.02, 0.3, 0.05])
"""alpha_r, beta_r, alpha_n, beta_n as shares of the median one-GPU step."""

_TIES = np.array([0.003, 0.003, 0.005, 0.005, 0.005, 0.005, 0.005, 0.03 * (1 - GROWTH**2)])
"""Residual per unit of distance between theta and its plausible value. All measured points together weigh 1."""

_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a fit."""

    params: ThroughputParams | None
    """The fitted parameters. If the fit failed: those it started from, or None if there were none."""
    failure: str | None
    """Why the fit failed; None if it did not."""
    median_rel_err: float
    """Median relative error of the predicted step times; NaN without parameters."""


def fit_throughput(measured: Measured, start: ThroughputParams | None = None) -> Fit:
    """Fit the throughput model to measured steps.

    What was not measured is filled in by Sia's rules:

    - With one batch size only, alpha_c is half of the compute time.
    - Without a run on several GPUs of one node, or on several nodes, synchronisation there costs nothing: scaling is
      perfect, so that the policy tries it.
    - Once it has been measured within a node, synchronisation across nodes takes at least `SLOWER_ACROSS` times as
      long.
    - Without more than two replicas, beta is 0.

    Args:
        measured: at least one point; see `Measured`.
        start: the last good parameters. They shorten the search but do not change its result.

    Returns:
        The fit. If it failed, it contains the reason and `start` as its parameters.

    Raises:
        ValueError: there is no point, or an impossible one; the message names the field, the value and the remedy.
    """
    check(measured)
    if len(measured.nodes) == 0:
        raise ValueError("measured has no points; run at least one step, or use a prior from the catalogue")
    problem = Problem(measured)
    theta = problem.plausible if start is None else to_theta(start, problem.plausible)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        theta, message = _search(problem, theta)
        if message is None and problem.loosen(theta):
            theta, message = _search(problem, theta)
        params = _to_params(theta, measured) if message is None else None
    if params is None:
        failure = f"the optimiser found nothing better than its start: {message}"
        return Fit(start, failure, median_rel_err(start, measured) if start is not None else float("nan"))
    return Fit(params, None, median_rel_err(params, measured))


def _search(problem: Problem, theta: FloatArray) -> tuple[FloatArray, str | None]:
    """Levenberg-Marquardt from `theta`. Returns the result, and a message if it is worse than the start."""
    answer, _, _, message, _ = leastsq(
        problem.residuals, theta, Dfun=problem.jacobian, full_output=True, xtol=1e-4, ftol=1e-5, maxfev=100
    )
    before, after = (float(np.sum(problem.residuals(x) ** 2)) for x in (theta, answer))
    return (answer, None) if after <= before else (theta, " ".join(str(message).split()))


def median_rel_err(params: ThroughputParams, measured: Measured) -> float:
    """Median of |predicted / measured step time - 1| over the points."""
    predicted = step_time(params, measured.nodes, measured.replicas, measured.atomic_batch)
    return float(np.median(np.abs(predicted / measured.step_s - 1)))


class Problem:
    """Residuals and Jacobian over theta: the logarithms of the six times, the logit of (gamma - 1) / 9, and
    atanh(growth)."""

    def __init__(self, measured: Measured) -> None:
        N, K, self._m, step_s, sync_s = measured
        self._log_step, self._log_compute = np.log(step_s), np.log(step_s - sync_s)
        self._across, self._within = N > 1, (N == 1) & (K > 1)
        self._log_half_K = np.log(np.maximum(K, 2) / 2)
        _, shape, points = np.unique(np.stack([N, K]), axis=1, return_inverse=True, return_counts=True)
        weight = 1 / points[shape.reshape(-1)]
        self._weight = np.sqrt(np.tile(weight / weight.sum(), 2))
        self.plausible = _plausible(measured)
        self._ties = _TIES
        self._at: tuple[bytes, _Parts] | None = None

    def loosen(self, theta: FloatArray) -> bool:
        """Loosen the ties if the points lie close to the model at theta; returns whether they do.

        Clean measurements need weaker ties.
        """
        scatter = float(np.sqrt(np.sum(self.residuals(theta)[:-8] ** 2)))
        if scatter < SCATTER / 2:
            self._ties = _TIES * max(scatter / SCATTER, 0.01)
        return scatter < SCATTER / 2

    def residuals(self, theta: FloatArray) -> FloatArray:
        """Residuals of step times, compute times and ties, shape (2 points + 8,)."""
        parts = self._parts(theta)
        error = np.concatenate([parts.log_step - self._log_step, parts.log_compute - self._log_compute]) / SOFT
        softened = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1)) * SOFT
        return np.concatenate([softened * self._weight, self._ties * (theta - self.plausible)])

    def jacobian(self, theta: FloatArray) -> FloatArray:
        """Derivatives of `residuals` by theta, shape (2 points + 8, 8)."""
        p = self._parts(theta)
        points = len(self._m)
        error = np.concatenate([p.log_step - self._log_step, p.log_compute - self._log_compute]) / SOFT
        root = np.sqrt(1 + error**2)
        # d softened / d error = |error| / (root sqrt(2 (root - 1))), and 2 (root - 1) = 2 error^2 / (root + 1).
        slope = np.sqrt((root + 1) / 2) / root * self._weight
        J = np.zeros((2 * points + 8, 8))
        J[:points, 0], J[:points, 1] = (1 - p.share) * p.fixed, (1 - p.share) * (1 - p.fixed)
        J[points:-8, 0], J[points:-8, 1] = p.fixed, 1 - p.fixed
        for column, link in ((2, self._within), (4, self._across)):
            alpha, beta = np.exp(theta[column : column + 2])
            of_sync = p.share / p.sync
            J[:points, column] = of_sync * alpha * link
            J[:points, column + 1] = of_sync * beta * p.factor * link
            J[:points, 7] += of_sync * beta * p.factor_slope * link * (1 - p.growth**2)
        d_gamma = (p.share * p.log_ratio - p.log_sum / p.gamma) / p.gamma
        J[:points, 6] = np.where(self._within | self._across, d_gamma, 0.0) * p.gamma_slope
        J[:-8] *= slope[:, None]
        J[-8:] = np.diag(self._ties)
        return J

    def _parts(self, theta: FloatArray) -> _Parts:
        """The model at theta, kept because the search evaluates the Jacobian where it evaluated the residuals."""
        if self._at is None or self._at[0] != theta.tobytes():
            self._at = theta.tobytes(), self._parts_at(theta)
        return self._at[1]

    def _parts_at(self, theta: FloatArray) -> _Parts:
        alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = np.exp(theta[:6])
        unit = expit(theta[6])
        gamma, growth = 1 + (GAMMA_MAX - 1) * unit, float(np.tanh(theta[7]))
        factor, factor_slope = _growth_factor(growth, self._log_half_K)
        compute = alpha_c + beta_c * self._m
        sync = np.where(
            self._across, alpha_n + beta_n * factor, np.where(self._within, alpha_r + beta_r * factor, _TINY)
        )
        log_compute = np.log(compute)
        log_ratio = np.log(sync) - log_compute
        log_sum = np.logaddexp(0.0, gamma * log_ratio)
        return _Parts(
            log_compute=log_compute,
            log_step=log_compute + log_sum / gamma,
            sync=sync,
            share=expit(gamma * log_ratio),
            fixed=alpha_c / compute,
            factor=factor,
            factor_slope=factor_slope,
            log_ratio=log_ratio,
            log_sum=log_sum,
            gamma=gamma,
            gamma_slope=(GAMMA_MAX - 1) * unit * (1 - unit),
            growth=growth,
        )


@dataclass(slots=True)
class _Parts:
    """The model at one theta; arrays of shape (points,)."""

    log_compute: FloatArray
    log_step: FloatArray
    sync: FloatArray
    share: FloatArray
    """d log step / d log sync."""
    fixed: FloatArray
    """Share of alpha_c in the compute time."""
    factor: FloatArray
    factor_slope: FloatArray
    """d factor / d growth."""
    log_ratio: FloatArray
    """log (sync / compute)."""
    log_sum: FloatArray
    gamma: float
    gamma_slope: float
    """d gamma / d theta."""
    growth: float


def _growth_factor(growth: float, log_half_K: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`throughput.growth_factor` and its derivative by `growth`, from ln(K/2)."""
    if abs(growth) < 1e-4:
        z = growth * log_half_K
        return 2 * log_half_K * (1 + z / 2), log_half_K**2 * (1 + 2 * z / 3)
    power = np.exp(growth * log_half_K)
    return 2 * (power - 1) / growth, 2 * (power * (growth * log_half_K - 1) + 1) / growth**2


def _plausible(measured: Measured) -> FloatArray:
    """The theta that a fit is weakly tied to: a line through the one-GPU steps, and synchronisation in proportion to
    them."""
    alone = measured.replicas == 1
    rows: NDArray[np.bool_] = alone if alone.any() else np.ones_like(alone)
    compute, m = (measured.step_s - measured.sync_s)[rows], measured.atomic_batch[rows]
    if len(np.unique(m)) > 1:
        beta, alpha = np.polyfit(m, compute, 1)
    else:
        alpha, beta = compute.mean() / 2, compute.mean() / 2 / m[0]
    # A line through noise can fall or begin below 0, but times must be positive.
    times = [max(alpha, 0.1 * compute.min()), max(beta, 0.01 * compute.min() / m.max())]
    sync = _PLAUSIBLE_SYNC * np.median(measured.step_s[rows])
    return np.concatenate([np.log(times), np.log(sync), [logit((GAMMA - 1) / (GAMMA_MAX - 1)), np.arctanh(GROWTH)]])


def to_theta(params: ThroughputParams, plausible: FloatArray) -> FloatArray:
    """The theta of `params`. A time of 0, which was never measured, becomes the plausible one."""
    times = np.array([params.alpha_c, params.beta_c, params.alpha_r, params.beta_r, params.alpha_n, params.beta_n])
    with np.errstate(divide="ignore"):
        logs = np.where(times > 0, np.log(times), plausible[:6])
    unit = np.clip((params.gamma - 1) / (GAMMA_MAX - 1), 1e-3, 1 - 1e-3)
    return np.concatenate([logs, [logit(unit), np.arctanh(np.clip(params.growth, -0.99, 0.99))]])


def _to_params(theta: FloatArray, measured: Measured) -> ThroughputParams | None:
    """The parameters at theta, with what was not measured filled in; None if one is out of its range."""
    alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n = (float(time) for time in np.exp(theta[:6]))
    N, K = measured.nodes, measured.replicas
    within, across = (N == 1) & (K > 1), N > 1
    alpha_r, beta_r = alpha_r if within.any() else 0.0, beta_r if (within & (K > 2)).any() else 0.0
    if not (across & (K > 2)).any():
        beta_n = SLOWER_ACROSS * beta_r
    if not across.any():
        alpha_n = SLOWER_ACROSS * alpha_r
    gamma, growth = 1 + (GAMMA_MAX - 1) * float(expit(theta[6])), float(np.tanh(theta[7]))
    try:
        return ThroughputParams(alpha_c, beta_c, alpha_r, beta_r, alpha_n, beta_n, gamma, growth)
    except ValueError:
        return None
