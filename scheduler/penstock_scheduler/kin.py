"""Recalls what ended jobs of the same kind have reported, for a job of which nothing else is known.

Two jobs are of one kind if they have the same user, the same name but for the numbers in it, and the same batch size and unit of
GPUs in their job specs. What they reported is in the store for as long as it keeps reports, so nothing else is saved: a job that
is deleted from the store is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.kin import Kin, kind_by_name
from penstock_profiles.learning import JobModel
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.errors import StoreError
from penstock_scheduler.messages import JobView
from penstock_scheduler.model import Job, JobSpec

log = logging.getLogger(__name__)

LOOKED_AT = 200
"""Newest ended jobs of the user among which kin is looked for."""

JOBS = 5
"""Newest jobs of a kind that count."""

REPORTS = 200
"""Newest measurements of each of them."""


class EndedJobs(Protocol):
    """Ended jobs and their measurements: the daemon's store."""

    def jobs(
        self, *, user: str | None = None, states: Sequence[str] = (), limit: int | None = None
    ) -> list[tuple[int, JobView]]:
        """(number, job), newest first."""
        ...

    def observations(self, job: str, newest: int) -> list[Report]:
        """The newest measurements of a job, oldest first."""
        ...


class KinOfJobs:
    """Finds the kin of jobs.

    Args:
        ended: the store.
        learner: makes a model for a job spec; the second argument is its first measurement.
    """

    def __init__(self, ended: EndedJobs, learner: Callable[[JobSpec, Observation], JobModel]) -> None:
        self._ended, self._learner = ended, learner

    def of(self, job: Job) -> Kin | None:
        """What earlier jobs of its kind have shown together; None: nothing. If the store does not answer, nothing is known."""
        try:
            return self._together(job, self._earlier(job))
        except StoreError as error:
            log.warning("earlier jobs of its kind not recalled", extra={"job": job.id, "text": str(error)[:200]})
            return None

    def _earlier(self, job: Job) -> list[JobView]:
        found = self._ended.jobs(user=job.user, states=("ended",), limit=LOOKED_AT)
        alike = [
            view for _, view in found if view.id != job.id and _kind(view.name, view.spec) == _kind(job.name, job.spec)
        ]
        return alike[:JOBS]

    def _together(self, job: Job, earlier: Sequence[JobView]) -> Kin | None:
        """The oldest comes first, so that the newest measurements count most."""
        model: JobModel | None = None
        most_gpus, work = 0, []
        for view in reversed(earlier):
            seen = [report.body for report in self._ended.observations(view.id, REPORTS)]
            measured = [body for body in seen if isinstance(body, Observation)]
            if not measured:
                continue
            model = self._learner(job.spec, measured[0]) if model is None else model
            for body in measured:
                try:
                    model.observe_report(body)
                except ValueError as error:
                    log.warning("observation ignored", extra={"job": view.id, "text": str(error)[:200]})
            most_gpus = max(most_gpus, *(body.gpus for body in measured))
            if view.ended == "COMPLETED":
                work.append(view.total if view.total is not None else measured[-1].progress)
        if model is None or not isinstance(model.estimator, TrainingEstimator):
            return None
        return Kin(model.estimator, most_gpus, tuple(each for each in work if each > 0))


def _kind(name: str, spec: JobSpec) -> tuple[object, ...]:
    return kind_by_name(name), spec.batch_size, spec.max_batch_size, spec.scale_unit, spec.model_family
