"""Measuring new jobs: a new job trains on one GPU of each type, one after the other, until its speed there is known.

Sia profiles each new job on one GPU of each type, in less than 20 GPU-seconds each. Here the job's first rounds do that: the
job makes progress meanwhile, and only the restarts cost anything. A type is known if the job has a profile for it, or if the
catalogue has the job's model family. Measuring takes no GPU that another job holds. While no GPU of an unknown type is free,
the job stays where it is.

Measuring ends

- when all types are known;
- when the job has had its GPU-seconds on one type and has reported nothing, because it will not report elsewhere either;
- when the job's GPU-seconds on all types together show that it is no longer new. A round often takes longer than measuring
  needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from penstock_scheduler.model import Adaptivity, Job, Reason, ReasonCode, Snapshot

NEW_GPU_S = 180.0
"""GPU-seconds for each GPU type that a job may use, during which the job is new: three rounds of the default length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measuring:
    """A job that is being measured."""

    columns: list[int]
    """For each type that is still unknown, the column of one GPU of it."""
    number: int
    """Number of types that will be known after the next one."""
    types: int
    """Number of types that the job may use."""

    @classmethod
    def of(cls, snapshot: Snapshot, job: Job, columns: Mapping[str, int], measure_gpu_s: float) -> Measuring | None:
        """None if the job is known, is no longer new, or may not be moved.

        Args:
            snapshot: the round's.
            job: one of its jobs.
            columns: for each type that is open to the job, the column of one GPU of it.
            measure_gpu_s: see `SiaSettings`.
        """
        unknown = [name for name in snapshot.facts[job.id].unmeasured_types if name in columns]
        if not unknown or len(columns) < 2 or job.spec.adaptivity is Adaptivity.RIGID or not job.movable:
            return None
        most_gpu_s = snapshot.facts[job.id].restart_cost_s + measure_gpu_s
        attained = snapshot.facts[job.id].attained_gpu_s
        if sum(attained.values()) >= len(columns) * max(most_gpu_s, NEW_GPU_S):
            return None
        if any(attained.get(gpu_type, 0.0) >= most_gpu_s for gpu_type in unknown):
            return None
        return cls([columns[gpu_type] for gpu_type in unknown], len(columns) - len(unknown) + 1, len(columns))

    def only(self, column: int) -> Measuring:
        """The same with one of its columns."""
        return dataclasses.replace(self, columns=[column])

    def reason(self, gpu_type: str, *, held: bool) -> Reason:
        """Why the job has one GPU of this type; `held`: it has that GPU already."""
        what = "being measured on" if held else "is to be measured on"
        return Reason(ReasonCode.MEASURING, f"{what} {gpu_type}, {self.number} of {self.types} types")
