"""A callback for the `Trainer` of Hugging Face transformers.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[PenstockCallback()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))

On the daemon's request and on SIGTERM, the Trainer saves one of its own checkpoints into `output_dir`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from penstock_executor.integrations.training_monitor import TrainingMonitor


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

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report that the run starts, and at which step."""
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
        save, stop = self._monitor.step_done(state.global_step)
        control.should_save |= save
        control.should_training_stop |= stop

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Report the metric."""
        if self._monitor is not None and self._metric is not None and self._metric in (metrics or {}):
            self._monitor.report(float(metrics[self._metric]), minimize=self._minimize)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint."""
        assert self._monitor is not None
        self._monitor.saved()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of the run."""
        assert self._monitor is not None
        self._monitor.end()
