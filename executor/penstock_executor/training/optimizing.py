"""The optimiser's step at a batch size other than the initial one: learning rate, loss scale, schedule and progress."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from penstock_profiles.learning_rate import Rule
from penstock_profiles.noise import GradientNoise, NoiseEstimator
from penstock_profiles.throughput import gain


def steps_worth(noise: GradientNoise | None, scale: float) -> float:
    """How many steps at the initial batch size one step at `scale` times that size is worth: AdaScale's gain.

    `scale` itself if the noise is unknown.
    """
    return scale if noise is None else float(gain(noise.grad_sqr, noise.grad_var, scale, 1.0))


class OptimizerStep:
    """Moves the parameters, and computes the progress of each step.

    Args:
        optimizer: the script's.
        rule: for the learning rate, by the batch size.
        noise: the estimate of the gradients' noise.
        initial_batch: total batch that the script was written for, in samples.
        scheduler: of the learning rate, or None.
        scaler: a `torch.amp.GradScaler`, or None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        noise: NoiseEstimator,
        initial_batch: int,
        scheduler: Any,
        scaler: Any,
    ) -> None:
        self._optimizer, self._rule, self._noise, self._initial = optimizer, rule, noise, initial_batch
        self._scheduler, self._scaler = scheduler, scaler
        self._by_progress = scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau)
        """The script steps `ReduceLROnPlateau` itself: only the script has the metric."""
        self.scheduled = 0
        """Steps that the scheduler has made, over all runs."""

    def scaled(self, loss: torch.Tensor) -> Any:
        """The loss to run the backward pass on."""
        return self._scaler.scale(loss) if self._scaler is not None else loss

    def unscale(self) -> float:
        """Take the loss scale out of the gradients; the scale that they had."""
        if self._scaler is None:
            return 1.0
        loss_scale = float(self._scaler.get_scale())
        self._scaler.unscale_(self._optimizer)
        return loss_scale

    def step(self, samples: int) -> float:
        """One optimiser step on `samples` samples, with the learning rate for that batch.

        Returns:
            The progress made, in samples of the initial batch size. 0 if gradients overflowed, as in mixed precision.
        """
        scale = max(samples / self._initial, 1.0)
        noise = self._noise.noise if scale > 1 else None
        factor = self._rule(scale, noise) if scale > 1 else 1.0
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        moved = self._move()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return min(samples, self._initial) * steps_worth(noise, scale) if moved else 0.0

    def follow_schedule(self, progress: float) -> None:
        """Step the scheduler as often as a training at the initial batch size would have by `progress`."""
        if self._by_progress:
            # A large step may go beyond the end of OneCycleLR: its rate rises again there, and then it raises.
            end = getattr(self._scheduler, "total_steps", math.inf) - 1
            while self.scheduled < min(int(progress / self._initial + 1e-9), end):
                self._scheduler.step()
                self.scheduled += 1

    def _move(self) -> bool:
        if self._scaler is None:
            self._optimizer.step()
            return True
        loss_scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= loss_scale)  # a lower scale: gradients overflowed, the step was skipped
