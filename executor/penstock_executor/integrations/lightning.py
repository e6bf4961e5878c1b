"""A callback for the `Trainer` of PyTorch Lightning.

::

    penstock = PenstockCallback("checkpoints")
    trainer = Trainer(callbacks=[penstock], ...)
    trainer.fit(module, data, ckpt_path=penstock.latest())

On the daemon's request and on SIGTERM, it saves one of Lightning's checkpoints to a temporary file and renames it over
the one before. After SIGTERM, the process then exits with status 143, and nothing after `trainer.fit` runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils.data import DistributedSampler

from penstock_executor.environment import read_ranks
from penstock_executor.integrations.training_monitor import TrainingMonitor
from penstock_executor.training.workers import protect_workers


class PenstockCallback(Callback):  # type: ignore[misc]
    """Reports, checkpoints on request and at each epoch's end, and a clean stop.

    Args:
        folder: for checkpoints, on a file system that all nodes share.
        batch_size: samples of one process in a micro-step. With `penstock_executor.share(64)`, here and in the
            `DataLoader`, a step has 64 samples on any number of processes.
        report_every_s: seconds between two reports. The first few reports follow each other faster.
        metric: name of a metric that the module logs in validation, such as `val_accuracy`. A search compares its
            trials by it. None: no metric is reported.
        minimize: whether less is better, as of `val_loss`.
    """

    def __init__(
        self,
        folder: str | Path,
        batch_size: int,
        report_every_s: float = 30.0,
        *,
        metric: str | None = None,
        minimize: bool = False,
    ) -> None:
        self._folder, self._batch_size, self._report_every_s = Path(folder), batch_size, report_every_s
        self._metric, self._minimize = metric, minimize
        self._monitor: TrainingMonitor | None = None
        self._last = -1
        protect_workers()

    def latest(self) -> str | None:
        """The newest checkpoint, for `ckpt_path` of `Trainer.fit`; None if there is none."""
        path = self._folder / "penstock.ckpt"
        return str(path) if path.exists() else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Report that the run starts, and at which step."""
        steps = trainer.estimated_stepping_batches
        self._monitor = TrainingMonitor(
            self._folder / "penstock",
            samples_per_step=self._batch_size * trainer.accumulate_grad_batches * trainer.world_size,
            atomic_batch=self._batch_size,
            steps=trainer.global_step,
            total_steps=int(steps) if steps != float("inf") else None,
            report_every_s=self._report_every_s,
            device=pl_module.device,
        )
        self._last = trainer.global_step
        loop = trainer.fit_loop
        if getattr(loop, "_combined_loader_states_to_load", None):
            # The module has used `estimated_stepping_batches` to configure its schedule, as most do. Then Lightning
            # (2.6) makes the loaders before it knows their states in the checkpoint, and never sets them.
            loop._load_combined_loader_states()
            iter(loop._data_fetcher)
        elif loop.restarting:
            _skip(loop, trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Do what the daemon asks for, once per optimiser step."""
        if trainer.global_step == self._last:
            return
        self._last = trainer.global_step
        assert self._monitor is not None
        save, stop = self._monitor.step_done(trainer.global_step)
        if save:
            self._save(trainer)
        if stop:
            self._monitor.leave()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the metric. Before training starts there is no monitor, so Lightning's sanity check reports
        nothing."""
        if self._monitor is not None and self._metric is not None and self._metric in trainer.callback_metrics:
            self._monitor.report(float(trainer.callback_metrics[self._metric]), minimize=self._minimize)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save."""
        self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the end of the run."""
        assert self._monitor is not None
        self._monitor.end()

    def _save(self, trainer: Any) -> None:
        beside = self._folder / "penstock.ckpt.tmp"
        trainer.save_checkpoint(beside)
        assert self._monitor is not None
        if trainer.is_global_zero:
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.rename(self._folder / "penstock.ckpt")
        self._monitor.saved()


def sampler(dataset: Any, *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
    """The `sampler` of a training `DataLoader` with the same order of samples on any number of processes.

    Lightning chooses one order for a single process and another for several, so after a move in mid-epoch some samples would be
    seen twice and others never. If the number of processes does not divide the length of `dataset`, the last step of an epoch is
    filled up with samples that were seen before.
    """
    ranks = read_ranks()
    return DistributedSampler(dataset, num_replicas=ranks.world, rank=ranks.rank, shuffle=shuffle, seed=seed)


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
