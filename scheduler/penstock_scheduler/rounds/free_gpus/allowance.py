"""What the limits on users, accounts, QOS and partitions leave to be allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from penstock_scheduler.model import Configuration, GpuLimit, Job


class Allowance:
    """The limits, and how many GPUs each of them still allows."""

    def __init__(self, limits: Iterable[GpuLimit]) -> None:
        self._left = {limit: limit.gpus for limit in limits}

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self._left)

    def copy(self) -> Allowance:
        """A copy that changes independently."""
        other = Allowance(())
        other._left = dict(self._left)
        return other

    def left(self) -> tuple[GpuLimit, ...]:
        """The limits, each with the GPUs that it still allows."""
        return tuple(dataclasses.replace(limit, gpus=max(left, 0)) for limit, left in self._left.items())

    def refuses(self, job: Job, gpus: int, gpu_type: str) -> GpuLimit | None:
        """The limit that does not allow the job this many more GPUs of this type; None: all limits allow them."""
        exceeded = (limit for limit, left in self._left.items() if gpus > left and limit.counts(gpu_type))
        return next((limit for limit in exceeded if limit.covers(job)), None)

    def within(self, job: Job, options: dict[Configuration, float]) -> tuple[dict[Configuration, float], str]:
        """The options that all limits allow the job. If there are none, also a sentence for its user that says why."""
        if not self._left or not options:
            return options, ""
        limits = {option: self.refuses(job, option.gpus, option.gpu_type) for option in options}
        allowed = {option: value for option, value in options.items() if limits[option] is None}
        return allowed, "" if allowed else f"{next(iter(limits.values()))} does not allow more now"

    def take(self, job: Job, gpus: int, gpu_type: str) -> None:
        """Count GPUs that the job gets. A number below 0 counts GPUs that it gives back."""
        for limit in self._left:
            if limit.counts(gpu_type) and limit.covers(job):
                self._left[limit] -= gpus
