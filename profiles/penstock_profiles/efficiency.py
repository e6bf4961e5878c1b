"""Statistical efficiency: how much progress a sample brings in a large batch, relative to the initial batch size.

Large batches average out the gradient's noise. That helps while the noise hides the true gradient (`grad_var` much
larger than `grad_sqr`), and is wasted once it does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from penstock_profiles.throughput import FloatArray


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
