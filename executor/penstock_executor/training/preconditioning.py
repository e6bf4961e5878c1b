"""What an optimiser of Adam's kind multiplies a gradient by, besides the learning rate: 1 / (sqrt(v) + eps).

The gradients' noise must be that of the optimiser's steps (`penstock_profiles.noise.adam_preconditioner`). Three things
keep single coordinates from drowning it:

- A coordinate that has had no gradient yet has v = 0, such as the row of an embedding whose token was not drawn so far.
  1 / eps is 10^8, and its square more than all other coordinates together. Such a coordinate is left out: what Adam will
  do with it is not known yet.
- v is at least `FLOOR` times its mean over the parameter's coordinates that have had a gradient.
- A parameter is left out in its first `WARM_UP_STEPS` steps: v is the mean of as many squares, and one over it means
  nothing while they are few.

The factors are computed anew every `REFRESH_STEPS` steps only, because Adam's v changes as slowly, and computing them
costs more than measuring with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FLOOR = 1e-3
"""The smallest v, as a share of the parameter's mean v."""

WARM_UP_STEPS = 32
"""Steps until a parameter counts. With n independent squares, the mean of 1 / v is too large by a factor n / (n - 2)."""

REFRESH_STEPS = 50


class Preconditioner:
    """The factors for all parameters; 1 for an optimiser that is not of Adam's kind.

    Args:
        parameters: those that are trained.
        optimizer: of these parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"] if "betas" in group}
        self.flat: torch.Tensor | None = None
        """The factors of all parameters in one vector; None while `factors` is empty."""
        self._refreshed = 0
        self.factors: dict[torch.Tensor, torch.Tensor] = {}
        """This process's share of each parameter's factor, of its shape; empty while all are 1 or unknown."""

    @property
    def plain(self) -> bool:
        """Whether all factors are 1."""
        return not self._groups

    def refresh(self, step: int) -> bool:
        """Compute the factors if it is time to; whether they have changed.

        Args:
            step: number of the coming optimiser step.
        """
        if self.plain or (self.factors and 0 <= step - self._refreshed < REFRESH_STEPS):
            return False
        found = [self._factor(*each) for each in zip(self._parameters, self._steps(), strict=True)]
        if all(each is None for each in found):
            return False  # every parameter is in its first steps
        if self.flat is None:
            first = local(self._parameters[0])
            self.flat = torch.empty(sum(local(p).numel() for p in self._parameters), device=first.device)
        views = split(self.flat, self._parameters)
        for view, factor in zip(views, found, strict=True):
            view.zero_() if factor is None else view.copy_(factor)
        self.factors = dict(zip(self._parameters, views, strict=True))
        self._refreshed = step
        return True

    def _steps(self) -> list[float]:
        """Steps that Adam has made with each parameter. A fused Adam keeps them on the GPU, so they are read together:
        each reading waits for all that the GPU has to do."""
        found = [self._optimizer.state.get(each, {}).get("step", 0.0) for each in self._parameters]
        there = [each for each in found if torch.is_tensor(each) and each.is_cuda]
        read = iter(torch.stack(there).tolist() if there else ())
        return [next(read) if torch.is_tensor(each) and each.is_cuda else float(each) for each in found]

    def _factor(self, parameter: torch.nn.Parameter, steps: float) -> torch.Tensor | None:
        group = self._groups.get(parameter)
        if group is None:
            return torch.ones_like(local(parameter))
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if "exp_avg_sq" not in state or steps < WARM_UP_STEPS:
            return None
        squares = local(state["exp_avg_sq"]).float() / (1 - group["betas"][1] ** steps)
        seen = squares > 0
        floor = FLOOR * squares.sum() / seen.sum().clamp(min=1)
        return seen / (torch.maximum(squares, floor).sqrt_().add_(group["eps"]))


def local(tensor: Any) -> torch.Tensor:
    """This process's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def split(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Views into `flat`, one of each parameter's shape."""
    sizes = [local(each).numel() for each in parameters]
    return [part.view(local(p).shape) for part, p in zip(flat.split(sizes), parameters, strict=True)]
