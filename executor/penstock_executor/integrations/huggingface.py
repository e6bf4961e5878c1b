"""A callback for the `Trainer` of Hugging Face transformers.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[PenstockCallback()])
    trainer.train(resume_from_checkpoint=latest_checkpoint(args.output_dir))

On the daemon's request and on SIGTERM, the Trainer saves one of its own checkpoints into `output_dir`. After SIGTERM,
the process then exits with status 143, and nothing after `trainer.train` runs.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, __version__
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from penstock_executor.integrations.training_monitor import TrainingMonitor
from penstock_executor.training.workers import protect_workers

log = logging.getLogger(__name__)

RESTORES_BATCH = int(__version__.partition(".")[0]) < 5
"""Whether the Trainer takes the batch size of each process from the checkpoint."""


def latest_checkpoint(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint in the Trainer's `output_dir`, for `resume_from_checkpoint`; None if there is none.

    The Trainer writes a checkpoint file by file, `trainer_state.json` last. If the job is killed meanwhile, that file
    is missing or truncated, and the checkpoint before it is returned. `get_last_checkpoint` of transformers would
    return the broken one.
    """
    found = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = folder.name.rpartition("-")[2]
        if folder.is_dir() and number.isdecimal():
            found.append((int(number), folder))
    for _, folder in sorted(found, reverse=True):
        try:
            json.loads((folder / "trainer_state.json").read_bytes())
        except (OSError, ValueError) as error:
            log.warning("path=%s checkpoint skipped: it is not whole: %s", folder, error)
            continue
        return str(folder)
    return None


class PenstockCallback(TrainerCallback):  # type: ignore[misc]
    """Reports, checkpoints on request, and a clean stop.

    Args:
        report_every_s: seconds between two reports. The first few reports follow each other faster.
        metric: name of a metric of each evaluation, such as `eval_accuracy`. A search compares its trials by it. None:
            no metric is reported.
        minimize: whether less is better, as of `eval_loss`.
    """

    def __init__(self, report_every_s: float = 30.0, *, metric: str | None = None, minimize: bool = False) -> None:
        self._report_every_s, self._metric, self._minimize = report_every_s, metric, minimize
        self._monitor: TrainingMonitor | None = None
        self._stopping = False
        protect_workers()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report that the run starts, and at which step.

        Raises:
            RuntimeError: the Trainer would train with the batch size of the checkpoint, which is that of another number of
                processes.
        """
        saved = state.train_batch_size
        if RESTORES_BATCH and saved not in (None, args.train_batch_size) and not args.auto_find_batch_size:
            raise RuntimeError(
                f"transformers {__version__} goes on with the {saved} samples a process of the checkpoint, not with"
                f" {args.train_batch_size}: to move a job to another number of GPUs, install transformers 5"
            )
        atomic = args.per_device_train_batch_size
        self._monitor = TrainingMonitor(
            Path(args.output_dir) / "penstock",
            samples_per_step=atomic * args.gradient_accumulation_steps * args.world_size,
            atomic_batch=atomic,
            steps=state.global_step,
            total_steps=state.max_steps,
            report_every_s=self._report_every_s,
            device=args.device,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do what the daemon asks for."""
        assert self._monitor is not None
        save, self._stopping = self._monitor.step_done(state.global_step)
        control.should_save |= save
        if self._stopping:
            control.should_evaluate = False  # there may be no time for it

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Report the metric."""
        if self._monitor is not None and self._metric is not None and self._metric in (metrics or {}):
            self._monitor.report(float(metrics[self._metric]), minimize=self._minimize)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint. If the job must stop, exit."""
        assert self._monitor is not None
        self._monitor.saved()
        if self._stopping and state.global_step < state.max_steps:
            self._monitor.leave()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of the run."""
        assert self._monitor is not None
        self._monitor.end()
