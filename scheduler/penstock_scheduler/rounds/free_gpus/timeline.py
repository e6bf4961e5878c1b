"""Free GPUs over time, for backfill. Axes: N nodes, B moments at which a job is expected to end."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from penstock_scheduler.model import Configuration, Job, Placement
from penstock_scheduler.rounds.free_gpus.book import FreeGpus


class Timeline:
    """Free GPUs from now on, as far as it is known when jobs end, less what is reserved.

    Args:
        free: what is free now. The timeline does not change it.
        now_s: the time, s since 1970.
        ends: when each job that has GPUs now gives them back, s since 1970; `inf`: not known.
    """

    def __init__(self, free: FreeGpus, now_s: float, ends: Iterable[tuple[float, Placement]]) -> None:
        self._free = free
        self._times_s = [now_s]
        frees = [free.free_N.copy()]
        for end_s, placement in sorted((end for end in ends if math.isfinite(end[0])), key=lambda end: end[0]):
            assert end_s > now_s
            if end_s > self._times_s[-1]:
                self._times_s.append(end_s)
                frees.append(frees[-1].copy())
            free.add_to(frees[-1], placement, 1)
        self._free_BN = np.stack(frees)

    def earliest(
        self,
        job: Job,
        options: Sequence[Configuration],
        seconds: Callable[[Configuration], float],
        *,
        now: bool = False,
    ) -> tuple[float, float, Placement] | None:
        """Begin, end and nodes of the earliest time at which a job fits; None: that is not known.

        Args:
            job: the job.
            options: configurations, the preferred one first.
            seconds: how long the job holds a configuration, s.
            now: whether only the present moment will do.
        """
        times = slice(1) if now else slice(None)
        ready = [self._free.enough(option, self._free_BN[times]).sum(axis=1) >= option.nodes for option in options]
        for begin in np.flatnonzero(np.any(ready, axis=0)).tolist():
            for option in options:
                until_s = self._times_s[begin] + seconds(option)
                end = bisect.bisect_left(self._times_s, until_s)
                least_N = self._free_BN[begin : max(end, begin + 1)].min(axis=0)
                found = self._free.find_nodes(job, (option,), least_N, later=begin > 0)
                if found is not None:
                    return self._times_s[begin], until_s, found
        return None

    def reserve(self, begin_s: float, until_s: float, placement: Placement) -> None:
        """Reserve these GPUs from a moment that `earliest` found."""
        begin, end = self._times_s.index(begin_s), bisect.bisect_left(self._times_s, until_s)
        if math.isfinite(until_s) and until_s not in self._times_s[end : end + 1]:
            self._times_s.insert(end, until_s)
            self._free_BN = np.insert(self._free_BN, end, self._free_BN[end - 1], axis=0)
        for b in range(begin, end):
            self._free.add_to(self._free_BN[b], placement, -1)
