"""A store that forgets when the process ends: for simulations and tests."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_profiles.wire import Report
from penstock_scheduler.model import Outcome
from penstock_scheduler.model.records import RoundRecord


class MemoryStore:
    """Keeps everything, in order."""

    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []
        self.outcomes: list[tuple[float, Outcome]] = []
        self.reports: list[Report] = []

    def last_round(self) -> RoundRecord | None:
        """The newest round."""
        return self.rounds[-1] if self.rounds else None

    def save_round(self, record: RoundRecord) -> None:
        """Keep a round."""
        self.rounds.append(record)

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append outcomes."""
        self.outcomes.extend((time_s, outcome) for outcome in outcomes)

    def add_reports(self, reports: Sequence[Report]) -> None:
        """Append reports."""
        self.reports.extend(reports)
