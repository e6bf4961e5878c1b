"""What an optimiser step says about the noise of the gradients, taken from the gradients that are there anyway.

Data parallel: each replica's own gradient is seen just before it is averaged, a bucket at a time, and the mean afterwards: two
norms. One replica that accumulates compares its micro-steps; one that does not, or a sharded model, compares a step with the one
before. `penstock_profiles.noise` has the formulas.

With an optimiser of Adam's kind, gradients are first divided as Adam does it, by its state from before the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from penstock_executor.training.batches import Part


@dataclass(frozen=True, slots=True)
class Norms:
    """One process's share of a step's `penstock_profiles.noise.Moments`; added up over the processes, they are those."""

    local_sqr: torch.Tensor
    mean_sqr: torch.Tensor
    count: int
    consecutive: bool


class GradientMeter:
    """Measures each step's gradients.

    Args:
        parameters: the model's.
        optimizer: for Adam's state.
        replicas: processes that average their gradients.
        sharded: each process holds a shard of each parameter (FSDP).
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        replicas: int,
        *,
        sharded: bool,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = optimizer
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"] if "betas" in group}
        self._replicas = replicas
        self._hooked = replicas > 1 and not sharded
        self._local_sqr: Any = 0.0
        self._sum: torch.Tensor | None = None
        """One replica's gradient so far in this step, flat."""
        self._previous: tuple[torch.Tensor, int] | None = None
        """The step before: its gradient, flat, and its samples."""
        self.sync_began_s = 0.0
        """When this process had all its gradients and only waited for the others', by `time.perf_counter`."""

    def register(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """See each replica's gradients before DDP averages them."""
        # A lambda: DDP looks at a hook's annotations, and takes these, being strings, for wrong.
        model.register_comm_hook(self, lambda meter, bucket: _before_average(meter, bucket))

    def before_average(self, bucket: Any) -> None:
        """Called by DDP with each bucket of this replica's own gradients."""
        if self._groups:
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._local_sqr = self._local_sqr + _squared_norm([self._scaled(p, grad) for p, grad in pairs])
        else:
            self._local_sqr = self._local_sqr + _squared_norm([bucket.buffer()])
        if bucket.is_last():
            self.sync_began_s = time.perf_counter()

    def after_micro_step(self, part: Part) -> None:
        """After each backward pass but the step's last; matters where one replica accumulates."""
        if self._replicas > 1 or not self._ready():
            return
        before, self._sum = self._sum, self._flatten()
        own = self._sum if before is None else self._sum - before
        self._local_sqr = self._local_sqr + _squared_norm([own]) / part.weight**2

    def after_step(self, part: Part, loss_scale: float) -> Norms | None:
        """After the step's last backward pass, before the optimiser; None if the step says nothing.

        Args:
            part: the last.
            loss_scale: of mixed precision. Gradients are without it by now, but those that `before_average` saw had it.
        """
        local_sqr, self._local_sqr = self._local_sqr, 0.0
        if not self._ready():
            return None
        if self._hooked:
            if not part.even:
                return None
            mean_sqr = _squared_norm([self._scaled(p, p.grad) for p in self._parameters if p.grad is not None])
            return Norms(
                local_sqr / loss_scale**2 / self._replicas, mean_sqr / self._replicas, self._replicas, consecutive=False
            )
        if part.micro_steps > 1 and self._replicas == 1:
            return self._of_micro_steps(part, local_sqr, loss_scale)
        return self._of_pair(part)

    def _of_micro_steps(self, part: Part, local_sqr: Any, loss_scale: float) -> Norms | None:
        before, self._sum, self._previous = self._sum, None, None
        if not part.even or before is None:
            return None
        whole = self._flatten()
        last_sqr = _squared_norm([whole - before / loss_scale]) / part.weight**2
        local_sqr = (local_sqr / loss_scale**2 + last_sqr) / part.micro_steps
        return Norms(local_sqr, _squared_norm([whole]), part.micro_steps, consecutive=False)

    def _of_pair(self, part: Part) -> Norms | None:
        previous, now = self._previous, self._flatten()
        self._previous = now, part.step_samples
        if previous is None or previous[1] != part.step_samples:
            return None
        pair = (now, now), (previous[0], previous[0]), (now, previous[0])
        now_sqr, before_sqr, product = (torch.dot(a, b).double() for a, b in pair)
        return Norms((now_sqr + before_sqr) / 2, (now_sqr + before_sqr + 2 * product) / 4, 2, consecutive=True)

    def _flatten(self) -> torch.Tensor:
        gradients = [_local(self._scaled(p, p.grad)).reshape(-1) for p in self._parameters if p.grad is not None]
        return torch.cat(gradients).float()

    def _ready(self) -> bool:
        """Adam's state is there, once it has made a step."""
        return not self._groups or any("exp_avg_sq" in self._optimizer.state[p] for p in self._groups)

    def _scaled(self, parameter: torch.nn.Parameter, gradient: Any) -> torch.Tensor:
        group = self._groups.get(parameter)
        state = self._optimizer.state.get(parameter, {}) if group is not None else {}
        if group is None or "exp_avg_sq" not in state:
            return gradient
        correction = 1 - group["betas"][1] ** float(state["step"])
        return gradient / ((state["exp_avg_sq"] / correction).sqrt_().add_(group["eps"]))


def _before_average(meter: GradientMeter, bucket: Any) -> Any:
    meter.before_average(bucket)
    return allreduce_hook(None, bucket)


def _squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(list(tensors)) if len(tensors) > 1 else [torch.linalg.vector_norm(tensors[0])]
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _local(tensor: Any) -> torch.Tensor:
    """This process's shard of a DTensor; a plain tensor is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
