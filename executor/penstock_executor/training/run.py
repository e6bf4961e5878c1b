"""One run of an elastic training job. `penstock_executor.start` begins it; docs/user/executor.md explains how to use
it.

A step is: the backward pass of each micro-step, the optimiser's step (`optimizing`), the measurements of both
(`measuring`), and then what all processes agreed on after the step before (`consensus`): a new batch size, a
checkpoint, a stop.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock_executor.allocation import Allocation
from penstock_executor.checkpoint import Checkpoints
from penstock_executor.client import ReportSchedule
from penstock_executor.environment import read_environment
from penstock_executor.node_channel import Channel
from penstock_executor.profiling import is_out_of_memory
from penstock_executor.training import short_of_memory
from penstock_executor.training.arguments import (
    check_split_model,
    epoch_limits,
    is_sharded,
    learning_rate_rule,
    split_batch,
)
from penstock_executor.training.batches import BatchSize, Part
from penstock_executor.training.consensus import COST_CHECKED_EVERY, Consensus, Vote, stride_of
from penstock_executor.training.gradients import GradientMeter, PendingNorms
from penstock_executor.training.loader import Loader, samples_of
from penstock_executor.training.measuring import MIB, Measurements
from penstock_executor.training.optimizing import OptimizerStep
from penstock_executor.training.parallel import parallel, set_synchronising
from penstock_executor.training.processes import Group
from penstock_executor.training.reporter import Reporter
from penstock_executor.training.saving import CannotSave, Saver, random_states
from penstock_executor.training.sizes import BatchChooser
from penstock_executor.training.state import TrainingState, newest_checkpoint
from penstock_executor.training.status import STOPPED, SUPERSEDED
from penstock_executor.training.suspension import Suspension, stand_still
from penstock_executor.training.workers import end_workers, protect_workers
from penstock_profiles.noise import GradientNoise, NoiseEstimator
from penstock_profiles.wire import Body, Checkpointed, Observation, Result, Started

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of `start` that the run needs later."""

    report_every_s: float
    checkpoint_every_s: float
    host_cap_bytes: int | None
    seed: int


class TrainingRun:
    """One run; `start` makes it. Attributes are for reading."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        checkpoints: Checkpoints | None,
        settings: Settings,
        gpus: Allocation,
        run_epoch: int,
        channel: Channel | None = None,
    ) -> None:
        self.rank, self.world, self.device = group.rank, group.world, device
        self.gpus_per_replica, self.replicas = group.gpus_per_replica, group.replicas
        self.replica, self.place = group.replica, group.place
        """The replica of the model that this process belongs to, and the part of the model that this process holds."""
        self.replica_group = group.replica_group
        """The processes of this replica, for the pipeline; None if it has only one."""
        self.run_epoch = run_epoch
        """The run's number among all runs of the job: an older run writes no checkpoints (`penstock_profiles.wire`)."""
        self.steps = 0
        """Optimiser steps so far, over all runs."""
        self.progress = 0.0
        """In samples of the initial batch size, over all runs."""
        self.epoch = 0
        """Passes over the data that are done."""
        self.reporter: Reporter | None = None
        self._group, self._settings, self._gpus = group, settings, gpus
        self._channel = channel
        if channel is not None:
            channel.urgent = self._has_news
        self._saver = Saver(checkpoints) if checkpoints is not None else None
        self._noise = NoiseEstimator()
        self._consensus = Consensus(group)
        self._norms: PendingNorms | None = None
        """Of the step before, not voted on yet."""
        self._stop = False
        self._new_batch: BatchSize | None = None
        self._saved_s = time.monotonic()
        self._has_saved = False
        """Whether the job has a checkpoint."""
        self._reports = ReportSchedule(settings.report_every_s, self._saved_s)
        self._closed = False
        self._between_steps = True
        """Whether the next backward pass begins an optimiser step."""
        signal.signal(signal.SIGTERM, self._on_term)
        protect_workers()
        self._suspension = Suspension(settings.host_cap_bytes)
        # Some sites send it as a warning before a time limit; by default it would end the process.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_error

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
            shuffle: whether each epoch has another order.
            drop_last: leave out the last step of an epoch if it would be smaller, for pipelines with fixed shapes. The
                data set must have at least `batch_size` samples then, and no batch is larger than the data set.
            loader: further arguments of `torch.utils.data.DataLoader`.

        Raises:
            ValueError: an argument is out of its range, or replicas of a split model cannot share the batch evenly.
            CannotSave: what `state` names, the scheduler or the optimiser has a state that could not be loaded again.
        """
        largest = batch_size if max_batch_size is None else max_batch_size
        rule = learning_rate_rule(lr_scaling, optimizer)
        if not 1 <= batch_size <= largest:
            raise ValueError(
                f"batch_size={batch_size}, max_batch_size={max_batch_size}: the first must be at least 1, and at most"
                " the second"
            )
        largest, self._epoch_samples = epoch_limits(batch_size, largest, samples_of(dataset), drop_last=drop_last)
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
        if self._saver is not None and (sharded or self._split):
            self._saver.group = self._group.another(self.gpus_per_replica if self._split else None)
            self._saver.parts = self._split
        self._bare = model if sharded else model.to(self.device)
        self._optimizer = optimizer
        self._optimizer_step = OptimizerStep(optimizer, rule, self._noise, batch_size, scheduler, scaler)
        self._max_grad_norm = max_grad_norm
        named = {"scheduler": scheduler, "scaler": scaler} | dict(state or {})
        self._state = TrainingState(self._group, self._bare, optimizer, named, sharded=sharded)
        self._state.check()
        position, saved_batch = self._restore()
        if saved_batch is not None and saved_batch.total > largest:
            saved_batch = None
        self._first_step = self.steps
        self._model, self._averager = parallel(self._bare, self._group, self.device, sharded=sharded)
        averaged = isinstance(self._model, DistributedDataParallel) or (self._split and self.replicas > 1)
        meter = GradientMeter(list(self._bare.parameters()), optimizer, self.replicas, averaged=averaged)
        self._measurements = Measurements(meter, self._noise, batch_size)
        self._loader = Loader(
            dataset,
            fixed or saved_batch or self._chooser.choose(),
            (self.replica, self.replicas),
            seed=self._settings.seed,
            shuffle=shuffle,
            position=position,
            drop_last=drop_last,
            before_part=lambda last: set_synchronising(self._model, last=last),
            begin=lambda: self._restore_random() if self._loader.position else None,
            **loader,
        )
        self._batch = self._loader.size
        self._measurements.restart_clock()
        self._put(Started(gpu_type=self._gpus.gpu_type, gpu_ids=self._gpus.gpu_ids, progress=self.progress))
        return self._model, optimizer, self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """The passes over the data, from the one that the last run was in.

        With a fixed batch there are `count` passes. With an adaptive one, a sample of a large batch counts for less,
        and passes are made until the training is worth `count` passes at `batch_size`: at least `count`.
        """
        while not self._done(count):
            self._loader.epoch = self.epoch
            self._restore_random()
            self._measurements.restart_clock()
            yield self.epoch
            self._act()
            self.epoch += 1
            self._loader.position = 0
            self._optimizer.zero_grad()
            self.save()
        if self._saver is not None:
            self._saver.wait()
        self._close("completed")

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Train on `loss`, the mean over one batch of the loader. Call it once for each batch.

        The parameters move with the last micro-step of an optimiser step. With `gpus_per_replica`, call it without a
        loss if the pipeline has made the backward pass of this batch's mean loss itself.
        """
        if loss is None and self._averager is None:
            raise ValueError(
                "run.step() without a loss is for pipelines, with px.start(gpus_per_replica=...); give the loss"
            )
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
        self._act()
        before, self._norms = self._norms, PendingNorms(norms, part.step_samples) if norms is not None else None
        if before is not None or self.steps % self._consensus.stride == 0:
            self._vote(before)
        if self._channel is not None:
            self._channel.step_done(part.step_samples, active_s)
            self._measurements.restart_clock()  # a pause is no part of the next step

    @property
    def noise(self) -> GradientNoise | None:
        """The estimate of the gradient's noise so far, at the initial batch size; None before the first."""
        return self._noise.noise

    @property
    def measured_every(self) -> int:
        """Steps from one measurement of the gradients to the next."""
        return self._measurements.meter.every

    def log(self, **values: object) -> None:
        """Write `values` to the log, once for all processes."""
        if self.rank == 0:
            log.info("epoch=%d step=%d %s", self.epoch, self.steps, " ".join(f"{k}={v}" for k, v in values.items()))

    def report(self, metric: float, *, minimize: bool = False) -> None:
        """Report the metric that the model has reached, once for all processes. A search compares its trials by it.

        Never waits. A metric that is not finite is only logged, so that a trial that diverges keeps its last result.

        Args:
            metric: such as the accuracy on the validation set.
            minimize: whether less is better, as of a loss.
        """
        self.log(metric=metric)
        if self.rank == 0 and math.isfinite(metric):
            self._put(Result(metric=-float(metric) if minimize else float(metric), progress=self.progress))

    def save(self) -> None:
        """Save a checkpoint; all processes call it after the same step. Training goes on while it is written."""
        if self._saver is None:
            return
        began_s = time.monotonic()
        answered: str | None = None
        asked = self.reporter.request if self.rank == 0 and self.reporter is not None else None
        if asked is not None and asked.kind == "checkpoint" and self.reporter is not None:
            answered, self.reporter.request = asked.id, None
        states = self._group.gather(random_states())
        if self._state.writes:
            self._saver.wait()
            try:
                state, piece = self._state.collect(states)
            except CannotSave as error:
                self._saver.fail(error)
                return
            progress, steps = self.progress, self.steps
            pause_s = time.monotonic() - began_s

            def saved(seconds: float) -> None:
                self._put(Checkpointed(request=answered, progress=progress, seconds=pause_s + seconds))
                log.info("step=%d checkpoint written pause_s=%.3f write_s=%.3f", steps, pause_s, seconds)

            self._saver.save(state, self.steps, self._meta(), saved, piece)
        self._saved_s, self._has_saved = time.monotonic(), True
        self._measurements.restart_clock()  # saving is no part of the next step

    def learn(self, body: Body) -> None:
        """Called in the reporter's thread: learn from an observation, and choose the batch again."""
        if isinstance(body, Observation):
            self._chooser.observe(body)
            if not self._split:
                self._new_batch = self._chooser.choose()

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

    def _restore_random(self) -> None:
        """Before the first step: the script and its loaders may have drawn from the generators since `prepare`."""
        if self.steps == self._first_step:
            self._state.restore_random()

    def _done(self, count: int) -> bool:
        if self._epoch_samples is None or not self._adaptive:
            return self.epoch >= count
        return self.epoch >= count and self.progress >= count * self._epoch_samples * (1 - 1e-9)

    @property
    def _atomic(self) -> int:
        """Samples of the largest part of a step."""
        batch = self._batch
        return -(-batch.total // (self.replicas * (batch.accumulation_steps(self.replicas) + 1)))

    # What the processes agree on.

    def _vote(self, norms: PendingNorms | None) -> None:
        """Cast this process's vote.

        The norms are those of the step before: on a GPU, this step's may not be computed yet, and nothing waits for
        them.
        """
        vote = Vote(stop=self._stop, suspend=self._suspension.requested)
        if norms is not None:
            local_sqr, mean_sqr = norms.read().tolist()
            vote = vote._replace(local_sqr=local_sqr, mean_sqr=mean_sqr)
        if self.rank == 0:
            vote = self._with_requests(vote)
        self._consensus.cast(vote, norms)
        if self.world == 1 and vote.urgent:
            self._act()

    def _with_requests(self, vote: Vote) -> Vote:
        """On rank 0: add what the daemon and the node's agent ask for and what is due; report if it is time."""
        now_s = time.monotonic()
        asked = self.reporter.request.kind if self.reporter is not None and self.reporter.request is not None else None
        if asked is None and self._channel is not None and self._channel.request is not None:
            asked = "suspend"
        saver = self._saver
        due = now_s - self._saved_s >= self._settings.checkpoint_every_s and saver is not None and not saver.busy
        reports = self._reports.due(now_s)
        due |= reports and self._owes_a_checkpoint
        superseded = (saver is not None and saver.superseded) or (
            self.reporter is not None and self.reporter.superseded
        )
        vote = vote._replace(save=asked == "checkpoint" or due, move_out=asked == "suspend", superseded=superseded)
        if reports:
            self._report()
        batch, self._new_batch = self._new_batch, None
        if batch is not None and batch != self._batch:
            vote = vote._replace(total_batch=batch.total, atomic_batch=batch.atomic)
        measurements, step_s = self._measurements, self._measurements.mean_step_s
        if self.steps % COST_CHECKED_EVERY == 0 and step_s is not None:
            vote = vote._replace(measure_every=measurements.measure_every(step_s))
            if self.world > 1 and measurements.trusted:
                vote = vote._replace(vote_every=stride_of(step_s))
        return vote

    def _has_news(self) -> bool:
        """Whether this process has received something that all processes must learn in the next step."""
        reporter = self.reporter
        asked = reporter is not None and (reporter.request is not None or reporter.superseded)
        return self._stop or self._suspension.requested or asked

    def _act(self) -> None:
        """Apply the decision of the processes' last vote."""
        result = self._consensus.result()
        if result is None:
            return
        vote, norms = result
        if norms is not None:
            self._measurements.take_norms(vote, norms)
        if vote.measure_every:
            self._measurements.meter.every = int(vote.measure_every)
        if vote.vote_every:
            self._consensus.stride = int(vote.vote_every)
        if vote.total_batch:
            self._change_batch(BatchSize(int(vote.total_batch), int(vote.atomic_batch)))
        if vote.superseded:
            self._leave("superseded", SUPERSEDED)
        if vote.stop:
            self.save()
            if self._saver is not None:
                self._saver.wait()
            self._leave("stopped", STOPPED)
        if vote.save:
            self.save()
        if vote.suspend or vote.move_out:
            parameters = self._bare.parameters()
            requested = bool(vote.move_out)
            stand_still(
                self._suspension,
                self._group,
                self._channel,
                self.reporter,
                self._optimizer,
                parameters,
                requested=requested,
            )
            self._measurements.restart_clock()

    def _change_batch(self, batch: BatchSize) -> None:
        before = self._atomic
        self._loader.size = self._batch = batch
        self._measurements.batch_changed()
        if self._atomic > before:
            self.save()  # memory may not suffice
        log.info("step=%d batch=%d atomic=%d", self.steps, self._batch.total, self._batch.atomic)

    # Reports, and the end of the run.

    def _put(self, body: Body) -> None:
        if self.reporter is not None:
            self.reporter.put(body)

    def _report(self) -> None:
        observation = self._measurements.take_observation(
            self._gpus, self._group, self._batch, self._atomic, self.device, self.progress
        )
        if observation is not None:
            self._put(observation)

    def _close(self, outcome: Any, text: str = "") -> None:
        if not self._closed:
            self._closed = True
            if self.reporter is not None:
                self.reporter.close(outcome, self.progress, text)

    def _leave(self, outcome: str, status: int) -> None:
        """End this process; all the others do the same."""
        failure = self._saver.failure if self._saver is not None else None
        self._group.barrier()
        self._close(outcome, str(failure or ""))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        raise SystemExit(status)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In place of Python's own hook: report that the run fails; if memory ran out, restart with a smaller batch."""
        self._close("failed", f"{kind.__name__}: {error}")
        self._excepthook(kind, error, trace)
        if not (isinstance(error, Exception) and is_out_of_memory(error)) or self._saver is None or self._atomic <= 1:
            return
        if self._split:
            return  # the script decides the shapes in a pipeline
        short_of_memory.note(self._saver.checkpoints.folder, self._gpus.gpu_type, self._atomic)
        log.error(
            "gpu_type=%s atomic=%d does not fit into memory: the run restarts with a smaller batch",
            self._gpus.gpu_type,
            self._atomic,
        )
        end_workers()
        short_of_memory.begin_again(self.world, read_environment().job_id)

    def _on_term(self, _number: int, _frame: object) -> None:
        self._stop = True

    # Checkpoints.

    def _meta(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self._loader.position,
            "progress": self.progress,
            "scheduled": self._optimizer_step.scheduled,
            "batch": dataclasses.asdict(self._batch),
            "initial": self._initial,
            "gpus": self._configuration,
            "gpus_per_replica": self.gpus_per_replica,
            "noise": self._noise.state_dict(),
            "learned": self._chooser.state_dict(),
        }

    @property
    def _owes_a_checkpoint(self) -> bool:
        """Whether the run has to show that it can save: Penstock moves no job that has not."""
        has_daemon = self.reporter is not None and self.reporter.has_daemon
        return has_daemon and not self._has_saved and self._saver is not None

    @property
    def _configuration(self) -> list[Any]:
        return [self._gpus.gpu_type, self._gpus.nodes, self.world]

    def _restore(self) -> tuple[int, BatchSize | None]:
        """Continue from the newest checkpoint.

        Returns:
            The position in its epoch, and its batch if that still suits: on the same configuration, of an adaptive job.
        """
        saver = self._saver
        found = newest_checkpoint(self._group, saver.checkpoints) if saver is not None else None
        if saver is None or found is None:
            return 0, None
        self._state.restore(found, saver.group)
        self._has_saved = True
        meta = found.meta
        self.steps, self.epoch, self.progress = found.step, meta["epoch"], meta["progress"]
        self._optimizer_step.scheduled = meta["scheduled"]
        self._noise.load_state_dict(meta["noise"])
        self._chooser.load_state_dict(meta["learned"])
        log.info("step=%d epoch=%d position=%d continues", self.steps, self.epoch, meta["position"])
        batch = BatchSize(**meta["batch"])
        fits = batch.atomic <= self._chooser.limit_of(self._gpus.gpu_type)
        return meta["position"], batch if meta["gpus"] == self._configuration and self._adaptive and fits else None
