"""What the cloud has cost and may still cost: a ledger of entries, which are never changed, and budgets over them.

An entry is written before an instance is ordered (`committed`: the most that the run may cost) and when the instance is gone
(`spent`: what the run did cost in a month, in place of the commitment). So a run counts with its committed cost, and a daemon
that dies between the two entries has counted too much rather than too little. The store keeps the entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from penstock_scheduler.model import BudgetLine, Period


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger.

    Attributes:
        run: job and number of the run, such as `4711.2`.
        kind: `committed` when the run is ordered; `spent` when it is over, for each month in which it ran.
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


LATEST_S = 600.0
"""Seconds after its order at which a run's instances may still begin: orders are repeated for five minutes, and wait for
others."""


class Used:
    """Sums over the entries so far, in calendar months (UTC). Spent dollars count in the month of their entry.

    Args:
        entries: the first entries, oldest first.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._committed: dict[str, Entry] = {}
        """Run that is not paid for -> its entry."""
        self._spent: dict[tuple[float | None, str], float] = {}
        """(begin of a month, or None for all; account, or empty for the site) -> US dollars."""
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add one more entry. The first spent entry replaces the commitment of its run."""
        if entry.kind == "committed":
            self._committed[entry.run] = entry
            return
        self._committed.pop(entry.run, None)
        for key in itertools.product((month(entry.time_s)[0], None), {"", entry.account}):
            self._spent[key] = self._spent.get(key, 0.0) + entry.usd

    def lines(
        self, settings: CloudBudgets, now_s: float, accounts: Iterable[str], open_usd: Mapping[str, tuple[float, float]]
    ) -> tuple[BudgetLine, ...]:
        """The caps that apply to jobs of these accounts, with the dollars that are used of each.

        A commitment is split at the end of the month: a cap by month has a line for this month and one for the next.

        Args:
            settings: the caps.
            now_s: now, s since 1970.
            accounts: the accounts.
            open_usd: open run -> US dollars that it may cost in this month and afterwards, at most. Another run without a
                bill counts in the month of its entry.
        """
        (begin_s, end_s), lines = month(now_s), []
        caps_of = {"": settings.site} | {
            name: settings.accounts.get(name, settings.per_account) for name in sorted({*accounts} - {""})
        }
        for name, caps in caps_of.items():
            open_ = [entry for entry in self._committed.values() if name in ("", entry.account)]
            if (cap := caps.usd_per_month) is not None:
                parts = [open_usd.get(e.run, (e.usd if e.time_s >= begin_s else 0.0, 0.0)) for e in open_]
                now_usd, then_usd = (
                    sum(min(part[n], e.usd) for part, e in zip(parts, open_, strict=True)) for n in (0, 1)
                )
                used_usd = now_usd + self._sum(begin_s, name), then_usd
                lines += at_border(name, "month", cap, used_usd, end_s - now_s)
            if caps.usd_total is not None:
                usd = sum(entry.usd for entry in open_)
                lines.append(BudgetLine(name, "total", caps.usd_total, usd + self._sum(None, name)))
        return tuple(lines)

    def _sum(self, when: float | None, account: str) -> float:
        return self._spent.get((when, account), 0.0)


def at_border(
    account: str, period: Period, cap: float, used_usd: tuple[float, float], left_s: float
) -> list[BudgetLine]:
    """The lines of a cap for its present period and the next one, each with its part of what is used.

    Args:
        account: the account; empty: the site.
        period: the period.
        cap: the most of each period, US dollars.
        used_usd: what is used of the present one and of the next one, US dollars.
        left_s: seconds until the present one ends.
    """
    now_usd, then_usd = used_usd
    return [
        BudgetLine(account, period, cap, now_usd, until_h=left_s / 3600),
        BudgetLine(account, period, cap, then_usd, from_h=max(left_s - LATEST_S, 1.0) / 3600),
    ]


def month(time_s: float) -> tuple[float, float]:
    """(begin, end) of a time's calendar month in UTC, s since 1970."""
    begin = datetime.fromtimestamp(time_s, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin.timestamp(), (begin + timedelta(days=32)).replace(day=1).timestamp()


def by_month(begin_s: float, end_s: float, amount: float) -> dict[float, float]:
    """Begin of a month -> its part of an amount that arises evenly between two times, s since 1970."""
    first_s, until_s = month(begin_s)
    if end_s <= until_s:
        return {first_s: amount}
    part = amount * (until_s - begin_s) / (end_s - begin_s)
    return {first_s: part} | by_month(until_s, end_s, amount - part)
