"""The site's own rules for a round: drained nodes, budgets of accounts, and rules of partitions.

The rules change the snapshot before it is decided. They are saved with it, so a replay needs neither the settings nor the ledger.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError, model_validator

from penstock_scheduler.accounts.limits import LimitSettings, by_partition, site_limits
from penstock_scheduler.api.ledger_messages import BudgetView
from penstock_scheduler.api.messages import Drain
from penstock_scheduler.api.ports import SiteRules
from penstock_scheduler.burst.deciding.ledger import at_border
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.model import BudgetLine, GpuBudget, LeaveCause, LeaveRequest, Node, Period, Snapshot

if TYPE_CHECKING:
    from penstock_scheduler.store.sql import SqlStore


class Budget(BaseModel):
    """What may be used in a period: GPU-hours on site, dollars in the cloud. A limit that is not set does not apply."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    period: Period = "month"
    soft_gpu_hours: NonNegativeFloat | None = None
    hard_gpu_hours: NonNegativeFloat | None = None
    soft_usd: NonNegativeFloat | None = None
    hard_usd: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Budget:
        for what in ("gpu_hours", "usd"):
            soft, hard = getattr(self, f"soft_{what}"), getattr(self, f"hard_{what}")
            if soft is not None and hard is not None and soft > hard:
                raise ValueError(f"soft_{what}={soft:g} is above hard_{what}={hard:g}: the soft limit comes first")
        return self


class BudgetSettings(BaseModel):
    """Section `[budgets]` of the settings file: what accounts may use.

    A budget has `period` ("day", "week", "month", "year" or "total"), `soft_gpu_hours`, `hard_gpu_hours`, `soft_usd` and
    `hard_usd`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    site: Budget | None = Field(default=None, description="Budget of all accounts together; not set: none.")
    per_account: Budget | None = Field(
        default=None, description="Budget of each account that `accounts` does not name."
    )
    accounts: dict[str, Budget] = Field(default={}, description="Budgets of single accounts, by account.")
    at_hard: Literal["finish", "stop"] = Field(
        default="finish",
        description="Effect on running jobs over a hard limit: they finish, or they save and stop after grace_s.",
    )
    grace_s: NonNegativeFloat = Field(
        default=86_400.0, description="With at_hard = 'stop': how long jobs run on over a hard limit, seconds."
    )
    prices: dict[str, NonNegativeFloat] = Field(
        default={},
        description="Price of a GPU-hour at the site by GPU type, USD, such as {t4 = 0.4}, for `penstock usage`.",
    )

    soft_weight: ClassVar[float] = 0.1
    """Factor on the weight of an account's jobs once the account is over its soft limit: low enough that jobs of other
    accounts go first, above 0 so that idle GPUs are still used."""


Reached = Callable[[BudgetView, Literal["soft", "hard"]], None]
"""Called when a budget reaches a limit."""


class SchedulingRules(SiteRules):
    """The rules in force. Methods may be called from any thread."""

    def __init__(
        self,
        settings: BudgetSettings,
        limits: LimitSettings,
        store: SqlStore,
        reached: Reached = lambda view, limit: None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._store = store
        self._reached = reached
        self._lock = threading.Lock()
        self._drains = tuple(Drain.model_validate(each, extra="ignore") for each in store.control("drains") or ())
        self._since: dict[str, dict[str, float]] = store.control("budgets") or {}
        self._views: tuple[BudgetView, ...] = ()

    @property
    def drains(self) -> tuple[Drain, ...]:
        """All drains, newest last."""
        return self._drains

    @property
    def budgets(self) -> tuple[BudgetView, ...]:
        """Budgets, as of the newest round."""
        return self._views

    @property
    def prices(self) -> dict[str, float]:
        """GPU type -> price of a GPU-hour at the site, USD."""
        return self._settings.prices

    @property
    def limits(self) -> LimitSettings:
        """The site's limits."""
        return self._limits

    def use(self, settings: BudgetSettings, limits: LimitSettings) -> None:
        """Apply these settings from the next round on."""
        self._settings, self._limits = settings, limits

    def drain(self, drain: Drain) -> None:
        """Start a drain, which outlives a restart. A second drain of the same thing replaces the first. Raises StoreError."""
        self._set_drains([*(each for each in self._drains if each.what != drain.what), drain])

    def end_drain(self, what: tuple[str, str]) -> bool:
        """End a drain. Returns whether there was one. Raises StoreError."""
        left = [each for each in self._drains if each.what != what]
        found = len(left) < len(self._drains)
        if found:
            self._set_drains(left)
        return found

    def _set_drains(self, drains: Iterable[Drain]) -> None:
        with self._lock:
            kept = tuple(drains)
            self._store.set_control("drains", [each.model_dump(mode="json") for each in kept])
            self._drains = kept

    def on(self, snapshot: Snapshot) -> Snapshot:
        """Apply the rules to a snapshot. Raises StoreError."""
        limits, drains = self._limits, self._drains
        nodes = tuple(drained(node, drains) for node in snapshot.nodes)
        jobs, facts = by_partition(limits.partitions, snapshot.jobs, snapshot.facts)
        lines, dollars = self._budgets(snapshot)
        cloud = snapshot.cloud
        if cloud is not None and dollars:
            cloud = dataclasses.replace(cloud, budgets=(*cloud.budgets, *dollars))
        return dataclasses.replace(
            snapshot,
            nodes=nodes,
            jobs=jobs,
            facts=facts,
            limits=(*snapshot.limits, *site_limits(limits, jobs, snapshot.unseen)),
            budgets=lines,
            cloud=cloud,
        )

    def dollars(self, account: str, now_s: float) -> tuple[BudgetLine, ...]:
        """See `SiteRules.dollars`. Raises StoreError."""
        capped = {
            name: budget
            for name, budget in _budgets_of(self._settings, {account}).items()
            if budget.hard_usd is not None and name in ("", account)
        }
        commitments = self._store.open_commitments() if capped else []
        return tuple(
            line
            for name, budget in capped.items()
            for line in _dollars(name, budget, _of(name, self._spent(budget.period, now_s)[1]), commitments, now_s)
        )

    def _budgets(self, snapshot: Snapshot) -> tuple[tuple[GpuBudget, ...], tuple[BudgetLine, ...]]:
        settings, now_s = self._settings, snapshot.time_s
        budgets = _budgets_of(settings, {job.account for job in snapshot.jobs})
        if not budgets and not self._views:
            return (), ()
        spent = {period: self._spent(period, now_s) for period in {budget.period for budget in budgets.values()}}
        running = _attained(snapshot)
        capped = any(budget.hard_usd is not None for budget in budgets.values())
        commitments = self._store.open_commitments() if capped else []
        views, lines, dollars = [], [], []
        since = {key: kept for key, kept in self._since.items() if key.rpartition("/")[0] not in budgets}
        for account, budget in budgets.items():
            hours, usd = (_of(account, totals) for totals in spent[budget.period])
            used_h = (hours + _of(account, running)) / 3600
            begin_s, ends_s = period_bounds(budget.period, now_s)
            view = BudgetView(
                account=account,
                used_gpu_hours=used_h,
                used_usd=usd,
                since_s=begin_s,
                ends_s=ends_s,
                **budget.model_dump(),
            )
            since[f"{account}/{begin_s:.0f}"] = reached = self._note(view, now_s)
            hard_since_s = reached.get("hard_gpu_hours")
            stops = settings.at_hard == "stop" and hard_since_s is not None and now_s - hard_since_s >= settings.grace_s
            views.append(view)
            if budget.soft_gpu_hours is not None or budget.hard_gpu_hours is not None:
                soft_h, hard_h = budget.soft_gpu_hours, budget.hard_gpu_hours
                lines.append(
                    GpuBudget(account, budget.period, soft_h, hard_h, used_h, ends_s, settings.soft_weight, bool(stops))
                )
            dollars += _dollars(account, budget, usd, commitments, now_s)
        if since != self._since:
            self._store.set_control("budgets", since)
        self._since, self._views = since, tuple(views)
        return tuple(lines), tuple(dollars)

    def _note(self, view: BudgetView, now_s: float) -> dict[str, float]:
        """Limit -> when the budget reached it, s since 1970. Limits that are reached for the first time are reported."""
        known = self._since.get(f"{view.account}/{view.since_s:.0f}", {})
        found: dict[str, float] = {}
        for limit in ("soft", "hard"):
            for used, what in ((view.used_gpu_hours, "gpu_hours"), (view.used_usd, "usd")):
                allowed = getattr(view, name := f"{limit}_{what}")
                if allowed is None or used < allowed:
                    continue
                found[name] = known.get(name, now_s)
                if name not in known:
                    self._reached(view, limit)
        return found

    def _spent(self, period: Period, now_s: float) -> tuple[dict[str, float], dict[str, float]]:
        begin_s, _ = period_bounds(period, now_s)
        return self._store.ledger_totals("gpu-seconds", since_s=begin_s), self._store.ledger_totals(
            "usd", since_s=begin_s
        )


def drained(node: Node, drains: Iterable[Drain]) -> Node:
    """The node; if a drain covers it, nothing may start there and its jobs are asked to leave."""
    found = next((each for each in drains if each.covers(node.name, node.gpu_type, node.partitions)), None)
    if found is None:
        return node
    request = LeaveRequest(LeaveCause.PENSTOCK_DRAIN, f"{found.by}: {found.why}" if found.why else found.by)
    state = f"{node.state} drained by {found.by}".strip()
    return dataclasses.replace(node, may_start=False, leave=node.leave or request, state=state)


def period_bounds(period: Period, now_s: float) -> tuple[float, float | None]:
    """(begin, end) of the present period in UTC, s since 1970. The period `total` began at 0 and never ends."""
    day = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "total":
        return 0.0, None
    if period == "day":
        begin, end = day, day + timedelta(days=1)
    elif period == "week":
        begin = day - timedelta(days=day.weekday())
        end = begin + timedelta(days=7)
    elif period == "month":
        begin = day.replace(day=1)
        end = (begin + timedelta(days=32)).replace(day=1)
    else:
        begin = day.replace(month=1, day=1)
        end = begin.replace(year=begin.year + 1)
    return begin.timestamp(), end.timestamp()


def _budgets_of(settings: BudgetSettings, accounts: set[str]) -> dict[str, Budget]:
    """Account -> its budget. The account "" is the whole site."""
    found = {} if settings.site is None else {"": settings.site}
    for account in sorted((accounts | set(settings.accounts)) - {""}):
        budget = settings.accounts.get(account, settings.per_account)
        if budget is not None:
            found[account] = budget
    return found


def _dollars(
    account: str, budget: Budget, usd: float, commitments: Iterable[tuple[str, float, str]], now_s: float
) -> list[BudgetLine]:
    """What is left of a budget in dollars, of which `usd` are spent. Empty: it has no hard limit in dollars.

    Commitments are split at the end of a month and of a year, as bills and the ledger are. Other periods count all of each.
    """
    if budget.hard_usd is None:
        return []
    begin_s, end_s = period_bounds(budget.period, now_s)
    open_ = [(most_usd, record) for name, most_usd, record in commitments if account in ("", name)]
    if end_s is None or budget.period in ("day", "week"):
        return [BudgetLine(account, budget.period, budget.hard_usd, usd + sum(most_usd for most_usd, _ in open_))]
    now_usd, then_usd = usd, 0.0
    for most_usd, record in open_:
        parts = _parts(record, begin_s, end_s)
        now_usd, then_usd = now_usd + min(parts[0], most_usd), then_usd + min(parts[1], most_usd)
    return at_border(account, budget.period, budget.hard_usd, (now_usd, then_usd), end_s - now_s)


def _parts(record: str, begin_s: float, end_s: float) -> tuple[float, float]:
    """US dollars that a run may cost by the end of a period and afterwards. A record that cannot be read counts fully in both."""
    try:
        return BurstRun.model_validate_json(record, extra="ignore").by_month_usd(begin_s, end_s)
    except ValidationError:
        return math.inf, math.inf


def _attained(snapshot: Snapshot) -> dict[str, float]:
    """Account -> GPU-seconds of jobs that have not ended. Jobs that have ended are in the ledger."""
    sums: dict[str, float] = {}
    for job in (*snapshot.jobs, *snapshot.unseen):
        sums[job.account] = sums.get(job.account, 0.0) + sum(snapshot.attained_gpu_s(job.id).values())
    return sums


def _of(account: str, totals: Mapping[str, float]) -> float:
    """The account's total; for the account "", the total of all."""
    return totals.get(account, 0.0) if account else sum(totals.values())
