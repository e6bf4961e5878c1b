"""What clients cause in the log is bounded, and nothing on jobs and rounds is left out."""

from __future__ import annotations

import logging

from penstock_scheduler.people.logs import LINES, LINES_S, BoundLines


def test_lines_that_clients_cause_are_bounded_and_counted():
    now_s = 0.0
    bound = BoundLines(lambda: now_s)

    def written(name: str, message: str, count: int) -> int:
        made = [logging.LogRecord(name, logging.WARNING, "", 1, message, None, None) for _ in range(count)]
        return sum(bool(bound.filter(record)) for record in made)

    assert written("penstock_scheduler.daemon.service.identity", "login failed", 500) == LINES
    assert written("asyncio", "socket.accept() out of system resource", 500) == LINES, "each message has its own bound"
    assert written("penstock_scheduler.rounds.outcomes", "action", 5000) == 5000, "2,000 jobs may start in one round"
    now_s = LINES_S
    late = logging.LogRecord(
        "penstock_scheduler.daemon.service.identity", logging.INFO, "", 1, "login failed", None, None
    )
    assert bound.filter(late)
    assert late.left_out == 500 - LINES
