"""Limits on the rate of requests of a user, and on the values in a report. `limits.py` has those on connections and bodies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from pydantic import ValidationError

from penstock_profiles.wire import MAX_REPORT_BYTES, Ended, Observation, Report
from penstock_scheduler.model.plausible import check_plausible
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.safety.open_files import Places

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


class Turns:
    """Turns that clients share on one event loop: each has as many as `Places` allow, and those who wait are served one client
    after another. So however much one client asks for, others wait for what is under way and for each other."""

    def __init__(self, total: int) -> None:
        self._places = Places(total)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who were served longest ago come first."""

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Hold a turn, after waiting for it."""
        if not self._places.take(client):
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():
                    self._leave(client)
                raise
        try:
            yield
        finally:
            self._leave(client)

    def _leave(self, client: str) -> None:
        self._places.give_back(client)
        for each, queue in [*self._waiting.items()]:
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue and self._places.take(each):
                queue.popleft().set_result(None)
                self._waiting[each] = self._waiting.pop(each)
            if not queue:
                del self._waiting[each]
