"""What `penstock_executor.try_run` adds to a script's run: a record of each step, and one disturbance.

It is installed in the process of the script only, and changes no other run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch

from penstock_executor.training import starting
from penstock_executor.training.gradients import PendingNorms
from penstock_executor.training.preconditioning import local
from penstock_executor.training.run import TrainingRun

Kind = Literal["none", "stop", "evaluation", "kill"]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to a run."""

    kind: Kind = "none"
    step: int = 0
    """After this step, or in the first evaluation from this step on."""


def install(folder: Path, disturbance: Disturbance) -> None:
    """Let each run of this process be recorded in `folder`, where it saves, too, and be disturbed."""
    begin = starting.start

    def start(_checkpoints: object = None, **named: Any) -> TrainingRun:
        return begin(folder / "checkpoints", **named)

    setattr(starting, "start", start)  # noqa: B010 - with other arguments than the original
    TriedRun.folder, TriedRun.disturbance = folder, disturbance
    starting.RUN = TriedRun


class TriedRun(TrainingRun):
    """A run of one process that is tried. It overrides steps of the run; hooks for it would be code in every training."""

    folder: Path
    """For the records and the final weights."""
    disturbance = Disturbance()
    """To come."""
    _stepped_s = 0.0

    def prepare(self, *objects: Any, **named: Any) -> Any:
        """Without `max_batch_size`: measured times would choose other sizes in each run."""
        return super().prepare(*objects, **{name: value for name, value in named.items() if name != "max_batch_size"})

    def evaluating(self, batches: Iterable[Any]) -> Iterator[Any]:
        """As `Run.evaluating`, with a record of where, and the stop in it."""
        self._note(evaluates=self.steps)
        for batch in super().evaluating(batches):
            if self.disturbance.kind == "evaluation" and self.steps >= self.disturbance.step:
                self._disturb()
            yield batch

    def log(self, **values: Any) -> None:
        """As `Core.log`, with a record of the numbers."""
        single = {
            name: each for name, each in values.items() if isinstance(each, Real) or getattr(each, "shape", 0) == ()
        }
        self._note(logs=self.steps, numbers={name: float(each) for name, each in single.items()})
        super().log(**values)

    def _after_step(self, samples: int, active_s: float, norms: PendingNorms | None = None) -> None:
        objects = self._state.objects.values()
        models = [each for each in objects if isinstance(each, torch.nn.Module)]
        groups = [group for each in objects for group in getattr(each, "param_groups", ())]
        weights = [parameter for model in models for parameter in model.parameters()]
        parts = [local(each.detach()).double().flatten() for each in weights]
        squares = self._group.gather(sum(float(each.square().sum()) for each in parts))
        norm, apart = squares[0] ** 0.5, max(squares) - min(squares)
        if self._state.divided:
            norm, apart = (sum(squares) / (1 if self.gpus_per_replica == 1 else self.replicas)) ** 0.5, 0.0
        self._note(
            step=self.steps,
            epoch=self.epoch,
            in_epoch=self.epoch_steps,
            samples=samples,
            rates=[float(group["lr"]) for group in groups],
            norm=norm,
            # It shows small changes that the norm hides. Of a divided model, it depends on the division.
            sign=0.0 if self._state.divided else sum(float(each[::2].sum() - each[1::2].sum()) for each in parts),
            apart=apart / (2 * norm * norm or 1.0),
        )
        self._stepped_s = time.monotonic()
        if self.steps == self.disturbance.step and self.disturbance.kind in ("stop", "kill"):
            self._disturb()
        super()._after_step(samples, active_s, norms)

    def _end_pass(self) -> None:
        self._note(ended=self.epoch, after_s=time.monotonic() - self._stepped_s)
        super()._end_pass()

    def _complete(self) -> None:
        super()._complete()
        models = {n: each for n, each in self._state.objects.items() if isinstance(each, torch.nn.Module)}
        if self.rank == 0 and not self._state.divided:
            torch.save({name: each.state_dict() for name, each in models.items()}, self.folder / "final.pt")

    def _disturb(self) -> None:
        kind, TriedRun.disturbance = self.disturbance.kind, Disturbance()
        if kind == "kill":
            self._wait()
            self._group.barrier()
            if self.rank < self.world - 1:
                return  # it fails because the last process is gone
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)

    def _note(self, **values: object) -> None:
        if self.rank == 0:
            with (self.folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")
