"""The bodies of the API's answers about what jobs used: the ledger and budgets. `messages` has the other bodies."""

from __future__ import annotations

from typing import Literal

from penstock_scheduler.messages import Body
from penstock_scheduler.model import Period


class LedgerLine(Body):
    """An entry of the budget ledger."""

    id: int
    key: str
    time_s: float
    account: str
    user: str
    job: str
    kind: Literal["gpu-seconds", "cloud-gpu-seconds", "committed", "usd"]
    """`gpu-seconds`: held at the site. `committed`: most that a run in the cloud may cost, written before instances are
    ordered. `usd`: what the run cost. `cloud-gpu-seconds`: held in the cloud, from launch to end of the instances."""
    amount: float
    text: str


class LedgerPage(Body):
    """A page of the ledger, newest first."""

    lines: list[LedgerLine]
    next: int | None = None


class BudgetView(Body):
    """What an account may use in the present period, and what it has used."""

    account: str
    """Empty: the whole site."""
    period: Period
    since_s: float
    """When the period began."""
    ends_s: float | None = None
    soft_gpu_hours: float | None = None
    hard_gpu_hours: float | None = None
    used_gpu_hours: float
    """GPU-hours of jobs that ended in the period, and GPU-hours so far of jobs that have not ended."""
    soft_usd: float | None = None
    hard_usd: float | None = None
    used_usd: float
