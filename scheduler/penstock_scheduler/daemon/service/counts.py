"""What penstockd counts from its start on: counters and histograms, which `metrics` shows to Prometheus.

Prometheus sees a counter grow only if it has scraped the counter before. So all kinds that are known in advance are 0 from the
start.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Sequence

from penstock_scheduler.api.messages import JobView
from penstock_scheduler.model import StopCode
from penstock_scheduler.model.records import RoundRecord

PHASES = ("observe", "decide")
METHODS = ("GET", "POST", "PUT", "DELETE")
MINUTE, HOUR = 60.0, 3600.0
ROUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
REQUESTS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
WAITS = (10.0, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, 24 * HOUR, 72 * HOUR)


class Histogram:
    """How many durations were at most as long as each bound. Methods may be called from any thread."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Count a duration."""
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds_s, seconds)] += 1
            self._sum_s += seconds

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """(bound, durations up to it) with growing bounds, the last one `+Inf`, and the sum of all durations in seconds."""
        with self._lock:
            counts, sum_s = list(self._counts), self._sum_s
        names = [*(repr(bound) for bound in self._bounds_s), "+Inf"]
        return [(name, float(sum(counts[: at + 1]))) for at, name in enumerate(names)], sum_s


class Counts:
    """Counters and histograms since penstockd's start."""

    def __init__(self) -> None:
        self.rounds = {phase: Histogram(ROUNDS) for phase in PHASES}
        """Phase -> duration of rounds."""
        self.requests = {method: Histogram(REQUESTS) for method in METHODS}
        """Method -> duration of the API's requests, without those that wait for a change or for events."""
        self.waits = Histogram(WAITS)
        """Time of jobs from submission to their first start."""
        self.stops = Counter[str]({code.value: 0 for code in StopCode})
        """Code of the reason -> runs that rounds have stopped."""
        self.restarts = 0
        """Restarts of jobs."""

    def round(self, record: RoundRecord) -> None:
        """Count a round. For the round loop's thread."""
        for phase, seconds in record.seconds.items():
            if phase in self.rounds:
                self.rounds[phase].add(seconds)
        self.stops.update(stop.code.value for stop in record.plan.stops.values())

    def job(self, before: JobView | None, after: JobView) -> None:
        """Count what has happened to a job between two views. For the round loop's thread.

        Args:
            before: None: the job is new here, and may have run before this penstockd.
        """
        if before is None:
            return
        if before.start_s is None and after.start_s is not None:
            self.waits.add(max(after.start_s - after.submit_s, 0.0))
        self.restarts += max(after.restarts - before.restarts, 0)

    def request(self, method: str, seconds: float) -> None:
        """Count a request."""
        if method in self.requests:
            self.requests[method].add(seconds)
