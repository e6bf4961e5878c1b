"""How long the steps of a loop of the script's own take, for its reports."""

from __future__ import annotations

import time

from penstock_executor.allocation import Allocation
from penstock_executor.training.processes import Group
from penstock_profiles.wire import Observation


class LoopTimer:
    """Times the steps since the last report."""

    def __init__(self) -> None:
        self._steps, self._samples, self._seconds = 0, 0, 0.0
        self._began_s = time.monotonic()

    def restart(self) -> None:
        """Time since the last step is no part of the next one."""
        self._began_s = time.monotonic()

    def add(self, samples: int) -> float:
        """A step of so many samples is over. Returns the seconds that it took."""
        taken_s = time.monotonic() - self._began_s
        self._steps, self._samples, self._seconds = self._steps + 1, self._samples + samples, self._seconds + taken_s
        self.restart()
        return taken_s

    @property
    def mean_s(self) -> float | None:
        """Mean time of a step since the last report; None before the first."""
        return self._seconds / self._steps if self._steps else None

    def take_observation(self, gpus: Allocation, group: Group, progress: float) -> Observation | None:
        """Report on the steps since the last report; None if there were none."""
        steps, samples, seconds = self._steps, self._samples, self._seconds
        self._steps, self._samples, self._seconds = 0, 0, 0.0
        if not steps or not samples or not seconds:
            return None
        return Observation(
            gpu_type=gpus.gpu_type,
            nodes=gpus.nodes,
            gpus=group.world,
            gpus_per_replica=group.gpus_per_replica,
            atomic_batch=max(-(-samples // (steps * group.replicas)), 1),
            accumulation_steps=0,
            steps=steps,
            step_time_s=seconds / steps,
            goodput=samples / seconds,
            progress=progress,
        )
