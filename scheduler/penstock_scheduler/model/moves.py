"""How much moves of running jobs may cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The cost of the moves of one round that count."""

    time_s: float
    """When they were decided, s since 1970."""
    gpu_s: float
    """GPU-seconds that jobs hold and do not train."""


@dataclass(frozen=True, slots=True)
class MoveBudget:
    """The share of the GPU-time of running jobs that moves may cost in any hour."""

    share: float
    spent: tuple[MoveCost, ...] = ()
    """Of earlier rounds, as far as they still count."""

    def counting(self, now_s: float, running_gpus: int) -> tuple[MoveCost, ...]:
        """The costs that still count: for an hour, and one that is larger than an hour's budget for as many hours as it takes."""
        per_s = self.share * running_gpus
        return tuple(
            each
            for each in self.spent
            if now_s - each.time_s < max(HOUR_S, each.gpu_s / per_s if per_s > 0 else HOUR_S)
        )

    def left(self, now_s: float, running_gpus: int) -> float:
        """GPU-seconds that moves may still cost now."""
        return self.share * running_gpus * HOUR_S - total(self.counting(now_s, running_gpus))


def total(costs: Iterable[MoveCost]) -> float:
    """Their GPU-seconds."""
    return sum(each.gpu_s for each in costs)
