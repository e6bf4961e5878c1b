"""What an optimiser step says about the noise of the gradients, taken from the gradients that are there anyway.

Data parallel: each replica's own gradient is seen just before it is averaged, a bucket at a time, and the mean afterwards: two
norms. One replica that accumulates compares its micro-steps; one that does not, or a sharded model, compares a step with the one
before. `penstock_profiles.noise` has the formulas.

With an optimiser of Adam's kind, gradients are first divided as Adam does it, by its state from before the step.

Each norm reads all gradients once, which on a processor takes as long as a good part of the optimiser's step. So where that is
more than `SHARE` of the time, only every n-th step is measured (`pace`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock_executor.training.batches import Part

SHARE = 0.01
"""Of the time of training that measuring may take, once there is an estimate."""

MOST_APART = 10
"""At least every so many steps one is measured: gradients change as training goes on."""


@dataclass(frozen=True, slots=True)
class Norms:
    """One process's share of a step's `penstock_profiles.noise.Moments`; added up over the processes, they are those."""

    local_sqr: torch.Tensor
    mean_sqr: torch.Tensor
    count: int
    consecutive: bool


class Landing:
    """A step's `Norms` on their way to the host: who reads them a step later waits for no GPU."""

    def __init__(self, norms: Norms, step_samples: int) -> None:
        self.count, self.consecutive, self.step_samples = norms.count, norms.consecutive, step_samples
        pair = torch.stack([norms.local_sqr, norms.mean_sqr])
        self._event: Any = None
        self._pair = pair
        if pair.is_cuda:
            self._pair = torch.empty(2, dtype=pair.dtype, pin_memory=True)
            self._pair.copy_(pair, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> torch.Tensor:
        """The local and the mean squared norm, shape (2,), on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._pair


class SyncTimer:
    """How long this process had all its own gradients and only waited for the others'. On a GPU, by the GPU's own clock."""

    def __init__(self) -> None:
        self._began: Any = None
        self._ended: Any = None

    def begin(self, *, cuda: bool) -> None:
        """The last of this process's own gradients is there."""
        self._began, self._ended = _mark(cuda=cuda), None

    def end(self) -> None:
        """The backward pass is over."""
        if self._began is not None:
            self._ended = _mark(cuda=not isinstance(self._began, float))

    def take_s(self) -> float | None:
        """Seconds, once; None while they are not known."""
        began, ended = self._began, self._ended
        if ended is None or not (isinstance(ended, float) or ended.query()):
            return None
        self._began = self._ended = None
        seconds = ended - began if isinstance(ended, float) else began.elapsed_time(ended) / 1000
        return max(float(seconds), 0.0)


def _mark(*, cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def pace(measuring_s: float, step_s: float) -> int:
    """Every how many steps one may be measured, if that takes `measuring_s` of a step of `step_s` seconds."""
    return min(max(math.ceil(measuring_s / (SHARE * step_s)), 1), MOST_APART)


class GradientMeter:
    """Measures steps' gradients.

    Args:
        parameters: the model's.
        optimizer: for Adam's state.
        replicas: processes that average their gradients.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer, replicas: int
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = optimizer
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"] if "betas" in group}
        self._replicas = replicas
        self._hooked = False
        self._local_sqr: Any = 0.0
        self._buckets: list[torch.Tensor] = []
        """What DDP averages in, of this step."""
        self._sum: torch.Tensor | None = None
        """One replica's gradient so far in this step, flat."""
        self._previous: tuple[torch.Tensor, int] | None = None
        """The step before: its gradient, flat, and its samples."""
        self._flat: list[torch.Tensor] = []
        """Memory for two flat gradients, used in turns: fetched anew for each step, it costs more than what is done in it."""
        self.sync = SyncTimer()
        self.every = 1
        """Every how many steps one is measured."""
        self.seconds = 0.0
        """Spent on the steps measured since this was set to 0, by this process's clock."""
        self.measured = 0
        """Steps since `seconds` was set to 0 that were measured."""
        self._on = True

    def register(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """See each replica's gradients before DDP averages them; from now on their sum over the replicas is what DDP makes."""
        # A lambda: DDP looks at a hook's annotations, and takes these, being strings, for wrong.
        model.register_comm_hook(self, lambda meter, bucket: _add_up(meter, bucket))
        self._hooked = True

    @property
    def share(self) -> float:
        """What a replica's loss is to be multiplied with, for gradients that are the mean: DDP itself divides only unhooked."""
        return 1 / self._replicas if self._hooked else 1.0

    def begin(self, step: int) -> None:
        """Before an optimiser step's first backward pass: whether it is measured."""
        into = step % self.every
        # Of one gradient a step, two neighbours make a pair.
        self._on = into == 0 or (into == 1 and self._previous is not None)
        if not self._on:
            self._previous = None
        self._local_sqr, self._sum = 0.0, None
        self._buckets.clear()

    def before_average(self, bucket: Any) -> None:
        """Called by DDP with each bucket of this replica's own gradients."""
        if self._on:
            began_s = time.perf_counter()
            buffer = bucket.buffer()
            self._buckets.append(buffer)
            if self._groups:
                pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
                local_sqr = _squared_norm([self._scaled(p, grad) for p, grad in pairs])
            else:
                local_sqr = _squared_norm([buffer])
            self._local_sqr = self._local_sqr + local_sqr * self._replicas**2
            self.seconds += time.perf_counter() - began_s
        if bucket.is_last():
            self.sync.begin(cuda=bucket.buffer().is_cuda)

    def after_micro_step(self, part: Part) -> None:
        """After each backward pass but the step's last; matters where one replica accumulates."""
        if not self._on or self._replicas > 1 or not self._ready():
            return
        began_s = time.perf_counter()
        before, self._sum = self._sum, self._flatten()
        own = self._sum if before is None else before.neg_().add_(self._sum)
        self._local_sqr = self._local_sqr + _squared_norm([own]) / part.weight**2
        self.seconds += time.perf_counter() - began_s

    def after_step(self, part: Part, loss_scale: float) -> Norms | None:
        """After the step's last backward pass, before the optimiser; None if the step says nothing.

        Args:
            part: the last.
            loss_scale: of mixed precision. Gradients are without it by now, but those that `before_average` saw had it.
        """
        if not self._on or not self._ready():
            return None
        began_s = time.perf_counter()
        norms = self._norms(part, loss_scale)
        self.seconds += time.perf_counter() - began_s
        self.measured += 1
        return norms

    def _norms(self, part: Part, loss_scale: float) -> Norms | None:
        if self._hooked:
            return self._of_replicas(part, loss_scale)
        if part.micro_steps > 1 and self._replicas == 1:
            return self._of_micro_steps(part, loss_scale)
        return self._of_pair(part)

    def _of_replicas(self, part: Part, loss_scale: float) -> Norms | None:
        if not part.even or not self._buckets:
            return None
        # Gradients are views of the buckets: unscaled with them, and not clipped yet.
        gradients = (
            [self._scaled(p, p.grad) for p in self._parameters if p.grad is not None] if self._groups else self._buckets
        )
        mean_sqr = _squared_norm(gradients)
        replicas = self._replicas
        return Norms(self._local_sqr / loss_scale**2 / replicas, mean_sqr / replicas, replicas, consecutive=False)

    def _of_micro_steps(self, part: Part, loss_scale: float) -> Norms | None:
        before, self._previous = self._sum, None
        if not part.even or before is None:
            return None
        whole = self._flatten()
        last = before.mul_(-1 / loss_scale).add_(whole)
        local_sqr = (self._local_sqr / loss_scale**2 + _squared_norm([last]) / part.weight**2) / part.micro_steps
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
        size = sum(map(len, gradients))
        if not self._flat or len(self._flat[0]) != size:
            self._flat = [torch.empty(size, device=gradients[0].device) for _ in range(2)]
        self._flat.reverse()
        return torch.cat(gradients, out=self._flat[0])

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


def _add_up(meter: GradientMeter, bucket: Any) -> Any:
    meter.before_average(bucket)
    # Not `dist.all_reduce`: what that checks takes as long as all else here.
    group = dist.group.WORLD
    assert group is not None
    return group.allreduce([bucket.buffer()]).get_future().then(lambda future: future.value()[0])


def _squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(list(tensors)) if len(tensors) > 1 else [torch.linalg.vector_norm(tensors[0])]
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(list(norms)).double().square().sum()


def _local(tensor: Any) -> torch.Tensor:
    """This process's shard of a DTensor; a plain tensor is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
