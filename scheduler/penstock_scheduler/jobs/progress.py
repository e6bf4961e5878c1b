"""What a job has reported of its progress."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_profiles.wire import Ended, Observation, Report, Started

Number = tuple[int, int]
"""Epoch and sequence of a report, by which the reports of a job are in order."""

NOTHING: Number = (-1, -1)
"""Before the first report."""


def number(report: Report) -> Number:
    """The number of a report."""
    return report.epoch, report.sequence


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """The newest that a job has reported of its progress, in samples of the initial batch size."""

    number: Number = NOTHING
    """Of the report that says so."""
    done: float = 0.0
    total: float | None = None
    """Progress at which the job is done; None: unknown."""
    promised: float | None = None
    """The first `total` that it reported."""

    def after(self, report: Report) -> ReportedProgress:
        """What is known after a report.

        A daemon that has started reads the reports of running jobs again, from the first one: only newer ones change anything.
        """
        if number(report) <= self.number:
            return self
        body = report.body
        if isinstance(body, Started):
            promised = body.total if self.promised is None else self.promised
            return ReportedProgress(number(report), body.progress, body.total, promised)
        # A run that fails before it has read its checkpoint ends with progress 0.
        if isinstance(body, Observation) or (isinstance(body, Ended) and body.progress):
            return ReportedProgress(number(report), body.progress, self.total, self.promised)
        return self
