"""The loop's part of a run: gradients, the batch size and the learning rate. docs/user/executor.md explains how to use
it.

A step is: the backward pass of each micro-step, the optimiser's step (`optimizing`), the measurements of both
(`measuring`), what the script does after `step`, and then, before the next batch, what all processes agreed on (`core`):
a new batch size, a checkpoint, a stop.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock_executor.environment import read_environment
from penstock_executor.profiling import is_out_of_memory
from penstock_executor.training import short_of_memory
from penstock_executor.training.arguments import (
    check_optimizer,
    check_split_model,
    check_trained,
    epoch_limits,
    is_sharded,
    learning_rate_rule,
    split_batch,
)
from penstock_executor.training.batches import BatchSize, Part
from penstock_executor.training.consensus import COST_CHECKED_EVERY, Vote, stride_of
from penstock_executor.training.core import Run
from penstock_executor.training.gradients import GradientMeter, PendingNorms
from penstock_executor.training.loader import Loader, samples_of
from penstock_executor.training.measuring import MIB, Measurements
from penstock_executor.training.optimizing import OptimizerStep
from penstock_executor.training.parallel import parallel, set_synchronising
from penstock_executor.training.sizes import BatchChooser
from penstock_executor.training.state import TrainingState
from penstock_executor.training.workers import end_workers
from penstock_profiles.noise import GradientNoise, NoiseEstimator
from penstock_profiles.wire import Body, Observation

log = logging.getLogger(__name__)


class TrainingRun(Run):
    """One run; `start` makes it. A script calls `prepare` and `step`, or `keep`, `loader` and `step_done` of `Run`.

    `progress` is in samples of the initial batch size.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._noise = NoiseEstimator()
        self._prepared = False
        self._norms: PendingNorms | None = None
        """Of the step before, not voted on yet."""
        self._new_batch: BatchSize | None = None
        self._between_steps = True
        """Whether the next backward pass begins an optimiser step."""
        self._done_step: tuple[int, float, PendingNorms | None] | None = None
        """A step after which the processes have not voted yet: the arguments of `_after_step`."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Many scripts save their arguments, and hold the run among them. A text is saved in its place."""
        return str, ("the run of penstock_executor",)

    def __deepcopy__(self, _memo: object) -> TrainingRun:
        return self

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch_size: int,
        max_batch_size: int | None = None,
        max_atomic_batch: int | None = None,
        lr_scaling: str | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        state: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        **loader: Any,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer, Loader]:
        """Make the model, the optimiser and the data elastic, and continue from the newest checkpoint.

        Args:
            model: moved to this process's device and wrapped for data parallelism. A model that `fully_shard` (FSDP2)
                has sharded stays as it is, and so does this process's part of a split model (`gpus_per_replica`).
            optimizer: of the model's parameters.
            dataset: with `__len__` and `__getitem__`, or a `Stream`.
            batch_size: total batch that the script was written for. The learning rate is for that batch.
            max_batch_size: largest total batch that trains well. None: the batch stays `batch_size` (strong-scaling,
                rigid). Each replica of a split model takes `batch_size` samples, or fewer if that would exceed this.
            max_atomic_batch: most samples of one process in one micro-step. None: what memory allows.
            lr_scaling: a name in `penstock_profiles.learning_rate.RULES`. None: `square_root` for optimisers of Adam's
                kind, `adascale` for others.
            scheduler: of the learning rate, per step at `batch_size`. Penstock steps it by progress; do not step it
                yourself, except `ReduceLROnPlateau`, which Penstock only saves.
            scaler: a `torch.amp.GradScaler`, for mixed precision.
            max_grad_norm: the norm that gradients are clipped to.
            state: name -> further objects with `state_dict` and `load_state_dict` that checkpoints should hold.
            ddp: arguments of `DistributedDataParallel`, such as `{"find_unused_parameters": True}` for a model that does
                not use all of its parameters in each step.
            shuffle: whether each epoch has another order.
            drop_last: leave out the last step of an epoch if it would be smaller, for pipelines with fixed shapes. The
                data set must have at least `batch_size` samples then, and no batch is larger than the data set.
            loader: further arguments of `torch.utils.data.DataLoader`.

        Raises:
            ValueError: an argument is out of its range, or replicas of a split model cannot share the batch evenly.
            CannotSave: what `state` names, the scheduler or the optimiser has a state that could not be loaded again.
        """
        largest = batch_size if max_batch_size is None else max_batch_size
        check_optimizer(optimizer)
        rule = learning_rate_rule(lr_scaling, optimizer)
        if not 1 <= batch_size <= largest:
            raise ValueError(
                f"batch_size={batch_size}, max_batch_size={max_batch_size}: the first must be at least 1, and at most"
                " the second"
            )
        largest, self._epoch_samples = epoch_limits(
            batch_size, largest, samples_of(dataset, loader.get("sampler")), drop_last=drop_last
        )
        self._initial, self._adaptive = batch_size, max_batch_size is not None
        self._split = self.gpus_per_replica > 1
        fixed = None
        if self._split:
            trainable = self._group.gather(any(each.requires_grad for each in model.parameters()))
            check_split_model(
                self.gpus_per_replica, model, scaler=scaler, max_atomic_batch=max_atomic_batch, trainable=trainable
            )
            fixed = split_batch(batch_size, largest if self._adaptive else None, self.replicas)
        self._chooser = self._batch_chooser(largest, max_atomic_batch)
        sharded = is_sharded(model)
        self._bare = model if sharded else model.to(self.device)
        self._optimizer = optimizer
        self._optimizer_step = OptimizerStep(optimizer, rule, self._noise, batch_size, scheduler, scaler)
        self._max_grad_norm = max_grad_norm
        named = {"scheduler": scheduler, "scaler": scaler} | dict(state or {})
        self._hold(TrainingState(self._group, named, model=self._bare, optimizer=optimizer, sharded=sharded))
        saved_batch = self._continue(self._restore())
        if saved_batch is not None and saved_batch.total > largest:
            saved_batch = None
        self._model, self._averager = parallel(self._bare, self._group, self.device, sharded=sharded, options=ddp or {})
        self._trained = {each for each in self._bare.parameters() if each.requires_grad}
        averaged = isinstance(self._model, DistributedDataParallel) or (self._split and self.replicas > 1)
        meter = GradientMeter(list(self._bare.parameters()), optimizer, self.replicas, averaged=averaged)
        self._measurements = Measurements(meter, self._noise, batch_size)
        self._loader = self._new_loader(
            dataset,
            # Each process knows only its own memory, and may see other notes.
            self._group.from_first(fixed or saved_batch or self._chooser.choose()),
            shuffle,
            drop_last,
            loader,
            before_part=self._before_part,
            after_part=self._finish_step,
            each=True,
        )
        self._batch = self._loader.size
        self._prepared = True
        return self._model, optimizer, self._loader

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Train on `loss`, the mean over one batch of the loader. Call it once for each batch.

        The parameters move with the last micro-step of an optimiser step. What the script does then, such as updating a
        moving average, still belongs to the step: the run is saved or stopped before the next batch. With
        `gpus_per_replica`, call it without a loss if the pipeline has made the backward pass of this batch's mean loss
        itself.
        """
        if loss is None and self._averager is None:
            raise ValueError(
                "run.step() without a loss is for pipelines, with px.start(gpus_per_replica=...); give the loss"
            )
        assert self._loader is not None
        part = self._loader.take()
        if self._between_steps:
            self._between_steps = False
            self._measurements.begin_step(self.steps)
        self._backward(part, loss)
        if not part.last:
            return
        norms = self._move(part)
        self._loader.position += part.step_samples
        self._between_steps = True
        if self._channel is not None:
            self._channel.finish()
        active_s = self._measurements.end_step(part.step_samples, self._batch.total)
        before, self._norms = self._norms, PendingNorms(norms, part.step_samples) if norms is not None else None
        self._done_step = part.step_samples, active_s, before

    @property
    def noise(self) -> GradientNoise | None:
        """The estimate of the gradient's noise so far, at the initial batch size; None before the first."""
        return self._noise.noise

    @property
    def measured_every(self) -> int:
        """Steps from one measurement of the gradients to the next."""
        return self._measurements.meter.every

    # Parts of `prepare` and `step`.

    def _batch_chooser(self, largest: int, max_atomic_batch: int | None) -> BatchChooser:
        memory_mb = None
        if self.device.type == "cuda":
            memory_mb = float(torch.cuda.get_device_properties(self.device).total_memory) / MIB
        chooser = BatchChooser(
            self._initial,
            largest,
            fixed=not self._adaptive,
            gpu_type=self._gpus.gpu_type,
            nodes=self._gpus.nodes,
            replicas=self.replicas,
            memory_mb=memory_mb,
        )
        if self._saver is not None:
            for gpu_type, atomic in short_of_memory.noted(self._saver.checkpoints.folder).items():
                chooser.out_of_memory(gpu_type, atomic)
        if max_atomic_batch is not None:
            chooser.limit(self._gpus.gpu_type, max_atomic_batch)
        return chooser

    def _before_part(self, last: bool) -> None:
        assert self._loader is not None
        if self._loader.position == 0 and isinstance(self._model, DistributedDataParallel):
            check_trained(self._bare, self._trained)
        set_synchronising(self._model, last=last)

    def _backward(self, part: Part, loss: torch.Tensor | None) -> None:
        meter = self._measurements.meter
        if self._averager is not None:
            if loss is not None:
                loss.backward()
            meter.record_own_gradients()
            meter.sync.begin(cuda=self.device.type == "cuda")
            self._averager.average(part.weight)
        else:
            assert loss is not None
            weighted = self._optimizer_step.scaled(loss if part.weight == 1 else loss * part.weight)
            if not part.last:
                weighted.backward()
                meter.after_micro_step(part)
                return
            with meter.before_average():
                weighted.backward()
        meter.sync.end()

    def _move(self, part: Part) -> Any:
        """After the last backward pass of an optimiser step: move the parameters. Returns the norms of the
        gradients."""
        norms = self._measurements.meter.after_step(part, self._optimizer_step.unscale())
        if self._max_grad_norm is not None and self._averager is not None:
            self._averager.clip(self._max_grad_norm)
        elif self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._bare.parameters(), self._max_grad_norm)
        self.progress += self._optimizer_step.step(part.step_samples)
        self._optimizer_step.follow_schedule(self.progress)
        self._optimizer.zero_grad()
        self.steps += 1
        return norms

    @property
    def _atomic(self) -> int:
        """Samples of the largest part of a step."""
        batch = self._batch
        return -(-batch.total // (self.replicas * (batch.accumulation_steps(self.replicas) + 1)))

    # What the core leaves to a loop.

    def learn(self, body: Body) -> None:
        """Called in the reporter's thread: learn from an observation, and choose the batch again."""
        if self._prepared and isinstance(body, Observation):
            self._chooser.observe(body)
            if not self._split:
                self._new_batch = self._chooser.choose(self._batch)

    def step_done(self, samples: int | None = None) -> None:
        """As `Run.step_done`, for a loop of the script's own. Raises RuntimeError after `prepare`: `step` does it."""
        if self._prepared:
            raise RuntimeError(
                "run.step_done() is for loops without run.prepare; after run.prepare call run.step(loss)"
            )
        super().step_done(samples)

    @property
    def _is_between_steps(self) -> bool:
        return super()._is_between_steps and self._between_steps

    def _finish_step(self) -> None:
        """Called when the script asks for the next batch, or evaluates: it has done all that belongs to the step."""
        if self._done_step is not None:
            arguments, self._done_step = self._done_step, None
            self._after_step(*arguments)

    def _done(self, count: int) -> bool:
        if not self._prepared or self._epoch_samples is None or not self._adaptive:
            return super()._done(count)
        return self.epoch >= count and self.progress >= count * self._epoch_samples * (1 - 1e-9)

    def _total(self, count: int) -> float | None:
        return super()._total(count) if not self._prepared else count * (self._epoch_samples or 0.0) or None

    def _end_epoch(self) -> None:
        if self._prepared:
            self._done_step = None
            self._optimizer.zero_grad()

    def _add_to(self, vote: Vote) -> Vote:
        if not self._prepared:
            return super()._add_to(vote)
        batch, self._new_batch = self._new_batch, None
        if batch is not None and batch != self._batch:
            vote = vote._replace(total_batch=batch.total, atomic_batch=batch.atomic)
        measurements, step_s = self._measurements, self._measurements.mean_step_s
        if self.steps % COST_CHECKED_EVERY == 0 and step_s is not None:
            vote = vote._replace(measure_every=measurements.measure_every(step_s))
            if self.world > 1 and measurements.trusted:
                vote = vote._replace(vote_every=stride_of(step_s))
        return vote

    def _apply(self, vote: Vote, norms: PendingNorms | None) -> None:
        super()._apply(vote, norms)
        if norms is not None:
            self._measurements.take_norms(vote, norms)
        if vote.measure_every:
            self._measurements.meter.every = int(vote.measure_every)
        if vote.total_batch:
            self._change_batch(BatchSize(int(vote.total_batch), int(vote.atomic_batch)))

    def _change_batch(self, batch: BatchSize) -> None:
        before = self._atomic
        assert self._loader is not None
        self._loader.size = self._batch = batch
        self._measurements.batch_changed()
        if self._atomic > before:
            self.save()  # memory may not suffice
        log.info("step=%d batch=%d atomic=%d", self.steps, self._batch.total, self._batch.atomic)

    def _observation(self) -> Observation | None:
        if not self._prepared:
            return super()._observation()
        return self._measurements.take_observation(
            self._gpus, self._group, self._batch, self._atomic, self.device, self.progress
        )

    def _restart_clock(self) -> None:
        super()._restart_clock()
        if self._prepared:
            self._measurements.restart_clock()

    def _after_error(self, error: BaseException) -> None:
        """If memory ran out, restart with a smaller batch."""
        if not self._prepared or self._split:  # the script decides the shapes in a pipeline
            return
        if not (isinstance(error, Exception) and is_out_of_memory(error)) or self._saver is None or self._atomic <= 1:
            return
        short_of_memory.note(self._saver.checkpoints.folder, self._gpus.gpu_type, self._atomic)
        log.error(
            "gpu_type=%s atomic=%d does not fit into memory: the run restarts with a smaller batch",
            self._gpus.gpu_type,
            self._atomic,
        )
        end_workers()
        short_of_memory.begin_again(self.world, read_environment().job_id)

    def _meta(self) -> dict[str, Any]:
        if not self._prepared:
            return super()._meta()
        return super()._meta() | {
            "scheduled": self._optimizer_step.scheduled,
            "batch": dataclasses.asdict(self._batch),
            "initial": self._initial,
            "noise": self._noise.state_dict(),
            "learned": self._chooser.state_dict(),
        }

    def _continue(self, meta: Mapping[str, Any] | None) -> BatchSize | None:
        """Continue from a checkpoint (None: there is none).

        Returns:
            Its batch if that still suits: on the same configuration, of an adaptive job.

        Raises:
            RuntimeError: it was saved by a loop without `prepare`.
        """
        if meta is None:
            return None
        if "learned" not in meta:
            raise RuntimeError(
                "the checkpoint is of a loop with run.keep; continue it with run.keep, or use another folder"
            )
        self._optimizer_step.scheduled = meta["scheduled"]
        self._noise.load_state_dict(meta["noise"])
        self._chooser.load_state_dict(meta["learned"])
        batch = BatchSize(**meta["batch"])
        fits = batch.atomic <= self._chooser.limit_of(self._gpus.gpu_type)
        return batch if meta["gpus"] == self._configuration and self._adaptive and fits else None
