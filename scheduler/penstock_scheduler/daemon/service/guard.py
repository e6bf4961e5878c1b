"""Limits on the rate of requests of a user, and on the values in a report. `limits.py` has those on connections and bodies."""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from penstock_profiles.wire import MAX_REPORT_BYTES, Ended, Observation, Report
from penstock_scheduler.model.plausible import check_plausible
from penstock_scheduler.model.spec_errors import describe_errors

MAX_SAMPLES_PER_S = 1e8
"""A report of a higher throughput is refused. No job is nearly as fast."""
MAX_AHEAD_S = 86_400.0
"""How far a node's clock may be ahead of the daemon's."""


class Bucket:
    """A token bucket for each name: `per_s` tokens per second, at most `burst`."""

    def __init__(self, per_s: float, burst: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._now_s = per_s, burst, now_s
        self._left: dict[str, tuple[float, float]] = {}

    def pause_s(self, name: str) -> float:
        """The seconds until there will be a token; 0: there is one. Takes none."""
        left, at_s = self._left.get(name, (self._burst, self._now_s()))
        left += (self._now_s() - at_s) * self._per_s
        return 0.0 if left >= 1 else (1 - left) / self._per_s

    def take(self, name: str) -> float:
        """Take a token. Returns 0 if there was one, else the seconds until there will be one."""
        now_s = self._now_s()
        left, at_s = self._left.get(name, (self._burst, now_s))
        left = min(left + (now_s - at_s) * self._per_s, self._burst)
        self._left[name] = (left - 1 if left >= 1 else left), now_s
        if len(self._left) > 10_000:  # a full bucket needs no entry
            self._left = {name: kept for name, kept in self._left.items() if kept[0] < self._burst - 1}
        return 0.0 if left >= 1 else (1 - left) / self._per_s

    def give_back(self, name: str) -> None:
        """Undo a `take` that got a token."""
        left, at_s = self._left.get(name, (self._burst, self._now_s()))
        self._left[name] = min(left + 1, self._burst), at_s


def check_report(given: object, job: str, now_s: float) -> Report:
    """Read and check a report of a job. Raises ValueError with a message for the sender."""
    try:
        report = Report.model_validate(given)
    except ValidationError as error:
        raise ValueError("; ".join(describe_errors(error, Report))[:500]) from None
    if report.job_id != job:
        raise ValueError(f"the report is of job {report.job_id[:50]}, not of {job}")
    check_plausible(report)
    if report.time_s > now_s + MAX_AHEAD_S:
        raise ValueError(
            f"time_s={report.time_s:g} is more than a day ahead of the daemon's clock; set the node's clock"
        )
    body = report.body
    if isinstance(body, Observation):
        rate = body.samples_per_s
        if max(rate, body.goodput or 0.0) > MAX_SAMPLES_PER_S:
            raise ValueError(f"{max(rate, body.goodput or 0.0):.3g} samples/s are not plausible")
        if body.sync_time_s is not None and body.sync_time_s > body.step_time_s:
            raise ValueError("sync_time_s must not be longer than step_time_s")
        if body.nodes > body.gpus:
            raise ValueError("there are more nodes than GPUs")
    if isinstance(body, Ended) and len(body.text) > 10_000:
        raise ValueError("the text is longer than 10,000 characters")
    if len(report.model_dump_json()) > MAX_REPORT_BYTES:
        raise ValueError(f"the report is longer than {MAX_REPORT_BYTES} bytes")
    return report
