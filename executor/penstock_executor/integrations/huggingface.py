"""A callback for the `Trainer` of Hugging Face transformers.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[PenstockCallback()])
    trainer.train(resume_from_checkpoint=latest_checkpoint(args.output_dir))

With `ElasticTrainer` in place of `Trainer`, the batch adapts as well::

    trainer = ElasticTrainer(model, args, train_dataset=data, batch_size=64, max_batch_size=1024)

On the daemon's request and on SIGTERM, the Trainer saves one of its own checkpoints into `output_dir`. After SIGTERM,
the process then exits with status 143, and nothing after `trainer.train` runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, __version__
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from penstock_executor.checkpoint import Unreadable, unreadable
from penstock_executor.integrations.adaptive import AdaptiveBatch
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

    Raises:
        Unreadable: some were written to their end, and none is whole, or one cannot be read.
    """
    output_dir = Path(output_dir)
    try:
        names = os.listdir(output_dir)
    except FileNotFoundError:
        return None
    numbers = {
        int(number): name
        for name in names
        if (number := name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")) != name and number.isdecimal()
    }
    damaged = []
    for _, name in sorted(numbers.items(), reverse=True):
        path = output_dir / name / "trainer_state.json"
        try:
            content = path.read_bytes()
            json.loads(content)
        except ValueError as error:
            log.warning("path=%s checkpoint skipped: it is not whole: %s", path.parent, error)
            damaged += [name] if content else []  # an empty file: a kill left it
        except (FileNotFoundError, NotADirectoryError):
            log.warning("path=%s checkpoint skipped: it was not written to its end", path.parent)
        except OSError as error:
            raise unreadable(path, error) from error
        else:
            return str(path.parent)
    if damaged:
        raise Unreadable(
            f"{output_dir}: none of the checkpoints is whole ({', '.join(damaged)}; the log says what is wrong with each);"
            " to begin anew, move them away"
        )
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
        self.alone = False
        """Whether only Penstock wants the present checkpoint, and the job goes on after it."""
        self._failed = False
        """Whether it could not be written."""
        self.batch: AdaptiveBatch | None = None
        """That adapts; `Elastic` sets it."""
        self._before = 0
        """Steps before the present one, with an adaptive batch."""
        protect_workers()
        _tolerate_failures()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
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
        samples = atomic * args.gradient_accumulation_steps * args.world_size
        if self.batch is not None:
            samples = self.batch.initial
            self._continue(self.batch, args, state, model, optimizer)
        self._monitor = TrainingMonitor(
            Path(args.output_dir) / "penstock",
            samples_per_step=samples,
            atomic_batch=atomic,
            steps=state.global_step,
            total_steps=state.max_steps,
            report_every_s=self._report_every_s,
            device=args.device,
            batch=self.batch,
        )

    def _continue(self, batch: AdaptiveBatch, args: Any, state: Any, model: Any, optimizer: Any) -> None:
        batch.attach(model, getattr(optimizer, "optimizer", optimizer))
        batch.go_to(state.global_step)
        path = _learned(args, state)
        if path.exists():
            batch.load_state_dict(json.loads(path.read_bytes()))
        elif state.global_step:
            log.warning("path=%s is missing: the batch begins anew at %d", path, batch.initial)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What came before is no part of a step."""
        if self._monitor is not None:
            self._monitor.restart_clock()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """With an adaptive batch, the Trainer counts steps of the initial size."""
        if self.batch is not None:
            self._before = state.global_step
            state.global_step += self.batch.steps_of_this - 1  # the Trainer adds one itself

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        """Do what the daemon asks for."""
        assert self._monitor is not None
        if self.batch is not None:
            self._catch_up(args, state, control, lr_scheduler)
        save, self._stopping = self._monitor.step_done(state.global_step)
        self.alone = save and not control.should_save and not self._stopping
        control.should_save |= save
        if self._stopping:
            control.should_evaluate = False  # there may be no time for it

    def _catch_up(self, args: Any, state: Any, control: Any, schedule: Any) -> None:
        """Do what is due in the steps that the present one stands for: the Trainer looks at the last of them only."""
        assert self.batch is not None
        if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            for _ in range(self._before + 1, state.global_step):
                schedule.step()
        state.epoch = state.global_step / self.batch.steps_per_epoch
        for strategy, every, flag in (
            (args.logging_strategy, state.logging_steps, "should_log"),
            (args.eval_strategy, state.eval_steps, "should_evaluate"),
            (args.save_strategy, state.save_steps, "should_save"),
        ):
            if strategy == "steps" and every and state.global_step // every > self._before // every:
                setattr(control, flag, True)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Report the metric."""
        if self._monitor is not None and self._metric is not None and self._metric in (metrics or {}):
            self._monitor.report(float(metrics[self._metric]), minimize=self._minimize)
        if self._monitor is not None:
            self._monitor.restart_clock()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint. If the job must stop, exit."""
        assert self._monitor is not None
        failed, self.alone, self._failed = self._failed, False, False
        if failed:
            return
        if self.batch is not None and state.is_world_process_zero:
            self._write_learned(_learned(args, state), json.dumps(self.batch.state_dict()))
        self._monitor.saved()
        if self._stopping and state.global_step < state.max_steps:
            self._monitor.leave()

    def _write_learned(self, path: Path, text: str) -> None:
        beside = path.with_suffix(".tmp")
        try:
            beside.write_text(text)
            beside.rename(path)
        except OSError as error:
            log.error("%s: a run that continues from this checkpoint learns the batch anew", error)
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def tried(self, args: Any, state: Any, failure: Exception | None) -> None:
        """The Trainer has tried to write a checkpoint that only Penstock wants. All processes call it."""
        assert self._monitor is not None
        self._failed = self._monitor.any_process(failure is not None)
        if self._failed:
            folder = _learned(args, state).parent
            if args.should_save and not _is_whole(folder):  # the Trainer would count it among those that it keeps
                shutil.rmtree(folder, ignore_errors=True)
            self._monitor.not_saved(failure or "another process could not write its part")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of the run."""
        assert self._monitor is not None
        self._monitor.end()


def _learned(args: Any, state: Any) -> Path:
    """What an adaptive batch has learned, in the checkpoint of the present step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / "penstock.json"


def _is_whole(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        json.loads((folder / "trainer_state.json").read_bytes())
        return True
    return False


def _tolerate_failures() -> None:
    """From now on, a Trainer goes on if a checkpoint that only Penstock wants cannot be written.

    A callback only says that the Trainer shall save, so this changes the class. Calling it again does nothing. Where the
    processes wait for each other in the middle of a save, an error in one of them still ends the training. So does any error
    where transformers has no such method.
    """
    original = getattr(Trainer, "_save_checkpoint", None)
    if original is None or getattr(original, "tolerates_failures", False):
        return

    @functools.wraps(original)
    def save(trainer: Any, *arguments: Any, **named: Any) -> None:
        mine = [
            each for each in trainer.callback_handler.callbacks if isinstance(each, PenstockCallback) and each.alone
        ]
        waits = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        waits |= trainer.args.world_size > 1 and bool(getattr(trainer.state, "best_global_step", None))
        if not mine or waits:
            original(trainer, *arguments, **named)
            return
        failure: Exception | None = None
        try:
            original(trainer, *arguments, **named)
        except Exception as error:
            failure = error
        mine[0].tried(trainer.args, trainer.state, failure)

    save.tolerates_failures = True  # type: ignore[attr-defined]
    Trainer._save_checkpoint = save


class Elastic:
    """Makes the batch of a `Trainer` adapt: `class Mine(Elastic, Seq2SeqTrainer): pass`.

    The Trainer counts steps of `batch_size` samples. A step with four times as many counts as four, so that `max_steps`,
    the schedule of the learning rate, and the intervals of logging, evaluation and saving keep their meaning.

    Args:
        batch_size: total batch over all processes that the learning rate was chosen for.
        max_batch_size: largest total batch that trains well.
        lr_scaling: see `AdaptiveBatch`.
        penstock: the callback, if it needs arguments of its own.

    Raises:
        ValueError: the arguments of the Trainer ask for what an adaptive batch cannot do.
    """

    def __init__(
        self,
        *arguments: Any,
        batch_size: int,
        max_batch_size: int,
        lr_scaling: str | None = None,
        penstock: PenstockCallback | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._sizes: tuple[int, int, str | None] = (batch_size, max_batch_size, lr_scaling)
        args: Any = self.args  # type: ignore[attr-defined]
        strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
        for refused, why in (
            (RESTORES_BATCH, "transformers 4: install transformers 5"),
            (args.gradient_accumulation_steps != 1, "gradient_accumulation_steps: leave it at 1"),
            (args.fp16, "fp16: use bf16, which needs no loss scale"),
            (args.dataloader_drop_last, "dataloader_drop_last: leave it out"),
            (args.auto_find_batch_size, "auto_find_batch_size: Penstock makes the batch smaller when memory runs out"),
            (
                strategy not in ("random", "sequential"),
                f"train_sampling_strategy={strategy}: choose random or sequential",
            ),
            (self.is_fsdp_enabled or self.is_deepspeed_enabled, "FSDP or DeepSpeed"),  # type: ignore[attr-defined]
        ):
            if refused:
                raise ValueError(f"an adaptive batch does not work with {why}")
        args.ignore_data_skip = True  # the loader begins at the right sample
        self._shuffle = strategy == "random"
        self._penstock = penstock or PenstockCallback()
        self.add_callback(self._penstock)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """The Trainer's data set and its collator, with workers as its arguments say, in batches that adapt."""
        made: Any = super().get_train_dataloader()  # type: ignore[misc]
        args: Any = self.args  # type: ignore[attr-defined]
        batch_size, max_batch_size, lr_scaling = self._sizes
        batch = AdaptiveBatch(
            made.dataset,
            batch_size,
            max_batch_size,
            lr_scaling=lr_scaling,
            shuffle=self._shuffle,
            seed=args.seed if args.data_seed is None else args.data_seed,
            collate_fn=made.collate_fn,
            num_workers=made.num_workers,
            pin_memory=made.pin_memory,
            prefetch_factor=made.prefetch_factor,
            worker_init_fn=made.worker_init_fn,
            multiprocessing_context=made.multiprocessing_context,
        )
        self._penstock.batch = batch
        return batch.loader

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Measure the gradients. The loss counts for each step of `batch_size` samples, since the Trainer's log has the
        mean over those."""
        batch = self._penstock.batch
        assert batch is not None
        batch.begin_step()
        batch.begin_backward()
        loss = super().training_step(*arguments, **named)  # type: ignore[misc]
        batch.end_backward()
        return loss * batch.steps_of_this


class ElasticTrainer(Elastic, Trainer):  # type: ignore[misc]
    """A `Trainer` whose batch adapts; see `Elastic`."""
