"""What the cloud has cost and may still cost: a ledger of entries, which are never changed, and budgets over them.

An entry is written before an instance is ordered (`committed`: the most that the run may cost) and when the instance is gone
(`spent`: what the run did cost, in place of the commitment). So a run counts with its committed cost, and a daemon that dies
between the two entries has counted too much rather than too little. The store keeps the entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from penstock_scheduler.model import BudgetLine


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger.

    Attributes:
        run: job and number of the run, such as `4711.2`.
        kind: `committed` when the run is ordered, `spent` when it is over; the last entry of a run counts.
        usd: dollars, >= 0.
        account: the account that is charged.
        time_s: time of the entry, s since 1970.
    """

    run: str
    kind: Literal["committed", "spent"]
    usd: float
    account: str
    time_s: float


class Caps(BaseModel):
    """Most dollars of the site, or of one account. Absent: no cap."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    usd_per_month: NonNegativeFloat | None = None
    usd_total: NonNegativeFloat | None = None


class CloudBudgets(BaseModel):
    """What a site may spend in the cloud. By default, no job may leave: an admin must set a cap."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    site: Caps = Field(default=Caps(usd_total=0.0), description="All accounts together.")
    per_account: Caps = Field(default=Caps(), description="Each account that is not named in `accounts`.")
    accounts: dict[str, Caps] = Field(default={}, description="Accounts with caps of their own.")


class Used:
    """Sums over the entries so far. A run counts in the month (UTC) of its first entry, with its last one.

    Args:
        entries: the first entries, oldest first.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._runs: dict[str, tuple[tuple[int, int], Entry]] = {}
        """Run -> its month and its last entry."""
        self._sums: dict[tuple[tuple[int, int] | None, str], float] = {}
        """(month, or None for all; account, or empty for the site) -> US dollars."""
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add one more entry."""
        month, before = self._runs.get(entry.run, (_month(entry.time_s), None))
        if before is not None:
            self._count(month, before, -before.usd)
        self._count(month, entry, entry.usd)
        self._runs[entry.run] = month, entry

    def _count(self, month: tuple[int, int], entry: Entry, usd: float) -> None:
        for account in {"", entry.account}:
            for when in (month, None):
                self._sums[when, account] = self._sums.get((when, account), 0.0) + usd

    def lines(self, settings: CloudBudgets, now_s: float, accounts: Iterable[str]) -> tuple[BudgetLine, ...]:
        """The caps that apply to jobs of these accounts, with what is used of each."""
        lines, month = [], _month(now_s)
        caps_of = {"": settings.site} | {
            name: settings.accounts.get(name, settings.per_account) for name in sorted({*accounts} - {""})
        }
        for name, caps in caps_of.items():
            if caps.usd_per_month is not None:
                lines.append(BudgetLine(name, "month", caps.usd_per_month, self._sum(month, name)))
            if caps.usd_total is not None:
                lines.append(BudgetLine(name, "total", caps.usd_total, self._sum(None, name)))
        return tuple(lines)

    def _sum(self, when: tuple[int, int] | None, account: str) -> float:
        # Sums to which entries were added and from which they were taken again may end a little below 0.
        return max(self._sums.get((when, account), 0.0), 0.0)


def _month(time_s: float) -> tuple[int, int]:
    at = datetime.fromtimestamp(time_s, UTC)
    return at.year, at.month
