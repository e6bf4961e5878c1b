"""What earlier jobs tell about those to come: how long jobs run, and when they are submitted.

A length is counted in *seconds at full size*: the GPU-seconds of a job over the most GPUs of its job spec. So a job that ran on
fewer GPUs than it could have had compares with one that had them all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock_scheduler.model import Job, JobId

ENOUGH = 12
"""Earlier jobs that ran for longer than a job has until now, so that its length is drawn from theirs alone."""

FEWEST = 20
"""Jobs that must have ended before lengths are drawn at all."""

NEWEST = 20_000
"""Earlier jobs that are looked at."""

NEW_S = 1800.0
"""Of a job that has run for longer than all earlier ones: it needs more than another x with the probability
(a + NEW_S) / (a + NEW_S + x) after a seconds, as `policies.sia.remaining` has it for jobs without a past."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job that was submitted, and what it took."""

    job: Job
    gpu_seconds: float
    end_s: float | None
    """When it ended, s since 1970; None: it has not, and `gpu_seconds` is what it had until now."""
    start_s: float | None = None
    """When it first started, s since 1970; None: it has not."""

    @property
    def length_s(self) -> float:
        """Seconds at full size."""
        return self.gpu_seconds / self.job.spec.max_gpus


class Past:
    """The earlier jobs of a site.

    Args:
        jobs: in any order.
        now_s: s since 1970.
    """

    def __init__(self, jobs: Iterable[PastJob], now_s: float) -> None:
        newest = sorted(jobs, key=lambda past: past.job.submit_s)[-NEWEST:]
        self.now_s = now_s
        self.submitted = newest
        """All, the oldest first."""
        self._by_id = {past.job.id: past for past in newest}
        lengths: dict[tuple[object, ...], list[tuple[float, bool]]] = {}
        for past in newest:
            if past.gpu_seconds > 0:
                for group in _groups(past.job):
                    lengths.setdefault(group, []).append((past.length_s, past.end_s is not None))
        self._lengths = {group: sorted(each) for group, each in lengths.items()}
        self.ended = sum(past.end_s is not None and past.gpu_seconds > 0 for past in newest)

    def job(self, job: JobId) -> PastJob | None:
        """One of them; None: it is not among them."""
        return self._by_id.get(job)

    def within(self, partitions: tuple[str, ...]) -> Past:
        """The same jobs, of which those of unknown partition may run in any of these."""
        anywhere = [
            past if past.job.partitions else replace(past, job=replace(past.job, partitions=partitions))
            for past in self.submitted
        ]
        return Past(anywhere, self.now_s)

    def common_sizes(self, most: int) -> tuple[int, ...]:
        """The fewest GPUs that jobs need, those that most jobs need, in ascending order. `most`: of them."""
        counts = Counter(past.job.spec.min_gpus for past in self.submitted)
        return tuple(sorted(gpus for gpus, _ in counts.most_common(most)))

    @property
    def known(self) -> bool:
        """Whether enough jobs have ended to say how long jobs run."""
        return self.ended >= FEWEST

    def like(self, job: Job, age_s: float) -> Sequence[tuple[float, bool]]:
        """The earlier jobs most like this one that ran for longer than it has: their lengths in seconds at full size, ascending,
        and whether they have ended at that length.

        Those of its user with its name if there are enough, or else those of its user, of its size, or all.
        """
        found: Sequence[tuple[float, bool]] = ()
        for group in _groups(job):
            known = self._lengths.get(group, [])
            found = known[bisect_right(known, (age_s, True)) :]
            if len(found) >= ENOUGH:
                break
        return found

    def length_s(self, job: Job, age_s: float, draw: np.random.Generator) -> float:
        """A length that the job may turn out to have, > `age_s`, in seconds at full size.

        It is that of an earlier job. If that one has not ended either, its length is drawn in the same way. So what still runs
        counts for as much as it is known (the estimator of Kaplan and Meier, one draw at a time).
        """
        while (found := self.like(job, age_s)) and draw.random() < len(found) / (len(found) + 1):
            length_s, ended = found[int(draw.integers(len(found)))]
            if ended:
                return length_s
            age_s = length_s
        chance = draw.random()
        return max(age_s, found[-1][0] if found else 0.0) + (age_s + NEW_S) * chance / (1 - chance)


def _groups(job: Job) -> tuple[tuple[object, ...], ...]:
    size = job.spec.max_gpus
    return (
        ("name", job.user, job.account, job.name, size),
        ("user", job.user, job.account, size),
        ("user", job.user, job.account),
        ("size", size),
        ("all",),
    )
