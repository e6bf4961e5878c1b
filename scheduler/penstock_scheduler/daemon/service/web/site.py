"""The page of the site, for operators: figures over time, rounds, accounts, budgets, cloud, drains, what admins may do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock_scheduler.api.access_messages import AuditLine
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.api.ledger_messages import BudgetView, UsageLine
from penstock_scheduler.api.messages import Drain, RoundSummary
from penstock_scheduler.daemon.service import views
from penstock_scheduler.daemon.service.api import Api, Call
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.web.cells import World
from penstock_scheduler.daemon.service.web.render import Fragments, block
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import GateRecord
from penstock_scheduler.rounds.policies import policy_names
from penstock_scheduler.store.leadership.site_clock import site_time_s

TEMPLATE = "site.html"

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0
POINTS = 300
"""Points of a chart."""
FIRST = ("jobs.running",)
"""A figure that every sample of the cluster has: when it begins tells how old the site's samples are."""
ROUNDS, LINES = 20, 25
"""Newest rounds, and newest lines of the audit log."""
SOON_S, SLOWLY_S = 3.0, 60.0
"""How often rounds, health and the audit log are read; how often charts and sums."""


@dataclass(frozen=True, slots=True)
class Soon:
    """What is read often."""

    health: Health | None
    """None: penstockd does not answer."""
    rounds: Sequence[RoundSummary]
    refused: tuple[int, GateRecord] | None
    """The newest round, if the plan gate refused its first plan."""
    audit: Sequence[AuditLine]


@dataclass(frozen=True, slots=True)
class Slowly:
    """What costs more to read."""

    series: Mapping[str, Sequence[tuple[float, float]]]
    step_s: int
    """Each point of the series stands for so many seconds."""
    usage: Sequence[UsageLine]
    """Of the last week, by account."""
    spent_usd: float
    """In the cloud, in the last week."""
    committed_usd: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The site at a time."""

    soon: Soon
    slowly: Slowly
    policy: PolicyChoice
    drains: Sequence[Drain]
    budgets: Sequence[BudgetView]
    can_be_drained: Mapping[str, Sequence[str]]


class Reader:
    """Reads the page's facts, once for all its viewers."""

    def __init__(self) -> None:
        self._soon: tuple[float, Soon] | None = None
        self._slowly: tuple[float, Slowly] | None = None
        self._reading = asyncio.Lock()

    async def read(self, api: Api) -> Facts:
        """The site. Raises StoreError."""
        async with self._reading:
            now_s = time.monotonic()
            if self._soon is None or now_s - self._soon[0] > SOON_S:
                self._soon = now_s, await _soon(api)
            if self._slowly is None or now_s - self._slowly[0] > SLOWLY_S:
                self._slowly = now_s, await asyncio.to_thread(_slowly, api)
        chosen = api.daemon.chosen
        return Facts(
            self._soon[1], self._slowly[1], chosen.policy, chosen.drains, chosen.budgets, views.drainable(api.known)
        )


async def _soon(api: Api) -> Soon:
    try:
        health = await api.daemon.health(site_time_s())
    except Refusal:
        health = None

    def read() -> Soon:
        rounds, record = api.store.summaries(None, ROUNDS), api.known.record
        refused = None if record is None or not record.gate.refused else (record.snapshot.round, record.gate)
        return Soon(health, rounds, refused, api.store.audit(limit=LINES))

    return await asyncio.to_thread(read)


def _slowly(api: Api) -> Slowly:
    now_s = site_time_s()
    first_s = min(
        (at for points in api.store.series(FIRST, now_s - DAY_S, now_s, 60).values() for at, _ in points), default=now_s
    )
    step_s = max(int((now_s - first_s) / POINTS), 1)
    return Slowly(
        series=api.store.series((), now_s - DAY_S, now_s, step_s),
        step_s=step_s,
        usage=views.usage(api.known, api.daemon.chosen.prices, "account", now_s - WEEK_S, None, None).lines,
        spent_usd=sum(api.store.ledger_totals("usd", since_s=now_s - WEEK_S).values()),
        committed_usd=sum(api.store.committed_usd().values()),
    )


def fragments(call: Call, world: World, facts: Facts) -> Fragments:
    """The page. Only admins get the buttons that only admins may press."""
    admin = call.identity.role == "admin"
    parts = {
        "now": block(TEMPLATE, "now", cluster=world.cluster, health=facts.soon.health, totals=_totals(world)),
        "refused": block(TEMPLATE, "refused", refused=facts.soon.refused, admin=admin),
        "series": block(TEMPLATE, "series", series=json.dumps(columns(facts.slowly.series, facts.slowly.step_s))),
        "rounds": block(TEMPLATE, "rounds", rows=facts.soon.rounds),
        "accounts": block(TEMPLATE, "accounts", rows=accounts(world, facts.slowly.usage)),
        "budgets": block(TEMPLATE, "budgets", rows=[budget_row(each, world.time_s) for each in facts.budgets]),
        "cloud": block(
            TEMPLATE,
            "cloud",
            spans=[span for span in world.spans if span.where == "cloud"],
            spent_usd=facts.slowly.spent_usd,
            committed_usd=facts.slowly.committed_usd,
        ),
        "drains": block(TEMPLATE, "drains", rows=facts.drains),
        "audit": block(TEMPLATE, "audit", rows=facts.soon.audit),
    }
    if admin:
        parts["pause"] = block(TEMPLATE, "pause", paused=world.cluster.paused)
    more = {
        "admin": admin,
        "can_be_drained": facts.can_be_drained,
        "policy": facts.policy.name,
        "policies": policy_names(),
        "stays": facts.policy.model_dump_json(include={"stages", "partitions"}),
    }
    return Fragments(parts, "", more)


def _totals(world: World) -> dict[str, int]:
    cluster = world.cluster
    counts = {
        "all": cluster.gpus,
        "allocated": cluster.allocated,
        "others": cluster.others,
        "unusable": cluster.unusable,
    }
    totals = {name: sum(by_type.values()) for name, by_type in counts.items()}
    totals["free"] = sum(node.free for node in world.nodes if not node.leave)
    totals["waiting"] = sum(entry.position is not None for entry in world.queue)
    return totals


def columns(series: Mapping[str, Sequence[tuple[float, float]]], step_s: int = 1) -> dict[str, list[float | None]]:
    """The charts' columns: `time`, and figures at these times; None: there is no sample.

    Points of one step belong together although their times differ: a point has the time of the first sample of its step, which
    some figures lack.

    `free` are GPUs that neither Penstock's jobs nor others hold, on nodes where jobs may start. `waste` are those while jobs wait
    for GPUs.
    """
    first: dict[float, float] = {}  # step -> its time
    for at in sorted(at for points in series.values() for at, _ in points):
        first.setdefault(at // step_s, at)
    times = list(first.values())

    def line(name: str, scale: float = 1.0) -> list[float | None]:
        found = {at // step_s: value for at, value in series.get(name, ())}
        return [None if (value := found.get(step)) is None else round(scale * value, 4) for step in first]

    def total(what: str) -> list[float | None]:
        lines = [line(name) for name in series if name.startswith("gpus.") and name.endswith(f".{what}")]
        return [
            None if all(value is None for value in column) else sum(value or 0.0 for value in column)
            for column in zip(*lines, strict=True)
        ] or [None] * len(times)

    every, mine, others, unusable = total("all"), total("allocated"), total("others"), total("unusable")
    free = [
        None if whole is None else max(whole - (a or 0.0) - (b or 0.0) - (c or 0.0), 0.0)
        for whole, a, b, c in zip(every, mine, others, unusable, strict=True)
    ]
    queued = line("jobs.queued")
    waste = [
        None if idle is None else idle if (jobs or 0.0) >= 1 else 0.0 for idle, jobs in zip(free, queued, strict=True)
    ]
    return {
        "time": [*times],
        "Penstock": mine,
        "others": others,
        "free": free,
        "unusable": unusable,
        "waste": waste,
        "queued": queued,
        "running": line("jobs.running"),
        "as expected": line("as-expected", 100.0),
        "busy": line("busy", 100.0),
        "deciding": line("rounds.decide_s"),
        "gap": line("rounds.gap", 100.0),
        "stops": line("rounds.stops"),
        "moves": line("rounds.moves"),
        "refused plans": line("rounds.refused"),
    }


@dataclass(frozen=True, slots=True)
class AccountRow:
    """What an account has now, and had in the last week."""

    name: str
    gpus: int
    running: int
    waiting: int
    oldest_s: float | None
    """When the job was submitted that waits for GPUs and was submitted first."""
    gpu_hours: float
    share: float
    """Of all accounts' GPU-hours, in [0, 1]."""


def accounts(world: World, usage: Sequence[UsageLine]) -> list[AccountRow]:
    """The accounts, by GPU-hours of the last week."""
    hours: dict[str, float] = {}
    for line in usage:
        hours[line.name] = hours.get(line.name, 0.0) + line.gpu_hours
    gpus: dict[str, int] = {}
    running: dict[str, int] = {}
    for span in world.spans:
        gpus[span.account] = gpus.get(span.account, 0) + span.gpus
        running[span.account] = running.get(span.account, 0) + 1
    waiting: dict[str, list[float]] = {}
    for entry in world.queue:
        if entry.position is not None:
            waiting.setdefault(entry.account, []).append(entry.submit_s)
    total = sum(hours.values())
    rows = [
        AccountRow(
            name=name,
            gpus=gpus.get(name, 0),
            running=running.get(name, 0),
            waiting=len(waiting.get(name, ())),
            oldest_s=min(waiting.get(name, ()), default=None),
            gpu_hours=hours.get(name, 0.0),
            share=hours.get(name, 0.0) / total if total > 0 else 0.0,
        )
        for name in {*hours, *gpus, *waiting}
    ]
    return sorted(rows, key=lambda row: (-row.gpu_hours, row.name))


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One quantity of a budget."""

    unit: str
    used: float
    most: float | None
    """The hard limit, or the soft one if there is no other."""
    hard: bool
    a_day: float | None
    """Mean use since the period began; None: it has just begun."""
    ends_s: float | None
    """When the limit is reached at that speed; None: not in this period, or there is no limit."""


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A budget, how fast it is used, and when it will be used up at that speed."""

    budget: BudgetView
    lines: Sequence[BudgetLine]


def budget_row(budget: BudgetView, now_s: float) -> BudgetRow:
    """A budget with its speed, which is the mean since the period began."""
    quantities = (
        ("GPU-hours", budget.used_gpu_hours, budget.hard_gpu_hours, budget.soft_gpu_hours),
        ("USD", budget.used_usd, budget.hard_usd, budget.soft_usd),
    )
    days = (now_s - budget.since_s) / DAY_S
    lines = []
    for unit, used, hard, soft in quantities:
        most = soft if hard is None else hard
        if most is None:
            continue
        a_day = used / days if days > 1 / 24 else None
        ends_s = None
        if a_day:
            reached_s = max(now_s + (most - used) / a_day * DAY_S, now_s)
            ends_s = reached_s if budget.ends_s is None or reached_s < budget.ends_s else None
        lines.append(BudgetLine(unit, used, most, hard is not None, a_day, ends_s))
    return BudgetRow(budget, lines)
