"""The bodies of the API's answers about what jobs used: the ledger, usage and budgets. `messages` has the other bodies."""

from __future__ import annotations

from typing import Literal, get_args

from penstock_scheduler.api.messages import Body
from penstock_scheduler.model import Period

CORRECTED = ":corrected"
"""End of the key of an entry that corrects another one."""


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


UsageBy = Literal["user", "account", "gpu-type", "partition"]
"""What usage is added up by."""
USAGE_BY: tuple[UsageBy, ...] = get_args(UsageBy)


class UsageLine(Body):
    """What the jobs of one user, account, GPU type or partition used of one GPU type."""

    name: str
    """The user, account, GPU type or partition. Empty: none, or not known any more."""
    gpu_type: str
    """Empty: a charge of the cloud for a run that held no GPUs."""
    where: Literal["site", "cloud"]
    jobs: int
    gpu_hours: float
    usd: float | None
    """At the site: GPU-hours times the site's price; null: the site has no price for this GPU type. In the cloud: what the
    runs cost."""


class Usage(Body):
    """What jobs used in this time, largest first. A job without allocation spans, or in the cloud, counts at its end."""

    by: UsageBy
    from_s: float
    """The first time that counts."""
    to_s: float
    """The first time that does not count any more."""
    prices: dict[str, float]
    """GPU type -> the site's price of a GPU-hour, USD."""
    lines: list[UsageLine]


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
