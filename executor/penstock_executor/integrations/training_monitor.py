"""What the callbacks share: a run's reports, the daemon's requests, and Slurm's SIGTERM, in a loop that is not ours."""

from __future__ import annotations

import logging
import math
import signal
import time
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.client import ReportSchedule, connect
from penstock_executor.environment import read_environment, read_ranks
from penstock_executor.node_channel import open_channel
from penstock_executor.training.reporter import Reporter
from penstock_profiles.wire import CPU, Checkpointed, Observation, Result, Started

log = logging.getLogger(__name__)

MOST_PAUSE_S = 30.0
"""Between two steps under a duty cycle, be it 0: only in a step processes hear that they are to save or to stop."""


class TrainingMonitor:
    """One run of a foreign loop. All processes make one and call the same methods; rank 0 talks.

    Args:
        folder: of the job's checkpoints; the run's epoch is claimed below it.
        samples_per_step: total batch of an optimiser step, over all processes.
        atomic_batch: of one process in a micro-step.
        steps: optimiser steps that are done already.
        total_steps: at which the job is done, if known.
        report_every_s: seconds between two reports, after the first few.
        device: on which the processes' group adds up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        samples_per_step: int,
        atomic_batch: int,
        steps: int,
        total_steps: int | None,
        report_every_s: float,
        device: torch.device,
    ) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        self._samples, self._atomic, self._device = samples_per_step, atomic_batch, device
        self._stop = False
        self._request: str | None = None
        self._steps = self._reported_steps = steps
        self._reported_s = self._save_began_s = time.monotonic()
        environment = read_environment()
        self._channel = open_channel(
            environment, read_ranks().local_rank, suspends=False, anywhere=False, most_pause_s=MOST_PAUSE_S
        )
        self._reports = ReportSchedule(environment.report_every_s(report_every_s), self._reported_s)
        self._reporter: Reporter | None = None
        if self._first:
            client = connect(folder, environment)
            try:
                self._gpus = find_allocation(environment)
            except UnknownAllocation:
                self._gpus = Allocation(CPU, {environment.node or "localhost": ()})
            self._reporter = Reporter(client, lambda _: None)
            total = total_steps * samples_per_step if total_steps else None
            self._reporter.put(
                Started(
                    gpu_type=self._gpus.gpu_type or CPU,
                    gpu_ids=self._gpus.gpu_ids,
                    progress=self.progress,
                    total=total,
                )
            )
        if self._channel is not None:
            self._channel.urgent = self._is_urgent
        signal.signal(signal.SIGTERM, self._on_term)

    def _is_urgent(self) -> bool:
        """Whether there is something to do that no pause may put off."""
        reporter = self._reporter
        return self._stop or (reporter is not None and (reporter.request is not None or reporter.superseded))

    @property
    def progress(self) -> float:
        """In samples."""
        return float(self._steps * self._samples)

    def step_done(self, steps: int) -> tuple[bool, bool]:
        """After each optimiser step, with how many there are now: whether to save and to stop, on all processes alike."""
        self._steps = steps
        now = time.monotonic()
        asked = superseded = False
        if self._reporter is not None:
            asked, superseded = self._reporter.request is not None, self._reporter.superseded
            if self._reports.due(now):
                self._observe(now)
        flags = torch.tensor([float(asked), float(self._stop), float(superseded)], device=self._device)
        if self._world > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        asked, stop, superseded = (bool(flag) for flag in flags.tolist())
        if asked and self._reporter is not None and self._reporter.request is not None:
            self._request, self._reporter.request = self._reporter.request.id, None
        if superseded:
            self.end("superseded")
            raise SystemExit(75)
        if stop:  # else a signal may have come meanwhile
            self._stop = True
        if self._channel is not None:
            began_s = time.monotonic()
            self._channel.step_done(self._samples)
            self._reported_s += time.monotonic() - began_s  # a pause is no part of a step
        self._save_began_s = time.monotonic()
        return asked or stop, stop

    def report(self, metric: float, *, minimize: bool) -> None:
        """The loop has evaluated the model. See `training.run.Run.report`."""
        if self._reporter is not None and math.isfinite(metric):
            self._reporter.put(Result(metric=-metric if minimize else metric, progress=self.progress))

    def saved(self) -> None:
        """The loop has written a checkpoint."""
        request, self._request = self._request, None
        if self._reporter is not None:
            seconds = time.monotonic() - self._save_began_s
            self._reporter.put(Checkpointed(request=request, progress=self.progress, seconds=seconds))

    def end(self, outcome: Literal["completed", "stopped", "superseded", "failed"] | None = None) -> None:
        """The loop has ended; by itself, or since it was asked to."""
        if self._reporter is not None:
            self._reporter.close(outcome or ("stopped" if self._stop else "completed"), self.progress)

    def _observe(self, now: float) -> None:
        steps = self._steps - self._reported_steps
        if steps > 0 and self._reporter is not None:
            step_time_s = (now - self._reported_s) / steps
            micro_steps = max(round(self._samples / (self._atomic * self._world)), 1)
            self._reporter.put(
                Observation(
                    gpu_type=self._gpus.gpu_type or CPU,
                    nodes=max(self._gpus.nodes, 1),
                    gpus=self._world,
                    atomic_batch=self._atomic,
                    accumulation_steps=micro_steps - 1,
                    steps=steps,
                    step_time_s=step_time_s,
                    goodput=self._samples / step_time_s,
                    progress=self.progress,
                )
            )
        self._reported_s, self._reported_steps = now, self._steps

    def _on_term(self, _number: int, _frame: object) -> None:
        self._stop = True
