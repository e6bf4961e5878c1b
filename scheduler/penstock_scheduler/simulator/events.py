"""Time in a simulation: a clock that jumps, and the future events of the cluster."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple


class SimulatedClock:
    """Time that passes only in `sleep`.

    `next_event_s` tells when something happens that ends a sleep early; None: sleeps are never cut short.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self.next_event_s: Callable[[], float] | None = None

    def now_s(self) -> float:
        """Seconds since the start of the simulation, plus its start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Jump ahead. An infinite sleep in which nothing ever happens takes no time."""
        until_s = self._now_s + seconds
        if self.next_event_s is not None:
            until_s = min(until_s, max(self.next_event_s(), self._now_s))
        if math.isfinite(until_s):
            self._now_s = until_s


What = Literal["end", "leave", "slice", "fail", "repair"]
"""End and leave are of a job; a slice, a failure and a repair are of a node."""


class Event(NamedTuple):
    """A future event. Events at the same time happen in the order in which they were foreseen."""

    at_s: float
    number: int
    what: What
    subject: str
    """Job or node."""


class Events:
    """Future events. A stale event, which later changes prevent, never happens.

    Args:
        is_stale: whether an event is stale.
        dropped: called with each stale event that is removed.
    """

    def __init__(self, is_stale: Callable[[Event], bool], dropped: Callable[[Event], None]) -> None:
        self._is_stale, self._dropped = is_stale, dropped
        self._numbers = itertools.count()
        self._heap: list[Event] = []

    def push(self, at_s: float, what: What, subject: str) -> int:
        """Foresee an event; returns its number."""
        number = next(self._numbers)
        heapq.heappush(self._heap, Event(at_s, number, what, subject))
        return number

    def next_s(self) -> float:
        """Time of the next event; infinite: there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            self._dropped(heapq.heappop(self._heap))
        return self._heap[0].at_s if self._heap else math.inf

    def pop(self, until_s: float) -> Event | None:
        """Remove and return the next event that happens at or before `until_s`; None: there is none."""
        while self._heap and self._heap[0].at_s <= until_s:
            event = heapq.heappop(self._heap)
            if not self._is_stale(event):
                return event
            self._dropped(event)
        return None

    def first_s(self, wanted: Callable[[Event], bool]) -> float:
        """Time of the first event that is `wanted`, which is called in the order of time; infinite: there is none."""
        passed, found_s = [], math.inf
        while self._heap and found_s == math.inf:
            passed.append(event := heapq.heappop(self._heap))
            if not self._is_stale(event) and wanted(event):
                found_s = event.at_s
        for event in passed:
            heapq.heappush(self._heap, event)
        return found_s
