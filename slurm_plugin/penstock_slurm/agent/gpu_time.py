"""GPU time: the seconds for which a job's processes kept a GPU busy, as the node counts them.

What a job reports can be false, or absent. What is counted here cannot be falsified by the job: NVIDIA's driver counts
it (`nvmlDeviceGetProcessUtilization`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock_profiles.nvml import Nvml

Counters = Mapping[tuple[Hashable, int], float]
"""(GPU, process) -> GPU time since the process began, s. It only grows while the process lives."""


class GpuTimes(Protocol):
    """A source of GPU times."""

    def __call__(self, pids: Collection[int]) -> Counters | None:
        """Counters of these processes. Processes that used no GPU may be left out. None: unknown."""
        ...


class DriverTimes:
    """GPU times by NVIDIA's driver: see `Nvml.gpu_times`."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def __call__(self, pids: Collection[int]) -> Counters | None:
        """See `GpuTimes`."""
        times, wanted = self._nvml.gpu_times(), set(pids)
        return {key: seconds for key, seconds in times.items() if key[1] in wanted} if times is not None else None


@dataclass(slots=True)
class Meter:
    """Adds up the GPU time of one job over processes that come and go."""

    last: dict[tuple[Hashable, int], float] | None = None
    """Counters at the last look; None: there was none."""

    def used_s(self, counters: Counters) -> float:
        """GPU time since the last look, s: of the GPU that the job used most. The first look tells nothing."""
        before, self.last = self.last, dict(counters)
        if before is None:
            return 0.0
        used: dict[Hashable, float] = {}
        for key, seconds in counters.items():
            used[key[0]] = used.get(key[0], 0.0) + max(seconds - before.get(key, 0.0), 0.0)
        return max(used.values(), default=0.0)
