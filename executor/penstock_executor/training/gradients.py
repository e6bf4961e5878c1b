"""Measures how noisy the gradients are, from the gradients that an optimiser step computes anyway.

With several replicas, each replica's own gradient is recorded just before it is averaged, one parameter at a time, and
the mean afterwards: two norms. One replica that accumulates compares its micro-steps. One replica that does not
accumulate, or a sharded model, compares a step with the step before. `penstock_profiles.noise` has the formulas.

With an optimiser of Adam's kind, gradients are first divided as Adam does it, by its state from before the step
(`preconditioning`).

Each norm reads all gradients once. On a CPU that takes a good part of the time of the optimiser's step. If it would
take more than `SHARE` of the time, only every n-th step is measured (`measure_every`). A step that is not measured runs
nothing but DDP's own code. That is why this module uses no DDP communication hook: DDP keeps a hook once it has one,
and then each bucket of each step costs a switch to Python and a division by the number of replicas that DDP otherwise
does while it copies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock_executor.training.batches import Part
from penstock_executor.training.host_copies import OnItsWay
from penstock_executor.training.preconditioning import Preconditioner, local, split

log = logging.getLogger(__name__)

SHARE = 0.002
"""Share of the training time that measuring may take once there is an estimate."""

CHUNK = 8 * 2**20
"""Values of a gradient that are looked at together, unless one parameter has more."""

MOST_SPANS = 64
"""Pieces of the GPU's work whose times are not added up yet."""

LONGEST_INTERVAL = 20
"""The most steps from one measurement to the next: gradients change as training goes on."""

FIRST_SHARE = 0.04
"""Share of the training time that measuring may take until there is an estimate."""

FIRST_INTERVAL = 4
"""The most steps from one measurement to the next until there is an estimate: without it, the batch cannot be chosen."""


@dataclass(frozen=True, slots=True)
class Norms:
    """One process's share of a step's `penstock_profiles.noise.Moments`. The sum over all processes is the moments."""

    local_sqr: torch.Tensor
    mean_sqr: torch.Tensor
    count: int
    consecutive: bool


class PendingNorms:
    """A step's `Norms` on their way to the host."""

    def __init__(self, norms: Norms, step_samples: int) -> None:
        self.count, self.consecutive, self.step_samples = norms.count, norms.consecutive, step_samples
        self._pair = OnItsWay(torch.stack([norms.local_sqr, norms.mean_sqr]))

    def read(self) -> torch.Tensor:
        """The local and the mean squared norm, shape (2,), on the host."""
        return self._pair.read()


class SyncTimer:
    """Measures how long this process had all its own gradients and only waited for those of other processes.

    On a GPU, by the GPU's own clock.
    """

    def __init__(self) -> None:
        self._began: Any = None
        self._ended: Any = None

    def begin(self, *, cuda: bool) -> None:
        """This process has computed the last of its own gradients."""
        self._began, self._ended = _mark(cuda=cuda), None

    def end(self) -> None:
        """The backward pass is over. A later step that was not measured does not change the result of one that was."""
        if self._began is not None and self._ended is None:
            self._ended = _mark(cuda=not isinstance(self._began, float))

    def take_s(self) -> float | None:
        """The seconds, once; None while they are not known."""
        began, ended = self._began, self._ended
        if ended is None or not (isinstance(ended, float) or ended.query()):
            return None
        self._began = self._ended = None
        seconds = ended - began if isinstance(ended, float) else began.elapsed_time(ended) / 1000
        return max(float(seconds), 0.0)


class Stopwatch:
    """Adds up how long parts of a step take: by the GPU's clock what it computes, and the rest by the process's."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans: deque[tuple[Any, Any]] = deque()
        """Beginnings and ends of what the GPU may not have done yet."""

    @contextlib.contextmanager
    def running(self, *, cuda: bool = False) -> Iterator[None]:
        """Count the time of a block. `cuda`: the block is work for the GPU, which may do it later."""
        began = _mark(cuda=cuda)
        yield
        ended = _mark(cuda=cuda)
        if not cuda:
            self._seconds += ended - began
            return
        self._spans.append((began, ended))
        if len(self._spans) > MOST_SPANS:  # only one process takes the time
            self._collect()

    def take_s(self) -> float | None:
        """The seconds since they were last taken; None while the GPU has not done all of it."""
        self._collect()
        if self._spans:
            return None
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _collect(self) -> None:
        """Add up what the GPU has done."""
        while self._spans and self._spans[0][1].query():
            began, ended = self._spans.popleft()
            self._seconds += began.elapsed_time(ended) / 1000


def _mark(*, cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure_every(measuring_s: float, step_s: float, *, settled: bool) -> int:
    """Steps from one measurement to the next.

    Args:
        measuring_s: what a measurement takes, in seconds.
        step_s: what a step takes.
        settled: whether there is an estimate, which only has to follow the training.
    """
    share, longest = (SHARE, LONGEST_INTERVAL) if settled else (FIRST_SHARE, FIRST_INTERVAL)
    return min(max(math.ceil(measuring_s / (share * step_s)), 1), longest)


class GradientMeter:
    """Measures steps' gradients.

    Args:
        parameters: of the model.
        optimizer: of the parameters, for Adam's state.
        replicas: number of replicas of the model, whose gradients are averaged.
        averaged: whether there are several replicas, each with whole gradients before they are averaged. If not, each
            process has a part of the mean.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        replicas: int,
        *,
        averaged: bool = False,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._preconditioner = Preconditioner(self._parameters, optimizer)
        self._replicas, self._averaged = replicas, averaged
        self._own_norms: list[torch.Tensor] = []
        """Norms of this replica's own gradient in this step, one for each parameter."""
        self._local_sqr: Any = 0.0
        """Sum of squared norms over the micro-steps of one replica."""
        self._awaited = 0
        """How many of these there will be."""
        self._parts_of_step = 0
        """Micro-steps of this step whose gradient has been kept."""
        self._previous: tuple[int, torch.Tensor] | None = None
        """The step before, whose gradient is kept: its samples, and the gradient's squared norm."""
        self._kept: torch.Tensor | None = None
        """Memory for one gradient, flat. Allocating it for each step costs more than the computing in it."""
        self._kept_sqr: Any = 0.0
        """Its squared norm."""
        self._chunks: list[tuple[int, int, list[torch.nn.Parameter]]] = []
        """Parts of it: where each begins and ends, and its parameters."""
        self.sync = SyncTimer()
        self.cost = Stopwatch()
        """Time spent on measuring since it was last taken."""
        self.every = 1
        """Steps from one measurement to the next."""
        self.measured = 0
        """Number of measurements since this was set to 0; a pair of steps counts once."""
        self._on = self._first = True
        self._gave_up = False
        """Whether measuring has failed, such as on sparse gradients. No norms count from then on, on any process."""

    def begin(self, step: int) -> None:
        """Decide whether to measure a step, before its first backward pass."""
        into = step % self.every
        self._first = into == 0
        # With one gradient a step, two neighbouring steps make a pair.
        self._on = into == 0 or (into == 1 and self._previous is not None)
        if not self._on:
            self._previous = None
        elif not self._gave_up:
            with self.cost.running(cuda=self._cuda), self._harmless():
                if self._preconditioner.refresh(step):
                    self._previous = None  # in another unit
        self._local_sqr, self._parts_of_step = 0.0, 0
        self._own_norms.clear()

    @contextlib.contextmanager
    def before_average(self) -> Iterator[None]:
        """Around a step's last backward pass: record each of this replica's own gradients just before DDP averages it.

        PyTorch runs these hooks when a gradient is complete, and DDP's own hooks after them.
        """
        if not (self._on and self._averaged) or self._gave_up:
            yield
            return
        with self.cost.running():
            trained = [each for each in self._parameters if each.requires_grad]
            handles = [each.register_post_accumulate_grad_hook(self._record) for each in trained]
            self._awaited = len(handles)
        try:
            yield
        finally:
            with self.cost.running():
                for handle in handles:
                    handle.remove()

    def record_own_gradients(self) -> None:
        """Record all of this replica's own gradients at once, before something other than DDP averages them."""
        if self._on and self._averaged and not self._gave_up:
            with self.cost.running(cuda=self._cuda), self._harmless():
                self._own_norms.extend(torch._foreach_norm(self._gradients()))

    def _record(self, parameter: torch.Tensor) -> None:
        # Launching a kernel takes longer than the kernel.
        with self.cost.running(), self._harmless():
            gradient = parameter.grad
            assert gradient is not None
            factor = self._preconditioner.factors.get(parameter)
            self._own_norms.append(torch.linalg.vector_norm(gradient if factor is None else gradient * factor))
            if len(self._own_norms) == self._awaited:
                self.sync.begin(cuda=gradient.is_cuda)

    def after_micro_step(self, part: Part) -> None:
        """After each backward pass but the step's last. Only a single replica that accumulates needs it."""
        if not self._on or self._replicas > 1 or self._gave_up or not self._ready():
            return
        with self.cost.running(cuda=self._cuda), self._harmless():
            _, own = self._keep(kept_scale=1.0 if self._parts_of_step else 0.0)
            self._parts_of_step += 1
            self._local_sqr = self._local_sqr + own / part.weight**2

    def after_step(self, part: Part, loss_scale: float) -> Norms | None:
        """After the step's last backward pass, before the optimiser moves; None if the step yields no norms.

        Args:
            part: the last part of the step.
            loss_scale: of mixed precision. The gradients no longer contain it, but the recorded ones did.
        """
        if not self._on or not (self._gave_up or self._ready()):
            return None
        norms = None
        if not self._gave_up:
            with self.cost.running(cuda=self._cuda), self._harmless():
                norms = self._norms(part, loss_scale)
        self.measured += self._first
        return self._void(part) if self._gave_up else norms

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """An error in the block, whatever it is, ends the measuring and not the training."""
        try:
            yield
        except Exception as error:
            self._gave_up = True
            self._kept, self._chunks, self._own_norms = None, [], []
            log.warning(
                "the noise of the gradients is not measured any more, so the batch stays as it is: %s: %s",
                type(error).__name__,
                error,
            )

    def _void(self, part: Part) -> Norms | None:
        """In place of the norms that the other processes have measured: the sum over all is void, too."""
        previous, self._previous = self._previous, None
        if self._averaged or (part.micro_steps > 1 and self._replicas == 1):
            measured = part.even
        else:
            self._previous = part.step_samples, torch.tensor(0.0)
            measured = previous is not None and previous[0] == part.step_samples
        void = torch.tensor(math.nan, dtype=torch.float64)
        return Norms(void, void, max(self._replicas, 2), consecutive=False) if measured else None

    def _norms(self, part: Part, loss_scale: float) -> Norms | None:
        if self._averaged:
            return self._of_replicas(part, loss_scale)
        if part.micro_steps > 1 and self._replicas == 1:
            return self._of_micro_steps(part, loss_scale)
        return self._of_pair(part)

    def _of_replicas(self, part: Part, loss_scale: float) -> Norms | None:
        if not part.even or not self._own_norms:
            return None
        # Gradients are not clipped yet.
        replicas = self._replicas
        local_sqr, mean_sqr = _sum_of_squares(self._own_norms) / loss_scale**2, _squared_norm(self._gradients())
        return Norms(local_sqr / replicas, mean_sqr / replicas, replicas, consecutive=False)

    def _of_micro_steps(self, part: Part, loss_scale: float) -> Norms | None:
        self._previous = None
        if not part.even or not self._parts_of_step:
            return None
        whole, last = self._keep(kept_scale=1 / loss_scale)
        local_sqr = (self._local_sqr / loss_scale**2 + last / part.weight**2) / part.micro_steps
        return Norms(local_sqr, whole, part.micro_steps, consecutive=False)

    def _of_pair(self, part: Part) -> Norms | None:
        previous = self._previous
        now_sqr, apart_sqr = self._keep()
        self._previous = part.step_samples, now_sqr
        if previous is None or previous[0] != part.step_samples:
            return None
        both_sqr = now_sqr + previous[1]
        return Norms(both_sqr / 2, (2 * both_sqr - apart_sqr) / 4, 2, consecutive=True)

    def _gradients(self) -> list[torch.Tensor]:
        """This process's share of the gradients that there are, as the optimiser uses them."""
        found = [p for p in self._parameters if p.grad is not None]
        gradients = [local(p.grad) for p in found]
        factors = self._preconditioner.factors
        return torch._foreach_mul(gradients, [factors[p] for p in found]) if factors and found else gradients

    def _keep(self, kept_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the present gradient in place of the one that is kept, as the optimiser uses it.

        Returns:
            Its squared norm, and that of its difference from `kept_scale` times the one that was kept. Of a parameter
            without a gradient, that is 0.
        """
        if self._kept is None:
            self._kept = torch.zeros(sum(local(each).numel() for each in self._parameters), device=self._device)
            self._chunks = chunks(self._parameters)
        longest = max(end - begin for begin, end, _ in self._chunks)
        flat = torch.empty(longest, device=self._device)
        wholes, products = [], []
        for begin, end, parameters in self._chunks:
            now, kept = flat[: end - begin], self._kept[begin:end]
            pairs = list(zip(split(now, parameters), parameters, strict=True))
            found = [(view, local(p.grad)) for view, p in pairs if p.grad is not None]
            if found:
                torch._foreach_copy_([view for view, _ in found], [gradient for _, gradient in found])
            for view in (view for view, p in pairs if p.grad is None):
                view.zero_()
            if self._preconditioner.flat is not None:
                now.mul_(self._preconditioner.flat[begin:end])
            wholes.append(torch.dot(now, now))
            if kept_scale:
                products.append(torch.dot(now, kept))
            kept.copy_(now)
        whole = torch.stack(wholes).double().sum()
        # |a - s b|^2 by way of a b: computing a - s b would read and write the memory of b twice more.
        apart = whole
        if kept_scale:
            product = torch.stack(products).double().sum()
            apart = (whole + kept_scale**2 * self._kept_sqr - 2 * kept_scale * product).clamp(min=0.0)
        self._kept_sqr = whole
        return whole, apart

    @property
    def _device(self) -> torch.device:
        return local(self._parameters[0]).device

    @property
    def _cuda(self) -> bool:
        return bool(self._device.type == "cuda")

    def _ready(self) -> bool:
        """Whether what the optimiser multiplies gradients by is known."""
        return self._preconditioner.plain or bool(self._preconditioner.factors)


def chunks(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[int, int, list[torch.nn.Parameter]]]:
    """Parameters in groups of at most `CHUNK` values, or of one parameter: where each group begins and ends among all
    values, and its parameters."""
    found: list[tuple[int, int, list[torch.nn.Parameter]]] = []
    end = 0
    for each in parameters:
        begin, end = end, end + local(each).numel()
        if found and end - found[-1][0] <= CHUNK:
            found[-1] = found[-1][0], end, [*found[-1][2], each]
        else:
            found.append((begin, end, [each]))
    return found


def _squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return _sum_of_squares(torch._foreach_norm(list(tensors)))


def _sum_of_squares(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(list(norms)).double().square().sum()
