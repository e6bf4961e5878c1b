"""The batch of a foreign training loop, chosen by goodput as `TrainingRun` does it.

The loop asks for a batch, computes the gradients, moves its optimiser and counts its steps by itself. Four things are
done around that:

- `LoopLoader` gives each process its share of the next step. Its batches are multiples of the initial one, so whole
  steps of the initial batch say how far an epoch has got. A loop counts in those (`AdaptiveBatch.steps`), and its
  schedule of the learning rate ends where the script's author meant it to.
- The gradients' noise is measured around the backward pass.
- Hooks of the optimiser (`torch.optim.Optimizer.register_step_pre_hook`) scale the learning rate for the one step.
- What was learned goes into the loop's own checkpoints (`state_dict`).

An epoch stays one pass over the data set, because the loops count passes. A step has no micro-steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock_executor.allocation import Allocation
from penstock_executor.environment import read_ranks
from penstock_executor.training import short_of_memory
from penstock_executor.training.arguments import learning_rate_rule
from penstock_executor.training.batches import BatchSize, Part
from penstock_executor.training.consensus import COST_CHECKED_EVERY, Vote
from penstock_executor.training.gradients import GradientMeter, PendingNorms
from penstock_executor.training.loader import Loader, samples_of
from penstock_executor.training.measuring import MIB, Measurements
from penstock_executor.training.processes import Group
from penstock_executor.training.sizes import BatchChooser
from penstock_profiles.noise import NoiseEstimator
from penstock_profiles.wire import Body, Observation

log = logging.getLogger(__name__)


class LoopLoader(Loader):
    """The rest of the present epoch, one batch for each step, for a loop that may fetch batches ahead."""

    def __init__(self, dataset: Any, size: BatchSize, place: tuple[int, int], **named: Any) -> None:
        super().__init__(dataset, size, place, position=0, drop_last=False, **named)
        self.steps = 0
        """Steps of the present epoch that are done, of any size."""
        self._ahead: deque[Part] = deque()
        """Parts that were yielded and not trained on yet."""

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        for batch in self._map():
            self._ahead.append(self._batches.parts.popleft())
            yield batch

    def __len__(self) -> int:
        """Number of batches of the present epoch, at the present batch size from now on."""
        assert self.samples is not None
        dealt = [*self._ahead, *self._batches.parts]
        rest = self.samples - self.position - sum(part.step_samples for part in dealt)
        return self.steps + len(dealt) + self._batches.count(max(rest, 0))

    def take(self) -> Part:
        """The part that the next step trains on."""
        return self._ahead.popleft()

    def step_done(self, part: Part) -> None:
        """The step is over that trained on `part`."""
        self.position += part.step_samples
        self.steps += 1

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this one; from its beginning, unless it is the present one."""
        if epoch != self.epoch:
            self.go_to(epoch, 0, 0)

    def go_to(self, epoch: int, position: int, steps: int) -> None:
        """The next pass is the rest of this epoch.

        Args:
            epoch: from 0.
            position: samples of it that are done.
            steps: steps of it that are done.
        """
        self.epoch, self.position, self.steps = epoch, position, steps
        self._ahead.clear()
        self._batches.parts.clear()


class AdaptiveBatch:
    """Loads a data set in batches that grow while they gain goodput.

    Args:
        dataset: with `__len__` and `__getitem__`.
        batch_size: total batch over all processes that the script and its learning rate were written for.
        max_batch_size: largest total batch that trains well.
        lr_scaling: a name in `penstock_profiles.learning_rate.RULES`. None: `square_root` for optimisers of Adam's kind,
            `adascale` for others.
        shuffle: whether each epoch has another order.
        seed: for the order of samples.
        loader: further arguments of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: the sizes make no sense, or the data set has no length.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        max_batch_size: int,
        *,
        lr_scaling: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        **loader: Any,
    ) -> None:
        if not 1 <= batch_size <= max_batch_size:
            raise ValueError(
                f"batch_size={batch_size}, max_batch_size={max_batch_size}: the first is 1 at least, and at most the second"
            )
        if not hasattr(dataset, "__len__") or samples_of(dataset) is None:
            raise ValueError("an adaptive batch needs a data set with a length: give a stream to run.prepare instead")
        ranks = read_ranks()
        self.initial, self._largest, self._lr_scaling = batch_size, max_batch_size, lr_scaling
        self._replicas = ranks.world
        self.loader = LoopLoader(
            dataset, self._size(batch_size), (ranks.rank, ranks.world), seed=seed, shuffle=shuffle, **loader
        )
        self.steps_per_epoch = -(-len(dataset) // batch_size)
        """At the initial batch size."""
        self._noise = NoiseEstimator()
        self._learned: Mapping[str, Any] | None = None
        self._part: Part | None = None
        self._measured = contextlib.ExitStack()
        self._norms: PendingNorms | None = None
        self._steps = 0
        """Steps of this run."""
        self._wanted = 0
        """Total batch to train with from now on; 0: as before."""
        self._rates: list[Any] = []

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Measure and scale this training. Call it when the loop has made both, before its first step.

        Raises:
            ValueError: each process has only a part of the model.
        """
        if any(hasattr(each, "to_local") for each in model.parameters()):
            raise ValueError(
                "an adaptive batch is for models that each process has whole, not for those of fully_shard"
            )
        meter = GradientMeter(list(model.parameters()), optimizer, self._replicas, averaged=self._replicas > 1)
        self._measurements = Measurements(meter, self._noise, self.initial)
        self._rule = learning_rate_rule(self._lr_scaling, optimizer)
        optimizer.register_step_pre_hook(lambda given, *_: self._scale(given))
        optimizer.register_step_post_hook(lambda given, *_: self._unscale(given))

    def begin(self, group: Group, gpus: Allocation, device: torch.device, folder: Path) -> None:
        """The run begins, on these GPUs. What did not fit into memory is noted in `folder`."""
        self._group, self._gpus, self._device, self._folder = group, group.from_first(gpus), device, folder
        memory_mb = None
        if device.type == "cuda":
            memory_mb = float(torch.cuda.get_device_properties(device).total_memory) / MIB
        self._chooser = BatchChooser(
            self.initial,
            self._largest,
            fixed=False,
            gpu_type=self._gpus.gpu_type,
            nodes=max(self._gpus.nodes, 1),
            replicas=self._replicas,
            memory_mb=memory_mb,
        )
        for gpu_type, atomic in short_of_memory.noted(folder).items():
            self._chooser.out_of_memory(gpu_type, atomic)
        if self._learned is not None:
            self._chooser.load_state_dict(self._learned)
        self.loader.size = self._size(group.from_first(self._multiple(self._chooser.choose())))
        self.restart_clock()

    @property
    def size(self) -> BatchSize:
        """Of the next step that is loaded."""
        return self.loader.size

    @property
    def steps(self) -> int:
        """Steps of the initial batch size that are done, over all runs."""
        return self._steps_at(self.loader.position)

    @property
    def steps_of_this(self) -> int:
        """Steps of the initial batch size that the present step stands for."""
        assert self._part is not None
        return self._steps_at(self.loader.position + self._part.step_samples) - self.steps

    def go_to(self, steps: int) -> None:
        """Continue after so many steps of the initial batch size."""
        epoch, steps = divmod(steps, self.steps_per_epoch)
        self.loader.go_to(epoch, steps * self.initial, steps)

    # The parts of a step, in order.

    def begin_step(self) -> None:
        """Before the forward pass."""
        self._part = self.loader.take()
        self._measurements.begin_step(self._steps)

    def begin_backward(self) -> None:
        """Before the backward pass."""
        self._measured.enter_context(self._measurements.meter.before_average())

    def end_backward(self) -> None:
        """The gradients are averaged, and not clipped yet."""
        self._measured.close()
        meter = self._measurements.meter
        meter.sync.end()
        assert self._part is not None
        norms = meter.after_step(self._part, 1.0)
        self._new_norms = PendingNorms(norms, self._part.step_samples) if norms is not None else None

    def end_step(self) -> tuple[int, PendingNorms | None]:
        """After the optimiser's step: the step's samples, and the norms of the step before, for the vote."""
        part, self._part = self._part, None
        assert part is not None
        self.loader.step_done(part)
        self._measurements.end_step(part.step_samples, self.size.total)
        self._steps += 1
        before, self._norms = self._norms, self._new_norms
        return part.step_samples, before

    def restart_clock(self) -> None:
        """Time since the last step is no part of the next one."""
        self._measurements.restart_clock()

    # What the processes agree on.

    def add_to(self, vote: Vote) -> Vote:
        """On rank 0: add what all processes must know."""
        wanted, self._wanted = self._wanted, 0
        if wanted and wanted != self.size.total:
            vote = vote._replace(total_batch=float(wanted))
        step_s = self._measurements.mean_step_s
        if self._steps % COST_CHECKED_EVERY == 0 and step_s is not None:
            vote = vote._replace(measure_every=float(self._measurements.measure_every(step_s)))
        return vote

    def apply(self, vote: Vote, norms: PendingNorms | None) -> bool:
        """Apply what the processes agreed on; whether to save, since memory may not suffice for what comes."""
        if norms is not None:
            self._measurements.take_norms(vote, norms)
        if vote.measure_every:
            self._measurements.meter.every = int(vote.measure_every)
        if not vote.total_batch:
            return False
        before, self.loader.size = self.size, self._size(int(vote.total_batch))
        self._measurements.batch_changed()
        log.info("batch=%d atomic=%d", self.size.total, self.size.atomic)
        return self.size.atomic > before.atomic

    def observation(self, progress: float) -> Observation | None:
        """What the steps since the last call took; None if there were none."""
        return self._measurements.take_observation(
            self._gpus, self._group, self.size, self.size.atomic, self._device, progress
        )

    def learn(self, body: Body) -> None:
        """Called in the reporter's thread: learn from an observation, and choose the batch again."""
        if isinstance(body, Observation):
            self._chooser.observe(body)
            self._wanted = self._multiple(self._chooser.choose(self.size))

    def out_of_memory(self) -> bool:
        """Note that the present batch does not fit; whether a smaller one is left to try."""
        if self.size.total <= self.initial:
            return False
        short_of_memory.note(self._folder, self._gpus.gpu_type, self.size.atomic)
        return True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON can hold it."""
        return {"initial": self.initial, "noise": self._noise.state_dict(), "learned": self._chooser.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state_dict` returned. Call it before `begin`.

        Raises:
            ValueError: it is of another `batch_size`.
        """
        if state["initial"] != self.initial:
            raise ValueError(
                f"batch_size={self.initial}, but the checkpoint was made with {state['initial']}: keep that"
            )
        self._noise.load_state_dict(state["noise"])
        self._learned = state["learned"]

    def _steps_at(self, position: int) -> int:
        return self.loader.epoch * self.steps_per_epoch + -(-position // self.initial)

    def _size(self, total: int) -> BatchSize:
        """In one micro-step."""
        return BatchSize(total, -(-total // self._replicas))

    def _multiple(self, best: BatchSize) -> int:
        """The largest multiple of the initial batch up to `best`, or up to what fits without micro-steps."""
        total = self._replicas * best.atomic if best.accumulation_steps(self._replicas) else best.total
        return max(total // self.initial, 1) * self.initial

    def _scale(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rates for this step's batch."""
        assert self._part is not None
        scale = max(self._part.step_samples / self.initial, 1.0)
        factor = self._rule(scale, self._noise.noise) if scale > 1 else 1.0
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rates as they were: schedules compute the next ones from them."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
