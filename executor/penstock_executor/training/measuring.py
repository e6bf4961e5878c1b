"""How long this run's steps take and how noisy its gradients are: for reports, and for the choice of the batch."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass

import torch

from penstock_executor.allocation import Allocation
from penstock_executor.training.batches import BatchSize
from penstock_executor.training.consensus import Vote
from penstock_executor.training.gradients import GradientMeter, PendingNorms, SyncTimer, measure_every
from penstock_executor.training.optimizing import steps_worth
from penstock_executor.training.processes import Group
from penstock_profiles.noise import Moments, NoiseEstimator
from penstock_profiles.wire import Observation

TRUSTED_WEIGHT = 0.1
"""How full the memory of the noise estimate must be before batches are chosen by it: 105 measured steps at the initial
batch."""

SETTLED_WEIGHT = 0.39
"""How full it must be before most steps go unmeasured: 500 measured steps at the initial batch, after which estimates
are within 10 %."""

MIB = 2**20


@dataclass(slots=True)
class _Timed:
    """Steps since the last report, all of one batch size."""

    steps: int = 0
    seconds: float = 0.0
    sync_steps: int = 0
    """Number of steps for which the time of waiting for other processes' gradients is known."""
    sync_s: float = 0.0
    """That time, summed over those steps."""


class Measurements:
    """Times each step and estimates the gradients' noise.

    Args:
        meter: measures the gradients.
        noise: the estimate of their noise.
        initial_batch: total batch that the script was written for, in samples.
    """

    def __init__(self, meter: GradientMeter, noise: NoiseEstimator, initial_batch: int) -> None:
        self.meter, self._noise, self._initial = meter, noise, initial_batch
        self._timed = _Timed()
        self._began_s = time.perf_counter()

    @property
    def mean_step_s(self) -> float | None:
        """Mean time of a step since the last report, in seconds; None before the first."""
        return self._timed.seconds / self._timed.steps if self._timed.steps else None

    @property
    def trusted(self) -> bool:
        """Whether the noise estimate is good enough to choose batches by it."""
        return self._noise.weight >= TRUSTED_WEIGHT

    @property
    def settled(self) -> bool:
        """Whether the noise estimate is so good that most steps may go unmeasured."""
        return self._noise.weight >= SETTLED_WEIGHT

    def restart_clock(self) -> None:
        """The next step begins now: time since the last one is not counted."""
        self._began_s = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Before an optimiser step's first backward pass.

        On a GPU, the synchronisation time of a step becomes known only some time after that step.
        """
        self.meter.begin(step)
        sync_s = self.meter.sync.take_s()
        if sync_s is not None:
            self._timed.sync_steps += 1
            self._timed.sync_s += sync_s

    def end_step(self, samples: int, total_batch: int) -> float:
        """After an optimiser step of `samples` samples; the seconds that it took. Only full batches count in the
        mean."""
        now_s = time.perf_counter()
        active_s = now_s - self._began_s
        if samples == total_batch:
            self._timed.steps += 1
            self._timed.seconds += active_s
        self._began_s = now_s
        return active_s

    def batch_changed(self) -> None:
        """Forget the times of steps of another batch size."""
        self._timed, self.meter.sync = _Timed(), SyncTimer()

    def take_norms(self, vote: Vote, norms: PendingNorms) -> None:
        """Update the noise estimate with the norms of one step, added up over all processes."""
        local_sqr, mean_sqr = vote.local_sqr, vote.mean_sqr
        if not (math.isfinite(local_sqr) and math.isfinite(mean_sqr)):
            return  # gradients overflowed, as they may in mixed precision
        moments = Moments(local_sqr, min(mean_sqr, local_sqr), norms.count, consecutive=norms.consecutive)
        with contextlib.suppress(ValueError):  # an estimate from this step would overflow
            self._noise.update(moments, norms.step_samples / self._initial)

    def measure_every(self, step_s: float) -> int:
        """Steps from one measurement of the gradients to the next, if a step takes `step_s` seconds."""
        meter = self.meter
        cost_s = meter.cost.take_s() if meter.measured else None
        if cost_s is None:
            return meter.every
        measuring_s, meter.measured = cost_s / meter.measured, 0
        return measure_every(measuring_s, step_s, settled=self.settled)

    def take_observation(
        self, gpus: Allocation, group: Group, batch: BatchSize, atomic_batch: int, device: torch.device, progress: float
    ) -> Observation | None:
        """What the steps since the last call took, for a report; None if there were none.

        Args:
            gpus: what Slurm gave the job.
            group: all processes of the run.
            batch: the present batch size.
            atomic_batch: samples of the largest part of a step.
            device: of this process.
            progress: over all runs, in samples of the initial batch size.
        """
        timed, self._timed = self._timed, _Timed()
        if not timed.steps:
            return None
        noise = self._noise.noise if self.trusted else None
        step_time_s = timed.seconds / timed.steps
        worth = steps_worth(noise, batch.total / self._initial)
        return Observation(
            gpu_type=gpus.gpu_type,
            nodes=gpus.nodes,
            gpus=group.world,
            gpus_per_replica=group.gpus_per_replica,
            atomic_batch=atomic_batch,
            accumulation_steps=batch.accumulation_steps(group.replicas),
            steps=timed.steps,
            step_time_s=step_time_s,
            sync_time_s=_sync_time_s(timed, step_time_s, group.replicas),
            grad_sqr=noise.grad_sqr if noise else None,
            grad_var=noise.grad_var if noise else None,
            goodput=self._initial * worth / step_time_s,
            memory_mb=torch.cuda.max_memory_allocated() / MIB if device.type == "cuda" else None,
            progress=progress,
        )


def _sync_time_s(timed: _Timed, step_time_s: float, replicas: int) -> float | None:
    if replicas == 1:
        return 0.0
    return min(timed.sync_s / timed.sync_steps, 0.999 * step_time_s) if timed.sync_steps else None
