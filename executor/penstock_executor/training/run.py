"""One run of an elastic training job; `start` begins it, `docs/user/executor.md` tells how to use it.

Once a step, or of short steps every few, all processes add up one short vector (`_Message`): the squared norms of their
gradients, and whether any of them was asked to save or to stop. The sum is read a step later, so nobody waits for it, and
all act on it after the same step. So a signal may come to any process at any time, and still each checkpoint is of a whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.checkpoint import Checkpoint, Checkpoints
from penstock_executor.client import Pace, connect, present_request
from penstock_executor.environment import Environment, Ranks, read_environment, read_ranks
from penstock_executor.node_channel import Channel, open_channel
from penstock_executor.profiling import is_out_of_memory
from penstock_executor.training import short_of_memory
from penstock_executor.training.averaging import Averager
from penstock_executor.training.batches import BatchSize
from penstock_executor.training.gpu_memory import held_mb, limit_memory
from penstock_executor.training.gradients import GradientMeter, Landing, SyncTimer, pace
from penstock_executor.training.loader import Loader, samples_of
from penstock_executor.training.processes import Group, join
from penstock_executor.training.reporter import Reporter
from penstock_executor.training.saving import (
    Saver,
    copied,
    from_bytes,
    random_states,
    read_part,
    read_shards,
    set_random_states,
)
from penstock_executor.training.sizes import BatchChooser
from penstock_executor.training.suspension import Suspension
from penstock_profiles.efficiency import gain
from penstock_profiles.learning_rate import RULES, Rule
from penstock_profiles.noise import GradientNoise, Moments, NoiseEstimator
from penstock_profiles.wire import CPU, Body, Checkpointed, Observation, Result, Resumed, Started, Suspended

log = logging.getLogger(__name__)

STOPPED, SUPERSEDED = 128 + signal.SIGTERM, 75

TRUSTED_WEIGHT = 0.1
"""How full the memory of the noise estimate must be before batches are chosen by it: 105 steps at the initial batch."""

SETTLED_WEIGHT = 0.39
"""How full it must be before steps go unmeasured: 500 steps at the initial batch, after which estimates are within 10 %."""

PACED_EVERY = 48
"""Steps between two looks at what measuring the gradients costs; a multiple of `LONGEST_STRIDE`."""

WORD_EVERY_S, LONGEST_STRIDE = 0.5, 16
"""Of steps shorter than that, only some carry a word: a signal may wait so long. A word costs two switches of context."""

MOST_PAUSE_S = 30.0
"""Between two steps of several processes under a duty cycle, be it 0: what one has heard, the others hear in a step."""

MIB = 2**20


def refuse_apart(
    gpus_per_replica: int,
    model: torch.nn.Module,
    *,
    scaler: Any,
    max_atomic_batch: int | None,
    trains: Sequence[bool] = (True,),
) -> None:
    """Raises ValueError for what does not go with a model that several processes hold.

    `trains` says of each process whether its part has anything to train.
    """
    where = f"with gpus_per_replica={gpus_per_replica}"
    if hasattr(model, "set_requires_gradient_sync"):
        raise ValueError(f"{where} the model may not be taken apart by fully_shard as well; take one of the two")
    if scaler is not None:
        raise ValueError(
            f"scaler {where}: parts of one replica would skip different steps; train in bfloat16, which needs none"
        )
    if max_atomic_batch is not None:
        raise ValueError(
            f"max_atomic_batch {where}: the pipeline's own micro-batches are what memory sees; leave it out"
        )
    if not all(trains):
        raise ValueError(
            f"{where} the part of process {trains.index(False)} has no parameter to train; cut the model so that each part has"
            " one whose requires_grad is True"
        )


def batch_apart(initial: int, largest: int | None, replicas: int) -> BatchSize:
    """The batch of replicas that several processes hold each: as many samples for each as the shapes in it are made for.

    All get the same share, as the stages of a pipeline exchange tensors of one shape.

    Args:
        initial: total batch that the script was written for. It stays where `largest`, to which it may grow, is None.

    Raises:
        ValueError: there is no such batch.
    """
    share = initial // replicas if largest is None else min(initial, largest // replicas)
    if largest is None and initial % replicas:
        raise ValueError(
            f"batch_size={initial} is no multiple of {replicas} replicas, and a pipeline's shapes are the same in each: take one"
            " that any number of replicas up to --max-gpus divides, or let it grow with them, by max_batch_size"
        )
    if share < 1:
        raise ValueError(f"max_batch_size={largest} is less than a sample for each of {replicas} replicas; raise it")
    return BatchSize(share * replicas, share)


def limits_of(batch_size: int, largest: int, samples: int | None, *, drop_last: bool) -> tuple[int, int | None]:
    """The largest total batch of which an epoch holds a step, and the samples that an epoch is worth at `batch_size`.

    Args:
        samples: of the data set; None for a stream, whose length is not known.

    Raises:
        ValueError: with `drop_last` no epoch would have a step.
    """
    if samples is None or not drop_last:
        return largest, samples
    if batch_size > samples:
        raise ValueError(
            f"batch_size={batch_size} with drop_last: the data set has {samples} samples, so that no epoch would have a step;"
            " take a smaller batch_size, or leave out drop_last"
        )
    return min(largest, samples), samples // batch_size * batch_size


def stride_of(step_s: float) -> int:
    """Every how many steps of `step_s` seconds there is a word: a power of 2, so that it divides `PACED_EVERY`."""
    fit = min(max(int(WORD_EVERY_S / step_s), 1), LONGEST_STRIDE)
    return int(2 ** (fit.bit_length() - 1))


def start(
    checkpoints: str | Path | None = None,
    *,
    gpu_type: str | None = None,
    gpus_per_replica: int = 1,
    report_every_s: float = 30.0,
    checkpoint_every_s: float = 600.0,
    keep: int = 2,
    host_cap_bytes: int | None = None,
    seed: int = 0,
) -> TrainingRun:
    """Begin a run: who am I, join the others, find the checkpoint.

    Args:
        checkpoints: folder on a file system that all nodes share. None: in a job of Slurm's `checkpoints/JOB_ID` below the
            working directory; elsewhere nothing is saved, and each run begins anew.
        gpu_type: where Slurm does not say it.
        gpus_per_replica: P, processes that hold the model together, each a part of it on a GPU of its own: the stages of a
            pipeline. Processes 0 … P - 1 are the first replica, the next P the second. Submit with `--scale-unit=P`.
        report_every_s: seconds between two reports, after the first few to the daemon.
        checkpoint_every_s: seconds between two checkpoints, besides those at each epoch's end and on request.
        keep: checkpoints to keep.
        host_cap_bytes: most of the host's memory that the state of one suspended process may take; None: no limit.
        seed: of the order of samples; torch's own generators are the script's to seed.

    Raises:
        EnvironmentDisagrees: Slurm's or torchrun's variables contradict each other, or P.
        OSError: the folder cannot be made.
    """
    if gpus_per_replica < 1:
        raise ValueError(f"gpus_per_replica={gpus_per_replica}: a replica of the model takes at least 1")
    environment, ranks = read_environment(), read_ranks()
    device = join(ranks)
    group = Group(ranks, gpus_per_replica)
    if environment.measuring is not None:
        checkpoints = environment.measuring
    elif checkpoints is None and environment.job_id is not None:
        checkpoints = Path("checkpoints") / environment.job_id
    folder = Path(checkpoints) if checkpoints is not None else None
    client = connect(folder, environment) if ranks.rank == 0 else None
    epoch = group.from_first(client.epoch if client else None)
    saved = Checkpoints(folder, epoch, keep) if folder is not None else None
    run = TrainingRun(
        group,
        device,
        saved,
        _Settings(environment.report_every_s(report_every_s), checkpoint_every_s, host_cap_bytes, seed),
        group.from_first(_allocation(environment, gpu_type, device, ranks) if client else None),
        epoch,
        _channel(environment, device, ranks),
    )
    if client is not None:
        run.reporter = Reporter(client, run.learn, suspends=True)
    return run


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    report_every_s: float
    checkpoint_every_s: float
    host_cap_bytes: int | None
    seed: int


class _Message:
    """What each process says to the others once a step: places in a vector that is added up."""

    LOCAL_SQR, MEAN_SQR, STOP, SAVE, SUPERSEDED, SUSPEND, MOVE, TOTAL, ATOMIC, EVERY, STRIDE, LENGTH = range(12)


@dataclasses.dataclass(slots=True)
class _Pending:
    """A word that is being added up."""

    vector: torch.Tensor
    handle: Any
    norms: Landing | None


@dataclasses.dataclass(slots=True)
class _Timed:
    """Steps since the last report, all of one batch size."""

    steps: int = 0
    seconds: float = 0.0
    sync_steps: int = 0
    """Of which the waiting for others' gradients is known."""
    sync_s: float = 0.0


class TrainingRun:
    """See `start`. Attributes are for reading."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        checkpoints: Checkpoints | None,
        settings: _Settings,
        gpus: Allocation,
        run_epoch: int,
        channel: Channel | None = None,
    ) -> None:
        self.rank, self.world, self.device = group.rank, group.world, device
        self.gpus_per_replica, self.replicas = group.gpus_per_replica, group.replicas
        self.replica, self.place = group.replica, group.place
        """Which replica of the model this process belongs to, and which part of it this process has."""
        self.replica_group = group.replica_group
        """The processes of this replica, for the pipeline; None if it has only one."""
        self.run_epoch = run_epoch
        """The run's own number among all of the job: an older run writes no checkpoints (`penstock_profiles.wire`)."""
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
            channel.urgent = self._has_word
        self._saver = Saver(checkpoints) if checkpoints is not None else None
        self._noise = NoiseEstimator()
        self._timed = _Timed()
        self._pending: _Pending | None = None
        self._landing: Landing | None = None
        self._stop = False
        self._decided: BatchSize | None = None
        self._request: str | None = None
        self._saved_s = time.monotonic()
        self._reports = Pace(settings.report_every_s, self._saved_s)
        self._closed = False
        self._whole = True
        """Whether the next backward pass begins an optimiser step."""
        self._stride = 1
        """Every how many steps there is a word."""
        signal.signal(signal.SIGTERM, self._on_term)
        self._suspension = Suspension(settings.host_cap_bytes)
        # Some sites' warning before a time limit: not ours to die of.
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
        """Make the three elastic, and go on where the last run got to.

        Args:
            model: moved to this process's device and wrapped for data parallelism. A model that `fully_shard` (FSDP2) has
                taken apart stays as it is, and so does this process's part of one that several hold (`gpus_per_replica`).
            optimizer: of the model's parameters.
            dataset: with `__len__` and `__getitem__`, or a `Stream`.
            batch_size: total batch that the script was written for; the learning rate is for that.
            max_batch_size: largest total batch that trains well. None: the batch stays `batch_size` (strong-scaling, rigid).
                Where several processes hold the model, each replica takes `batch_size` samples, fewer where that exceeds this.
            max_atomic_batch: most samples of one process in one micro-step. None: what memory allows.
            lr_scaling: a name in `penstock_profiles.learning_rate.RULES`. None: `adascale`, for optimisers of Adam's kind
                `square_root`.
            scheduler: of the learning rate, per step at `batch_size`: it is stepped by progress. Do not step it yourself.
            scaler: a `torch.amp.GradScaler`, for mixed precision.
            max_grad_norm: gradients are clipped to it.
            state: name -> anything with `state_dict` and `load_state_dict` that a checkpoint should hold too.
            shuffle: whether each epoch has another order.
            drop_last: leave out an epoch's last step if it would be smaller: the shapes in a pipeline are fixed. The data set has
                at least `batch_size` samples then, and no batch is larger than it.
            loader: further arguments of `torch.utils.data.DataLoader`.

        Raises:
            ValueError: an argument is out of its range, or replicas of several processes cannot share the batch evenly.
        """
        largest = batch_size if max_batch_size is None else max_batch_size
        adam = any("betas" in group for group in optimizer.param_groups)
        rule = lr_scaling or ("square_root" if adam else "adascale")
        if rule not in RULES:
            raise ValueError(f"lr_scaling={rule!r} is not a rule; there are: {', '.join(RULES)}")
        if not 1 <= batch_size <= largest:
            raise ValueError(
                f"batch_size={batch_size}, max_batch_size={max_batch_size}: at least 1, and not the smaller last"
            )
        largest, self._size = limits_of(batch_size, largest, samples_of(dataset), drop_last=drop_last)
        self._initial, self._adaptive = batch_size, max_batch_size is not None
        self._apart = self.gpus_per_replica > 1
        if self._apart:
            trains = self._group.gather(any(each.requires_grad for each in model.parameters()))
            refuse_apart(self.gpus_per_replica, model, scaler=scaler, max_atomic_batch=max_atomic_batch, trains=trains)
        apart = batch_apart(batch_size, largest if self._adaptive else None, self.replicas) if self._apart else None
        self._rule: Rule = RULES[rule]
        self._chooser = BatchChooser(
            batch_size,
            largest,
            fixed=max_batch_size is None,
            gpu_type=self._gpus.gpu_type,
            nodes=self._gpus.nodes,
            replicas=self.replicas,
            memory_mb=self._memory_mb(),
        )
        if self._saver is not None:
            for gpu_type, atomic in short_of_memory.noted(self._saver.checkpoints.folder).items():
                self._chooser.out_of_memory(gpu_type, atomic)
        if max_atomic_batch is not None:
            self._chooser.limit(self._gpus.gpu_type, max_atomic_batch)
        if type(model).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "the model is wrapped by FullyShardedDataParallel (FSDP1); take fully_shard (FSDP2) in its place"
            )
        self._sharded = sharded = hasattr(model, "set_requires_gradient_sync")
        if self._saver is not None and (sharded or self._apart):
            self._saver.group = self._group.another(self.gpus_per_replica if self._apart else None)
            self._saver.parts = self._apart
        self._bare = model if sharded else model.to(self.device)
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._max_grad_norm = max_grad_norm
        self._more = dict(state or {})
        self._scheduled = 0
        position, batch = self._restore()
        if batch is not None and batch.total > largest:
            batch = None
        self._model = self._bare
        self._averager: Averager | None = None
        if self._apart:
            assert self._group.same_place is not None
            assert self._group.replica_group is not None
            self._averager = Averager(self._bare, self._group.same_place, self._group.replica_group)
        elif self.world > 1 and not sharded:
            devices = [self.device] if self.device.type == "cuda" else None
            self._model = DistributedDataParallel(self._bare, device_ids=devices, gradient_as_bucket_view=True)
        averaged = isinstance(self._model, DistributedDataParallel) or (self._apart and self.replicas > 1)
        self._meter = GradientMeter(list(self._bare.parameters()), optimizer, self.replicas, averaged=averaged)
        self._loader = Loader(
            dataset,
            apart or batch or self._chooser.choose(),
            (self.replica, self.replicas),
            seed=self._settings.seed,
            shuffle=shuffle,
            position=position,
            drop_last=drop_last,
            before_part=self._before_part,
            **loader,
        )
        self._batch = self._loader.size
        self._say_started()
        return self._model, optimizer, self._loader

    def epochs(self, count: int) -> Iterator[int]:
        """The passes over the data, from the one that the last run was in.

        With a fixed batch there are `count`. With an adaptive one, a sample of a large batch counts for less, and passes are
        made until the training is worth `count` passes at `batch_size`: at least `count`.
        """
        while not self._done(count):
            self._loader.epoch = self.epoch
            self._begun_s = time.perf_counter()
            yield self.epoch
            self._settle()
            self.epoch += 1
            self._loader.position = 0
            self._optimizer.zero_grad()
            self.save()
        if self._saver is not None:
            self._saver.wait()
        self._close("completed")

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Train on `loss`, the mean over one batch of the loader: once for each. The optimiser moves when a step is whole.

        With `gpus_per_replica`, without a loss: the pipeline has made the backward pass of this batch's mean loss.
        """
        if loss is None and self._averager is None:
            raise ValueError(
                "run.step() without a loss is for pipelines, with px.start(gpus_per_replica=...); give the loss"
            )
        part = self._loader.take()
        if self._whole:
            self._whole = False
            self._meter.begin(self.steps)
            self._hear_sync()
        if self._averager is not None:
            if loss is not None:
                loss.backward()
            self._meter.see_all()
            self._meter.sync.begin(cuda=self.device.type == "cuda")
            self._averager.average(part.weight)
        else:
            assert loss is not None
            weighted = loss if part.weight == 1 else loss * part.weight
            if self._scaler is not None:
                weighted = self._scaler.scale(weighted)
            if not part.last:
                weighted.backward()
                self._meter.after_micro_step(part)
                return
            with self._meter.before_average():
                weighted.backward()
        self._meter.sync.end()
        loss_scale = 1.0
        if self._scaler is not None:
            loss_scale = self._scaler.get_scale()
            self._scaler.unscale_(self._optimizer)
        norms = self._meter.after_step(part, loss_scale)
        if self._max_grad_norm is not None and self._averager is not None:
            self._averager.clip(self._max_grad_norm)
        elif self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._bare.parameters(), self._max_grad_norm)
        self._move(part.step_samples)
        self._optimizer.zero_grad()
        self.steps += 1
        self._loader.position += part.step_samples
        self._whole = True
        if self._channel is not None:
            self._channel.finish()
        active_s = self._time(part.step_samples)
        self._settle()
        landed, self._landing = self._landing, Landing(norms, part.step_samples) if norms is not None else None
        if landed is not None or self.steps % self._stride == 0:
            self._speak(landed)
        if self._channel is not None:
            self._channel.step_done(part.step_samples, active_s)
            # Time that it stood still for others is none of the next step's.
            self._begun_s = time.perf_counter()

    @property
    def noise(self) -> GradientNoise | None:
        """The estimate of the gradient's noise so far, at the initial batch size; None before the first."""
        return self._noise.noise

    def log(self, **values: object) -> None:
        """Write `values` to the log, once for all processes."""
        if self.rank == 0:
            log.info("epoch=%d step=%d %s", self.epoch, self.steps, " ".join(f"{k}={v}" for k, v in values.items()))

    def report(self, metric: float, *, minimize: bool = False) -> None:
        """Tell the daemon, once for all processes, what the model reaches by now: trials of a search are compared by it.

        Never waits. One that is not finite is only logged: a trial that has diverged stays at what it reached before.

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
        request, self._request = self._request, None
        asked = self.reporter.request if self.rank == 0 and self.reporter is not None else None
        if asked is not None and asked.kind == "checkpoint" and self.reporter is not None:
            request, self.reporter.request = asked.id, None
        everyones = self._group.gather(random_states())
        # Of a model taken apart each process writes its own part, and of several replicas the first writes.
        if self.rank == 0 or self._sharded or (self._apart and self.replica == 0):
            self._saver.wait()
            state, sharded = self._state(everyones)
            meta = self._meta()
            progress, steps = self.progress, self.steps
            pause_s = time.monotonic() - began_s

            def saved(seconds: float) -> None:
                self._put(Checkpointed(request=request, progress=progress, seconds=pause_s + seconds))
                log.info("step=%d checkpoint written pause_s=%.3f write_s=%.3f", steps, pause_s, seconds)

            self._saver.save(state, self.steps, meta, saved, sharded)
        self._saved_s = time.monotonic()
        # Time spent here is none of the next step's.
        self._begun_s = time.perf_counter()

    def learn(self, body: Body) -> None:
        """In the reporter's thread: take in what was measured, and choose the batch anew."""
        if isinstance(body, Observation):
            self._chooser.observe(body)
            if not self._apart:
                self._decided = self._chooser.choose()

    # What a step is made of.

    def _before_part(self, last: bool) -> None:
        """Whether the coming backward pass synchronises: DDP wants to know before the forward pass."""
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync = last
        elif hasattr(self._model, "set_requires_gradient_sync"):
            self._model.set_requires_gradient_sync(last)

    def _move(self, samples: int) -> None:
        """The optimiser's step, with the learning rate for this batch, and what it is worth."""
        scale = max(samples / self._initial, 1.0)
        noise = self._noise.noise if scale > 1 else None
        factor = self._rule(scale, noise) if scale > 1 else 1.0
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        if self._scaler is not None:
            loss_scale = self._scaler.get_scale()
            self._scaler.step(self._optimizer)
            self._scaler.update()
            moved = self._scaler.get_scale() >= loss_scale  # less: gradients overflowed, and the optimiser stayed
        else:
            self._optimizer.step()
            moved = True
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if not moved:
            return
        worth = scale if noise is None else float(gain(noise.grad_sqr, noise.grad_var, scale, 1.0))
        self.progress += min(samples, self._initial) * worth
        if self._scheduler is not None:
            while self._scheduled < int(self.progress / self._initial + 1e-9):
                self._scheduler.step()
                self._scheduled += 1

    def _time(self, samples: int) -> float:
        """Seconds that the step took."""
        now_s = time.perf_counter()
        active_s = now_s - self._begun_s
        if samples == self._batch.total:
            self._timed.steps += 1
            self._timed.seconds += active_s
        self._begun_s = now_s
        return active_s

    def _hear_sync(self) -> None:
        """Of the step before: on a GPU it is known only some time after this process has asked for it."""
        sync_s = self._meter.sync.take_s()
        if sync_s is not None:
            self._timed.sync_steps += 1
            self._timed.sync_s += sync_s

    def _speak(self, landed: Landing | None) -> None:
        """Say this process's word; and, on rank 0, report what was measured when it is time.

        The norms of a step are told after the next: they may be on a GPU still, which nobody waits for.
        """
        vector = torch.zeros(_Message.LENGTH, dtype=torch.float64)
        if landed is not None:
            vector[_Message.LOCAL_SQR : _Message.MEAN_SQR + 1] = landed.read()
        vector[_Message.STOP], vector[_Message.SUSPEND] = self._stop, self._suspension.asked
        if self.rank == 0:
            self._speak_for_all(vector)
        self._pending = _Pending(vector, self._group.add_up(vector), landed)
        urgent = (_Message.STOP, _Message.SAVE, _Message.SUPERSEDED, _Message.SUSPEND, _Message.MOVE)
        if self.world == 1 and any(vector[place] for place in urgent):
            self._settle()

    def _speak_for_all(self, vector: torch.Tensor) -> None:
        now = time.monotonic()
        asked = self.reporter.request.kind if self.reporter is not None and self.reporter.request is not None else None
        if asked is None and self._channel is not None and self._channel.request is not None:
            asked = "suspend"
        due = (
            now - self._saved_s >= self._settings.checkpoint_every_s
            and self._saver is not None
            and not self._saver.busy
        )
        vector[_Message.SAVE], vector[_Message.MOVE] = asked == "checkpoint" or due, asked == "suspend"
        vector[_Message.SUPERSEDED] = (self._saver is not None and self._saver.superseded) or (
            self.reporter is not None and self.reporter.superseded
        )
        if self._reports.due(now):
            self._report()
        decided, self._decided = self._decided, None
        if decided is not None and decided != self._batch:
            vector[_Message.TOTAL], vector[_Message.ATOMIC] = decided.total, decided.atomic
        if self.steps % PACED_EVERY == 0 and self._noise.weight >= TRUSTED_WEIGHT and self._timed.steps:
            step_s = self._timed.seconds / self._timed.steps
            if self._noise.weight >= SETTLED_WEIGHT:
                vector[_Message.EVERY] = self._pace(step_s)
            if self.world > 1:
                vector[_Message.STRIDE] = stride_of(step_s)

    def _has_word(self) -> bool:
        """Whether this process has heard something that all are to hear in the next step."""
        reporter = self.reporter
        heard = reporter is not None and (reporter.request is not None or reporter.superseded)
        return self._stop or self._suspension.asked or heard

    def _pace(self, step_s: float) -> int:
        meter = self._meter
        if not meter.measured:
            return meter.every
        measuring_s, meter.seconds, meter.measured = meter.seconds / meter.measured, 0.0, 0
        return pace(measuring_s, step_s)

    def _settle(self) -> None:
        """Hear what all said after the step before, and do it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.handle is not None:
            pending.handle.wait()
        word = pending.vector.tolist()
        if pending.norms is not None:
            self._take_norms(word[_Message.LOCAL_SQR], word[_Message.MEAN_SQR], pending)
        if word[_Message.EVERY]:
            self._meter.every = int(word[_Message.EVERY])
        if word[_Message.STRIDE]:
            self._stride = int(word[_Message.STRIDE])
        if word[_Message.TOTAL]:
            before = self._atomic
            self._loader.size = self._batch = BatchSize(int(word[_Message.TOTAL]), int(word[_Message.ATOMIC]))
            self._timed, self._meter.sync = _Timed(), SyncTimer()
            if self._atomic > before:
                self.save()  # memory may not suffice
            log.info("step=%d batch=%d atomic=%d", self.steps, self._batch.total, self._batch.atomic)
        if word[_Message.SUPERSEDED]:
            self._leave("superseded", SUPERSEDED)
        if word[_Message.STOP]:
            self.save()
            if self._saver is not None:
                self._saver.wait()
            self._leave("stopped", STOPPED)
        if word[_Message.SAVE]:
            self.save()
        if word[_Message.SUSPEND] or word[_Message.MOVE]:
            self._stand_still(asked_by_daemon=bool(word[_Message.MOVE]))

    def _stand_still(self, *, asked_by_daemon: bool) -> None:
        """Move off the GPUs until this job may go on. While it stands still, processes exchange nothing: they may be frozen."""
        request, environment, channel = None, read_environment(), self._channel
        by_agent = False
        if asked_by_daemon:
            asked = self.reporter.request if self.reporter is not None else None
            if self.reporter is not None and asked is not None and asked.kind == "suspend":
                request, self.reporter.request = asked.id, None
            elif channel is not None and channel.request is not None:
                request, by_agent = channel.request, True
            request, by_agent = self._group.from_first((request, by_agent))
            if request is None:
                return  # the daemon has asked for something else meanwhile
        own = self._suspension.move_out(self._optimizer, self._bare.parameters())
        moved = self._group.gather(own) if asked_by_daemon else [own]
        self._put(
            Suspended(
                request=None if by_agent else request,
                moved_bytes=sum(each.size for each in moved),
                left_bytes=sum(each.left for each in moved),
                seconds=max(each.seconds for each in moved),
            )
        )
        wanted: Callable[[], bool] | None = None
        if by_agent and channel is not None and request is not None:
            channel.suspended(request, own.size / MIB, own.left / MIB)
            wanted = partial(channel.wants, request)
        elif request is not None:
            wanted = lambda: present_request(environment) == request  # noqa: E731 - one line, one use
        self._suspension.wait(wanted)
        self._put(Resumed(seconds=self._suspension.move_back()))
        if channel is not None:
            channel.resumed()
        self._begun_s = time.perf_counter()

    def _take_norms(self, local_sqr: float, mean_sqr: float, pending: _Pending) -> None:
        norms = pending.norms
        assert norms is not None
        if not (math.isfinite(local_sqr) and math.isfinite(mean_sqr)):
            return  # gradients overflowed, as they may in mixed precision
        moments = Moments(local_sqr, min(mean_sqr, local_sqr), norms.count, consecutive=norms.consecutive)
        with contextlib.suppress(ValueError):  # a step that says nothing
            self._noise.update(moments, norms.step_samples / self._initial)

    # What is said to the daemon.

    def _put(self, body: Body) -> None:
        if self.reporter is not None:
            self.reporter.put(body)

    def _say_started(self) -> None:
        self._begun_s = time.perf_counter()
        self._put(Started(gpu_type=self._gpus.gpu_type, gpu_ids=self._gpus.gpu_ids, progress=self.progress))

    def _report(self) -> None:
        timed, self._timed = self._timed, _Timed()
        if not timed.steps:
            return
        noise = self._noise.noise if self._noise.weight >= TRUSTED_WEIGHT else None
        step_time_s = timed.seconds / timed.steps
        scale = self._batch.total / self._initial
        worth = scale if noise is None else float(gain(noise.grad_sqr, noise.grad_var, scale, 1.0))
        peak_mb = torch.cuda.max_memory_allocated() / MIB if self.device.type == "cuda" else None
        self._put(
            Observation(
                gpu_type=self._gpus.gpu_type,
                nodes=self._gpus.nodes,
                gpus=self.world,
                gpus_per_replica=self.gpus_per_replica,
                atomic_batch=self._atomic,
                accumulation_steps=self._batch.accumulation_steps(self.replicas),
                steps=timed.steps,
                step_time_s=step_time_s,
                sync_time_s=self._sync_time_s(timed, step_time_s),
                grad_sqr=noise.grad_sqr if noise else None,
                grad_var=noise.grad_var if noise else None,
                goodput=self._initial * worth / step_time_s,
                memory_mb=peak_mb,
                progress=self.progress,
            )
        )

    def _sync_time_s(self, timed: _Timed, step_time_s: float) -> float | None:
        if self.replicas == 1:
            return 0.0
        return min(timed.sync_s / timed.sync_steps, 0.999 * step_time_s) if timed.sync_steps else None

    def _close(self, outcome: Any, text: str = "") -> None:
        if not self._closed:
            self._closed = True
            if self.reporter is not None:
                self.reporter.close(outcome, self.progress, text)

    def _leave(self, outcome: str, status: int) -> None:
        """End this process as all the others end."""
        failure = self._saver.failure if self._saver is not None else None
        self._group.barrier()
        self._close(outcome, str(failure or ""))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        raise SystemExit(status)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In place of Python's: say that the run fails; where memory was short, begin again with a smaller batch."""
        self._close("failed", f"{kind.__name__}: {error}")
        self._excepthook(kind, error, trace)
        if not (isinstance(error, Exception) and is_out_of_memory(error)) or self._saver is None or self._atomic <= 1:
            return
        if self._apart:
            return  # the shapes in a pipeline are the script's
        short_of_memory.note(self._saver.checkpoints.folder, self._gpus.gpu_type, self._atomic)
        log.error("gpu_type=%s atomic=%d does not fit into memory: again with fewer", self._gpus.gpu_type, self._atomic)
        short_of_memory.begin_again(self.world, read_environment().job_id)

    @property
    def _atomic(self) -> int:
        """Samples of the largest part of a step."""
        batch = self._batch
        return -(-batch.total // (self.replicas * (batch.accumulation_steps(self.replicas) + 1)))

    def _on_term(self, _number: int, _frame: object) -> None:
        self._stop = True

    def _memory_mb(self) -> float | None:
        if self.device.type != "cuda":
            return None
        return float(torch.cuda.get_device_properties(self.device).total_memory) / MIB

    def _done(self, count: int) -> bool:
        if self._size is None or not self._adaptive:
            return self.epoch >= count
        return self.epoch >= count and self.progress >= count * self._size * (1 - 1e-9)

    # Checkpoints.

    def _state(self, random: list[Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What one process writes, and what each writes of a model taken apart (None if it is whole).

        Of a model that several processes hold, the script's own state is each process's as well.
        """
        model = (
            self._shards()
            if self._sharded
            else {"model": self._bare.state_dict(), "optimizer": self._optimizer.state_dict()}
        )
        more = {f"more.{name}": each.state_dict() for name, each in self._named().items()}
        if self._sharded:
            return dict(copied(more)) | {"random": random}, dict(copied(model))
        if self._apart:
            return {"random": random}, dict(copied(model | more))
        return dict(copied(model | more)) | {"random": random}, None

    def _shards(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._bare, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _meta(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self._loader.position,
            "progress": self.progress,
            "scheduled": self._scheduled,
            "batch": dataclasses.asdict(self._batch),
            "initial": self._initial,
            "gpus": [self._gpus.gpu_type, self._gpus.nodes, self.world],
            "gpus_per_replica": self.gpus_per_replica,
            "noise": self._noise.state_dict(),
            "learned": self._chooser.state_dict(),
        }

    def _named(self) -> dict[str, Any]:
        named = {"scheduler": self._scheduler, "scaler": self._scaler} | self._more
        return {name: each for name, each in named.items() if each is not None}

    def _newest(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """The newest whole one, by rank 0's word. Shards are read by all processes, each its share."""
        candidates = checkpoints.candidates() if self.rank == 0 else iter(())
        while True:
            first = next(candidates, None)
            which = self._group.from_first((first.epoch, first.step) if first else None)
            if which is None:
                return None
            found = first if first is not None else checkpoints.find(*which)
            harm = found.shards.harm(self.rank, self.world) if found is not None and found.shards is not None else None
            everyones = self._group.gather((found is not None, harm))
            if not all(seen for seen, _ in everyones):
                raise RuntimeError(
                    f"not all processes see checkpoint {which} of rank 0: put them on a shared file system"
                )
            harms = [each for _, each in everyones if each is not None]
            if not harms:
                return found
            if first is not None:
                checkpoints.pass_over(first, harms[0])

    def _restore(self) -> tuple[int, BatchSize | None]:
        """Take up the newest checkpoint; the position in its epoch, and its batch if we are where it was made."""
        saver = self._saver
        found = self._newest(saver.checkpoints) if saver is not None else None
        if saver is None or found is None:
            return 0, None
        assert isinstance(found.state, bytes)
        meta, state = found.meta, from_bytes(found.state)
        apart = meta.get("gpus_per_replica", 1)
        if apart != self.gpus_per_replica:
            raise RuntimeError(
                f"the checkpoint is of a model that {apart} processes held, and now there are {self.gpus_per_replica}: where"
                " types of GPU need another number (--scale-unit by type), keep to one of them with --gpu-types"
            )
        if (self._sharded or self._apart) != (found.shards is not None):
            raise RuntimeError(
                "the checkpoint is of a model sharded by fully_shard and this one is not, or the reverse"
            )
        if found.shards is not None and self._apart:
            part = read_part(found.shards.folder, self.place)
            self._bare.load_state_dict(part["model"])
            self._optimizer.load_state_dict(part["optimizer"])
            state |= part
        elif found.shards is not None:
            from torch.distributed.checkpoint.state_dict import set_state_dict

            into = self._shards()
            read_shards(found.shards.folder, into, saver.group)
            parts = {"model_state_dict": into["model"], "optim_state_dict": into["optimizer"]}
            set_state_dict(self._bare, self._optimizer, **parts)
        else:
            self._bare.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        for name, each in self._named().items():
            if f"more.{name}" in state:
                each.load_state_dict(state[f"more.{name}"])
        if len(state["random"]) == self.world:
            set_random_states(state["random"][self.rank])
        self.steps, self.epoch, self.progress = found.step, meta["epoch"], meta["progress"]
        self._scheduled = meta["scheduled"]
        self._noise.load_state_dict(meta["noise"])
        self._chooser.load_state_dict(meta["learned"])
        log.info("step=%d epoch=%d position=%d goes on", self.steps, self.epoch, meta["position"])
        here = [self._gpus.gpu_type, self._gpus.nodes, self.world]
        batch = BatchSize(**meta["batch"])
        fits = batch.atomic <= self._chooser.limit_of(self._gpus.gpu_type)
        return meta["position"], batch if meta["gpus"] == here and self._adaptive and fits else None


def _channel(environment: Environment, device: torch.device, ranks: Ranks) -> Channel | None:
    most_pause_s = MOST_PAUSE_S if ranks.world > 1 else math.inf
    if device.type != "cuda":
        return open_channel(environment, ranks.local_rank, most_pause_s=most_pause_s)
    return open_channel(
        environment,
        ranks.local_rank,
        anywhere=False,
        limit_memory=partial(limit_memory, device),
        memory_mb=partial(held_mb, device),
        finish=partial(torch.cuda.synchronize, device),
        most_pause_s=most_pause_s,
    )


def _allocation(environment: Any, gpu_type: str | None, device: torch.device, ranks: Any) -> Allocation:
    if gpu_type is None and environment.job_id is None and device.type == "cuda":
        gpu_type = torch.cuda.get_device_name(device)
    try:
        found = find_allocation(environment, gpu_type)
    except UnknownAllocation:
        found = Allocation(CPU, {})
    if found.gpus and found.gpus != ranks.world:
        log.warning("%d processes train on %d GPUs of the job; start one for each", ranks.world, found.gpus)
    return found if found.gpu_ids else Allocation(found.gpu_type or CPU, {environment.node or "localhost": ()})
