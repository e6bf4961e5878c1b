"""Rules that adapt the learning rate to the batch size: a factor for a batch that is S times the initial one.

Every rule is a `Rule`, in `RULES` by name, and returns 1 at the initial batch size. None of them changes what counts as
progress. That is the sum of AdaScale's gains over the steps with any rule, and a learning rate schedule is evaluated at
that sum instead of the number of steps (AdaScale, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType

from penstock_profiles.noise import GradientNoise
from penstock_profiles.throughput import gain

Rule = Callable[[float, GradientNoise | None], float]
"""(scale S = batch / initial batch, at least 1; the noise, None if unknown) -> factor on the learning rate."""


def adascale(scale: float, noise: GradientNoise | None) -> float:
    """AdaScale's factor, for SGD: the gain r in [1, S], so that one step moves as far as r steps at the initial batch.

    It is S if the noise is much larger than the gradient, and 1 if there is none (Johnson et al. 2020, equation 4;
    `efficiency.gain`). With parameter groups, each has the factor of its own noise. If the noise is unknown, it is 1,
    since a step that is too small does no harm.

    Raises:
        ValueError: `scale` is below 1 or not finite.
    """
    scale = _scale(scale)
    return 1.0 if noise is None else float(gain(noise.grad_sqr, noise.grad_var, scale, 1.0))


def linear(scale: float, noise: GradientNoise | None = None) -> float:
    """S: AdaScale's factor without a true gradient, so it is right while S is far below var / sqr (Goyal et al. 2017).

    Raises:
        ValueError: as `adascale`.
    """
    return _scale(scale)


def square_root(scale: float, noise: GradientNoise | None = None) -> float:
    """sqrt(S): for Adam-like optimisers, whose steps have about the same length for any norm of the gradient.

    Steps then add the same variance per sample at any batch size (Krizhevsky 2014). Pollux's AdamW and Adam jobs use
    it.

    Raises:
        ValueError: as `adascale`.
    """
    return math.sqrt(_scale(scale))


RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {"adascale": adascale, "linear": linear, "square_root": square_root}
)
"""The rules by the names that job settings use."""


def _scale(scale: float) -> float:
    if not 1 <= scale < math.inf:
        raise ValueError(f"scale={scale!r} is not a finite number of at least 1; no batch is below the initial one")
    return float(scale)
