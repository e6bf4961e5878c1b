"""What `penstock_executor.try_run` adds to a script's run: a record of each step, and one disturbance.

It is installed in the process of the script only, and changes no other run.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from penstock_executor.training import core, starting
from penstock_executor.training import run as prepared
from penstock_executor.training.preconditioning import local

Kind = Literal["none", "stop", "evaluation", "kill"]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to a run."""

    kind: Kind = "none"
    step: int = 0
    """After this step, or in the first evaluation from this step on."""


class Trial:
    """One process of a run that is tried.

    Args:
        folder: for the checkpoints, the records and the final weights.
        disturbance: of this run.
    """

    def __init__(self, folder: Path, disturbance: Disturbance) -> None:
        self._folder, self._disturbance = folder, disturbance
        self._stepped_s = time.monotonic()

    def install(self) -> None:
        """Let each run of this process be recorded and disturbed."""
        begin = starting.start

        @functools.wraps(begin)
        def start(_checkpoints: object = None, **named: Any) -> Any:
            return begin(self._folder / "checkpoints", **named)

        setattr(starting, "start", start)  # noqa: B010 - with other arguments than the original
        around: dict[str, Callable[..., Any]] = {
            "_after_step": self._after_step,
            "_end_pass": self._end_pass,
            "_complete": self._complete,
            "evaluating": self._evaluating,
        }
        for name, ours in around.items():
            setattr(core.Run, name, _around(getattr(core.Run, name), ours))
        whole = prepared.TrainingRun
        setattr(whole, "prepare", _around(whole.prepare, _with_one_batch_size))  # noqa: B010 - as above

    def _after_step(self, original: Callable[..., None], run: Any, samples: int, *rest: Any) -> None:
        objects = run._state.objects
        models = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
        groups = [group for each in objects.values() for group in getattr(each, "param_groups", ())]
        weights = [parameter for model in models for parameter in model.parameters()]
        self._note(
            run,
            step=run.steps,
            epoch=run.epoch,
            in_epoch=run.epoch_steps,
            samples=samples,
            rates=[float(group["lr"]) for group in groups],
            norm=sum(float(local(each.detach()).double().square().sum()) for each in weights) ** 0.5,
        )
        self._stepped_s = time.monotonic()
        if run.steps == self._disturbance.step and self._disturbance.kind in ("stop", "kill"):
            self._disturb(run)
        original(run, samples, *rest)

    def _end_pass(self, original: Callable[..., None], run: Any) -> None:
        self._note(run, ended=run.epoch, after_s=time.monotonic() - self._stepped_s)
        original(run)

    def _complete(self, original: Callable[..., None], run: Any) -> None:
        original(run)
        models = {n: each for n, each in run._state.objects.items() if isinstance(each, torch.nn.Module)}
        if run.rank == 0 and not run._state.divided:
            torch.save({name: each.state_dict() for name, each in models.items()}, self._folder / "final.pt")

    def _evaluating(self, original: Callable[..., Iterator[Any]], run: Any, batches: Any) -> Iterator[Any]:
        self._note(run, evaluates=run.steps)
        for batch in original(run, batches):
            if self._disturbance.kind == "evaluation" and run.steps >= self._disturbance.step:
                self._disturb(run)
            yield batch

    def _disturb(self, run: Any) -> None:
        kind, self._disturbance = self._disturbance.kind, Disturbance()
        if kind == "kill":
            run._wait()
            run._group.barrier()
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)

    def _note(self, run: Any, **values: object) -> None:
        if run.rank == 0:
            with (self._folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")


def _with_one_batch_size(original: Callable[..., Any], run: Any, *objects: Any, **named: Any) -> Any:
    """Measured times would choose other sizes in each run."""
    return original(run, *objects, **{name: value for name, value in named.items() if name != "max_batch_size"})


def _around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(run: Any, *arguments: Any, **named: Any) -> Any:
        return ours(original, run, *arguments, **named)

    return method
