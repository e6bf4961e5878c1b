"""Budgets of GPU-hours as a round sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Period = Literal["day", "week", "month", "year", "total"]
"""The period of a budget, in UTC. Weeks begin on Monday."""


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """What an account may use in a period, and what it has used."""

    account: str
    """The account; empty: the whole site."""
    period: Period
    soft_h: float | None
    """GPU-hours from which the weight of its jobs is multiplied by `soft_weight`; None: no soft limit."""
    hard_h: float | None
    """GPU-hours from which none of its jobs starts or grows; None: no hard limit."""
    used_h: float
    ends_s: float | None = None
    """When the period ends, s since 1970; None: never."""
    soft_weight: float = 1.0
    stops: bool = False
    """Whether the grace period after the hard limit is over, so that its jobs must leave their GPUs."""

    @property
    def over_soft(self) -> bool:
        """Whether the soft limit is reached."""
        return self.soft_h is not None and self.used_h >= self.soft_h

    @property
    def over_hard(self) -> bool:
        """Whether the hard limit is reached."""
        return self.hard_h is not None and self.used_h >= self.hard_h

    def covers(self, account: str) -> bool:
        """Whether a job of this account counts against the budget."""
        return self.account in ("", account)

    def __str__(self) -> str:
        owner = f"account {self.account}" if self.account else "the site"
        when = "in total" if self.period == "total" else "today" if self.period == "day" else f"this {self.period}"
        limits = [f"{h:g} ({kind})" for kind, h in (("soft", self.soft_h), ("hard", self.hard_h)) if h is not None]
        return f"the budget of {owner}: {self.used_h:.1f} of {' and '.join(limits)} GPU-hours used {when}"
