"""The cloud as a round sees it: what can be had at what price, what runs there, and what may still be spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock_scheduler.model.budget import Period
from penstock_scheduler.model.job import JobId
from penstock_scheduler.model.waiting import Wait, WaitingPolicy


@dataclass(frozen=True, slots=True)
class Offer:
    """Instances that can be had now: `nodes` of them, with `gpus` GPUs together."""

    id: str
    """What the provider calls it, such as `g5.12xlarge@us-east-1b`."""
    gpu_type: str
    nodes: int
    gpus: int
    usd_per_h: float
    """Of all its nodes together, > 0."""
    count: int = 1
    """How many of these can be had at once."""
    boot_s: float = 180.0
    """From the order to the first step; it is paid for."""

    def __str__(self) -> str:
        return f"{self.gpus} {self.gpu_type} ({self.id}, ${self.usd_per_h:.2f}/h)"


@dataclass(frozen=True, slots=True)
class CloudRun:
    """A job that runs in the cloud, or is on its way there or back."""

    job: JobId
    offer: Offer
    since_s: float
    """When it was ordered."""
    usd: float
    """What it may cost at most: it is ended there before it costs more."""
    account: str = ""
    ending: bool = False
    """Whether it has been recalled and still holds its instance."""


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A hard cap, and how much of it is used: spent, and committed to what runs."""

    account: str
    """Whose; empty: the whole site's."""
    period: Period
    limit_usd: float
    used_usd: float

    @property
    def left_usd(self) -> float:
        """What may still be committed, >= 0."""
        return max(self.limit_usd - self.used_usd, 0.0)

    def covers(self, account: str) -> bool:
        """Whether a job of this account counts against it."""
        return self.account in ("", account)

    def __str__(self) -> str:
        whose = f"account {self.account}" if self.account else "the site"
        when = "in total" if self.period == "total" else "today" if self.period == "day" else f"this {self.period}"
        return (
            f"the cloud budget of {whose}, ${self.limit_usd:.2f} {when} (${self.used_usd:.2f} of it used or committed)"
        )


@dataclass(frozen=True, slots=True)
class CloudState:
    """All that a round may know of the cloud."""

    offers: tuple[Offer, ...] = ()
    runs: tuple[CloudRun, ...] = ()
    budgets: tuple[BudgetLine, ...] = ()
    waiting: WaitingPolicy = field(default_factory=lambda: WaitingPolicy(Wait.NONE))
    by_default: bool = False
    """Whether jobs whose job spec does not say may leave."""
    at_cap: Literal["finish", "recall"] = "finish"
    """What becomes of what runs when a budget is used up."""
    margin: float = 0.25
    """Share by which a commitment exceeds the expected cost: an estimate may be too low."""
    unknown_h: float = 24.0
    """Hours that are committed to a job of which nobody knows how long it runs."""
    longest_s: float | None = None
    """Longest that what is committed to a job may last; None: any time."""
    cost_per_usd: float = 0.1
    """What a dollar weighs beside the cost of leaving a job out for a round, about 1 (policies that solve a program)."""
    bytes_per_s: float = 125e6
    """Of the line to the cloud."""
    usd_per_gb: float = 0.0
    """Of data transfer."""
    returned: dict[JobId, float] = field(default_factory=dict)
    """Jobs that have come back -> when, s since 1970."""
    history_s: dict[JobId, tuple[float, ...]] = field(default_factory=dict)
    """Running times of earlier jobs of the same user and script."""
    words: dict[JobId, str] = field(default_factory=dict)
    """Why these jobs are not there although they were sent, in the cloud's own words."""
    closed: tuple[str, ...] = ()
    """What cannot be had now, and why: for all jobs that would leave."""
