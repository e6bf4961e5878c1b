"""Rules that fit the learning rate to the batch size: what to multiply it with when the batch is S times the initial
one.

Every rule is a `Rule`, in `RULES` by name, and is 1 at the initial batch size. None of them changes what counts as
progress: that is the sum of AdaScale's gains over the steps, whichever rule is in use, and a learning rate schedule is
looked up at that sum instead of at the count of steps (AdaScale, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType

from penstock_profiles.efficiency import gain
from penstock_profiles.noise import GradientNoise

Rule = Callable[[float, GradientNoise | None], float]
"""(scale S = batch / initial batch, at least 1; the noise as known, None if not) -> factor on the learning rate."""


def adascale(scale: float, noise: GradientNoise | None) -> float:
    """AdaScale's factor, for SGD: the gain r in [1, S], so that one step moves as far as r steps at the initial batch.

    S where noise drowns the gradient, 1 where there is none (Johnson et al. 2020, equation 4; `efficiency.gain`). With
    parameter groups, each has the factor of its own noise. With noise None, 1: too small a step is the safe mistake.

    Raises:
        ValueError: `scale` is below 1 or not finite.
    """
    scale = _scale(scale)
    return 1.0 if noise is None else float(gain(noise.grad_sqr, noise.grad_var, scale, 1.0))


def linear(scale: float, noise: GradientNoise | None = None) -> float:
    """S: as AdaScale without any true gradient, so right while S is far below var / sqr (Goyal et al. 2017).

    Raises:
        ValueError: as `adascale`.
    """
    return _scale(scale)


def square_root(scale: float, noise: GradientNoise | None = None) -> float:
    """sqrt(S): for Adam-like optimisers, whose steps are about as long whatever the gradient's norm.

    Per sample, steps then add the same variance at any batch size (Krizhevsky 2014). Pollux's AdamW and Adam jobs use
    it.

    Raises:
        ValueError: as `adascale`.
    """
    return math.sqrt(_scale(scale))


RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {"adascale": adascale, "linear": linear, "square_root": square_root}
)
"""By the name that a job's settings use."""


def _scale(scale: float) -> float:
    if not 1 <= scale < math.inf:
        raise ValueError(f"scale={scale!r} is not a finite number of at least 1; no batch is below the initial one")
    return float(scale)
