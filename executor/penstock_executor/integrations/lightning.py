"""A callback for the `Trainer` of PyTorch Lightning.

::

    penstock = PenstockCallback("checkpoints")
    trainer = Trainer(callbacks=[penstock], ...)
    trainer.fit(module, data, ckpt_path=penstock.latest())

An adaptive batch takes the place of the `DataLoader`::

    batch = AdaptiveBatch(dataset, batch_size=64, max_batch_size=1024, num_workers=2)
    penstock = PenstockCallback("checkpoints", batch)
    trainer.fit(module, batch.loader, ckpt_path=penstock.latest())

On the daemon's request and on SIGTERM, it saves one of Lightning's checkpoints to a temporary file and renames it over
the one before. After SIGTERM, the process then exits with status 143, and nothing after `trainer.fit` runs.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from penstock_executor.checkpoint import unreadable
from penstock_executor.environment import read_ranks
from penstock_executor.integrations.adaptive import AdaptiveBatch
from penstock_executor.integrations.training_monitor import TrainingMonitor
from penstock_executor.training.workers import protect_workers


class PenstockCallback(Callback):  # type: ignore[misc]
    """Reports, checkpoints on request and at each epoch's end, and a clean stop.

    Args:
        folder: for checkpoints, on a file system that all nodes share.
        batch_size: samples of one process in a micro-step. With `penstock_executor.share(64)`, here and in the
            `DataLoader`, a step has 64 samples on any number of processes. Or the `AdaptiveBatch` whose loader the
            Trainer trains with.
        report_every_s: seconds between two reports. The first few reports follow each other faster.
        metric: name of a metric that the module logs in validation, such as `val_accuracy`. A search compares its
            trials by it. None: no metric is reported.
        minimize: whether less is better, as of `val_loss`.
    """

    def __init__(
        self,
        folder: str | Path,
        batch_size: int | AdaptiveBatch,
        report_every_s: float = 30.0,
        *,
        metric: str | None = None,
        minimize: bool = False,
    ) -> None:
        self._folder, self._report_every_s = Path(folder), report_every_s
        self._batch = batch_size if isinstance(batch_size, AdaptiveBatch) else None
        self._atomic = batch_size.size.atomic if isinstance(batch_size, AdaptiveBatch) else batch_size
        self._metric, self._minimize = metric, minimize
        self._monitor: TrainingMonitor | None = None
        self._last = -1
        self._place = (0, 0, 0)
        """With an adaptive batch: where the run begins, as `LoopLoader.go_to` takes it."""
        protect_workers()

    def latest(self) -> str | None:
        """The newest checkpoint, for `ckpt_path` of `Trainer.fit`; None if there is none.

        Raises:
            Unreadable: it cannot be read.
        """
        path = self._folder / "penstock.ckpt"
        try:
            path.open("rb").close()  # not `exists`, which takes some errors for no
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        return str(path)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Report that the run starts, and at which step.

        Raises:
            ValueError: the Trainer does what an adaptive batch cannot.
        """
        steps = trainer.estimated_stepping_batches
        samples = self._atomic * trainer.accumulate_grad_batches * trainer.world_size
        done = trainer.global_step
        if self._batch is not None:
            _check(trainer)
            self._batch.attach(pl_module, trainer.optimizers[0])
            # Not sooner: the length of the whole epoch has told the script how long its schedule is.
            self._batch.loader.go_to(*self._place)
            self._batch.loader.set_epoch(trainer.current_epoch)
            samples, done = self._batch.initial, self._batch.steps
            # Lightning does not know that the loader begins at the right sample.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        self._monitor = TrainingMonitor(
            self._folder / "penstock",
            samples_per_step=samples,
            atomic_batch=self._atomic,
            steps=done,
            total_steps=int(steps) if steps != float("inf") else None,
            report_every_s=self._report_every_s,
            device=pl_module.device,
            batch=self._batch,
        )
        self._last = trainer.global_step
        loop = trainer.fit_loop
        if self._batch is not None:
            self._set_length(trainer)
        elif getattr(loop, "_combined_loader_states_to_load", None):
            # The module has used `estimated_stepping_batches` to configure its schedule, as most do. Then Lightning
            # (2.6) makes the loaders before it knows their states in the checkpoint, and never sets them.
            loop._load_combined_loader_states()
            iter(loop._data_fetcher)
        elif loop.restarting:
            _skip(loop, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """With an adaptive batch: the loader begins the epoch."""
        if self._batch is not None and self._monitor is not None:
            self._batch.loader.set_epoch(trainer.current_epoch)
            self._set_length(trainer)
            self._monitor.restart_clock()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """With an adaptive batch: the step begins."""
        if self._batch is not None:
            self._batch.begin_step()

    def on_before_backward(self, *_: Any) -> None:
        """With an adaptive batch: measure the gradients."""
        if self._batch is not None:
            self._batch.begin_backward()

    def on_after_backward(self, *_: Any) -> None:
        """With an adaptive batch: the gradients are measured."""
        if self._batch is not None:
            self._batch.end_backward()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Do what the daemon asks for, once per optimiser step."""
        if trainer.global_step == self._last:
            return
        self._last = trainer.global_step
        assert self._monitor is not None
        if self._batch is None:
            save, stop = self._monitor.step_done(trainer.global_step)
        else:
            save, stop = self._adapt(trainer, pl_module, self._batch, self._monitor)
        if save:
            self._save(trainer, must=stop)
        if stop:
            self._monitor.leave()

    def _adapt(self, trainer: Any, pl_module: Any, batch: AdaptiveBatch, monitor: TrainingMonitor) -> tuple[bool, bool]:
        """After a step: the schedules follow the samples, and the batch may change. Returns what `step_done` does."""
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not isinstance(config.scheduler, ReduceLROnPlateau):
                for _ in range(batch.steps_of_this - 1):  # Lightning has made one of them
                    pl_module.lr_scheduler_step(config.scheduler, None)
        before = batch.size
        save, stop = monitor.step_done(batch.steps + batch.steps_of_this)
        if batch.size != before:
            self._set_length(trainer)
        return save, stop

    def _set_length(self, trainer: Any) -> None:
        """Tell Lightning how many batches the epoch has now. It (2.6) asks a loader only once, and by this it knows the
        last batch, and when to validate."""
        assert self._batch is not None
        loop, length = trainer.fit_loop, len(self._batch.loader)
        loop.max_batches = loop._data_fetcher.length = length
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(int(length * trainer.val_check_interval), 1)

    def state_dict(self) -> dict[str, Any]:
        """With an adaptive batch: what it has learned, and the place in the epoch. Lightning saves it."""
        if self._batch is None:
            return {}
        loader = self._batch.loader
        return {"learned": self._batch.state_dict(), "place": [loader.epoch, loader.position, loader.steps]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        if self._batch is None or not state_dict:
            return
        self._batch.load_state_dict(state_dict["learned"])
        self._place = state_dict["place"]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the metric. Before training starts there is no monitor, so Lightning's sanity check reports
        nothing."""
        if self._monitor is not None and self._metric is not None and self._metric in trainer.callback_metrics:
            self._monitor.report(float(trainer.callback_metrics[self._metric]), minimize=self._minimize)
        if self._monitor is not None:
            self._monitor.restart_clock()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save."""
        self._save(trainer, must=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the end of the run."""
        assert self._monitor is not None
        self._monitor.end()

    def _save(self, trainer: Any, *, must: bool) -> None:
        """Save. If that fails and need not be (`must`), training goes on and the monitor tries again later."""
        assert self._monitor is not None
        beside = self._folder / "penstock.ckpt.tmp"
        failure: Exception | None = None
        try:
            trainer.save_checkpoint(beside)
        except Exception as error:
            failure = error
            trainer.strategy.barrier("Trainer.save_checkpoint")  # its last line: the other processes wait there
        if trainer.is_global_zero:
            try:
                if failure is None:
                    with beside.open("rb") as file:
                        os.fsync(file.fileno())
                    beside.rename(self._folder / "penstock.ckpt")
            except OSError as error:
                failure = error
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)  # else it would keep a full disk full
        if failure is None:
            self._monitor.saved()
        elif must:
            raise failure
        else:
            self._monitor.not_saved(failure)


def sampler(dataset: Any, *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
    """The `sampler` of a training `DataLoader` with the same order of samples on any number of processes.

    Lightning chooses one order for a single process and another for several, so after a move in mid-epoch some samples would be
    seen twice and others never. If the number of processes does not divide the length of `dataset`, the last step of an epoch is
    filled up with samples that were seen before.
    """
    ranks = read_ranks()
    return DistributedSampler(dataset, num_replicas=ranks.world, rank=ranks.rank, shuffle=shuffle, seed=seed)


def _check(trainer: Any) -> None:
    """Raise ValueError if the Trainer does what an adaptive batch cannot."""
    frequencies = {config.frequency for config in trainer.lr_scheduler_configs if config.interval == "step"}
    for refused, why in (
        (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches: leave it at 1"),
        (trainer.max_steps != -1, "max_steps, since steps have different sizes: use max_epochs"),
        (len(trainer.optimizers) != 1, f"{len(trainer.optimizers)} optimizers"),
        (not trainer.lightning_module.automatic_optimization, "manual optimization"),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            "16-mixed: use bf16-mixed, which needs no loss scale",
        ),
        (frequencies - {1}, "schedules with another frequency than 1"),
    ):
        if refused:
            raise ValueError(f"an adaptive batch does not work with {why}")


def _skip(loop: Any, epoch: int) -> None:
    """Leave out the batches of the epoch that were trained on before the restart.

    Lightning (2.6) continues to count from there, but reads a loader without a state from its beginning, with workers even in the
    order of the first epoch: some samples would be seen twice and others never.
    """
    for loader in loop._combined_loader.flattened:
        order = getattr(loader, "sampler", None)
        if order is not None and hasattr(order, "set_epoch"):
            order.set_epoch(epoch)
    fetcher, batches = loop._data_fetcher, loop.epoch_loop.batch_progress.current.ready
    iter(fetcher)
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched -= batches  # Lightning adds them itself
    fetcher.done = False
