"""What the callbacks share: the reports of a run, the daemon's requests and Slurm's SIGTERM in a foreign training
loop."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.client import ReportSchedule, connect
from penstock_executor.environment import read_environment, read_ranks
from penstock_executor.integrations.adaptive import AdaptiveBatch
from penstock_executor.node_channel import open_channel
from penstock_executor.profiling import is_out_of_memory
from penstock_executor.training import short_of_memory
from penstock_executor.training.consensus import Vote
from penstock_executor.training.core import RETRY_S
from penstock_executor.training.gradients import PendingNorms
from penstock_executor.training.host_copies import OnItsWay
from penstock_executor.training.processes import Group, leave
from penstock_executor.training.reporter import Reporter
from penstock_executor.training.status import STOPPED, SUPERSEDED
from penstock_executor.training.workers import end_workers
from penstock_profiles.wire import CPU, LONGEST_TEXT, Checkpointed, Observation, Result, SaveFailed, Started

log = logging.getLogger(__name__)

MOST_PAUSE_S = 30.0
"""Longest pause under a duty cycle between two steps: only in a step do processes exchange requests to save or to
stop."""


class TrainingMonitor:
    """Watches one run of a foreign training loop. All processes make one and call the same methods; only rank 0
    reports.

    Args:
        folder: for the job's checkpoints. The run claims its epoch in it.
        samples_per_step: total batch of an optimiser step, over all processes. With an adaptive batch, the initial one.
        atomic_batch: samples of one process in a micro-step.
        steps: optimiser steps that are done already. With an adaptive batch, `AdaptiveBatch.steps`.
        total_steps: number of steps at which the job is done, if known.
        report_every_s: seconds between two reports. The first few reports follow each other faster.
        device: of the tensors that the processes exchange.
        batch: that adapts, attached to the model already. None: the batch is the loop's.
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
        batch: AdaptiveBatch | None = None,
    ) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        self._samples, self._atomic, self._device = samples_per_step, atomic_batch, device
        self._stop = False
        self._batch = batch
        self._vote: tuple[OnItsWay, PendingNorms | None] | None = None
        """Of the last step, with the norms of this process that it has."""
        self._request: str | None = None
        self._save_again_s = math.inf
        """When to save again because the last checkpoint could not be written."""
        self._has_saved = steps > 0
        self._steps = self._reported_steps = steps
        self._reported_s = self._save_began_s = time.monotonic()
        environment = read_environment()
        self._channel = open_channel(
            environment, read_ranks().local_rank, suspends=False, anywhere=False, most_pause_s=MOST_PAUSE_S
        )
        self._reports = ReportSchedule(environment.report_every_s(report_every_s), self._reported_s)
        self._reporter: Reporter | None = None
        self._gpus = Allocation(CPU, {environment.node or "localhost": ()})
        client = connect(folder, environment) if self._first else None
        if client is not None:
            with contextlib.suppress(UnknownAllocation):
                self._gpus = find_allocation(environment)
        if batch is not None:
            batch.begin(Group(read_ranks()), self._gpus, device, folder)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_error
        if client is not None:
            self._reporter = Reporter(client, batch.learn if batch is not None else lambda _: None)
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
        """Whether there is something to do that must not wait for the end of a pause."""
        reporter = self._reporter
        return self._stop or (reporter is not None and (reporter.request is not None or reporter.superseded))

    @property
    def progress(self) -> float:
        """In samples."""
        return float(self._steps * self._samples)

    def step_done(self, steps: int) -> tuple[bool, bool]:
        """Call it after each optimiser step. Returns whether to save, and whether to stop, the same on all processes.

        Args:
            steps: optimiser steps so far. With an adaptive batch, those of the initial size that they stand for.
        """
        self._steps = steps
        now = time.monotonic()
        samples, norms = self._batch.end_step() if self._batch is not None else (self._samples, None)
        decided, decided_norms = (self._wishes(now, norms), norms) if self._world == 1 else self._agreed()
        asked, stop = bool(decided.save), bool(decided.stop)
        if self._batch is not None:
            asked |= self._batch.apply(decided, decided_norms)
        self._has_saved |= asked
        if asked:
            self._save_again_s = math.inf
        if asked and self._reporter is not None and self._reporter.request is not None:
            self._request, self._reporter.request = self._reporter.request.id, None
        if decided.superseded:
            self.end("superseded")
            raise SystemExit(SUPERSEDED)
        if stop:  # if not, keep the flag: a signal may have come meanwhile
            self._stop = True
        if self._world > 1:
            self._vote = self._cast(self._wishes(now, norms)), norms
        if self._channel is not None:
            began_s = time.monotonic()
            self._channel.step_done(samples)
            self._reported_s += time.monotonic() - began_s  # a pause does not count as time of a step
            self.restart_clock()
        self._save_began_s = time.monotonic()
        return asked or stop, stop

    def restart_clock(self) -> None:
        """With an adaptive batch: time since the last step is no part of the next one."""
        if self._batch is not None:
            self._batch.restart_clock()

    def _wishes(self, now: float, norms: PendingNorms | None) -> Vote:
        """What this process contributes. Reports if it is time to."""
        vote = Vote(stop=self._stop)
        if norms is not None:
            local_sqr, mean_sqr = norms.read().tolist()
            vote = vote._replace(local_sqr=local_sqr, mean_sqr=mean_sqr)
        if self._reporter is None:
            return vote
        asked = self._reporter.request is not None or now >= self._save_again_s
        if self._batch is not None:
            vote = self._batch.add_to(vote)
        if self._reports.due(now):
            self._observe(now)
            asked |= self._reporter.has_daemon and not self._has_saved  # Penstock moves no job that has not saved
        return vote._replace(save=asked, superseded=self._reporter.superseded)

    def _cast(self, vote: Vote) -> OnItsWay:
        """Begin to add up the votes of all processes."""
        vector = torch.tensor(vote, dtype=torch.float64).to(self._device, non_blocking=True)
        dist.all_reduce(vector, op=dist.ReduceOp.SUM)
        return OnItsWay(vector)

    def _agreed(self) -> tuple[Vote, PendingNorms | None]:
        """The sum of the votes of all processes after the step before, and this process's norms with it.

        Those of this step would make each process wait until its GPU has done this step, and the GPU would then have no
        work.
        """
        if self._vote is None:
            return Vote(), None
        vector, norms = self._vote
        return Vote(*vector.read().tolist()), norms

    def report(self, metric: float, *, minimize: bool) -> None:
        """Report a metric after the loop has evaluated the model; see `training.run.TrainingRun.report`."""
        if self._reporter is not None and math.isfinite(metric):
            self._reporter.put(Result(metric=-metric if minimize else metric, progress=self.progress))

    def any_process(self, flag: bool) -> bool:
        """Whether a process says so. All processes call it, and wait for each other."""
        if self._world == 1:
            return flag
        flags = torch.tensor(float(flag), device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def not_saved(self, reason: object) -> None:
        """A checkpoint that only Penstock wants could not be written. It is tried again later, and answers the request
        then."""
        log.error("step=%d no checkpoint written: %s; trying again in %.0f s", self._steps, reason, RETRY_S)
        self._save_again_s = time.monotonic() + RETRY_S
        if self._reporter is not None:
            self._reporter.put(SaveFailed(request=self._request, text=str(reason)[:LONGEST_TEXT]))
        self.restart_clock()

    def saved(self) -> None:
        """Report that the loop has written a checkpoint."""
        self._save_again_s = math.inf
        request, self._request = self._request, None
        if self._reporter is not None:
            seconds = time.monotonic() - self._save_began_s
            self._reporter.put(Checkpointed(request=request, progress=self.progress, seconds=seconds))
        self.restart_clock()

    def end(
        self, outcome: Literal["completed", "stopped", "superseded", "failed"] = "completed", text: str = ""
    ) -> None:
        """Report that the loop has ended."""
        if self._reporter is not None:
            self._reporter.close(outcome, self.progress, text)
        if self._world > 1:
            # After what the script still does with the others. Gloo's threads may abort a process that ends with them.
            atexit.register(leave)

    def leave(self) -> NoReturn:
        """End this process, because it was asked to stop and has saved. All processes call it.

        Raises:
            SystemExit: with status 143, so that whatever waits for the job does not take it for done.
        """
        if self._world > 1:
            dist.barrier()  # else the launcher may kill processes that still write
        self.end("stopped")
        raise SystemExit(STOPPED)

    def _observe(self, now: float) -> None:
        if self._batch is not None:
            observation = self._batch.observation(self.progress)
            if observation is not None and self._reporter is not None:
                self._reporter.put(observation)
            return
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

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In place of Python's own hook: report the error. Where memory ran out, restart with a smaller adaptive batch."""
        self.end("failed", f"{kind.__name__}: {error}")
        self._excepthook(kind, error, trace)
        if (
            isinstance(error, Exception)
            and is_out_of_memory(error)
            and self._batch is not None
            and self._batch.out_of_memory()
        ):
            log.error("the batch does not fit into memory: the run restarts with a smaller one")
            end_workers()
            short_of_memory.begin_again(self._world, read_environment().job_id)
