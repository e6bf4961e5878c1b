"""The cloud as a round sees it: offers and prices, the runs there, and the budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock_scheduler.model.job import JobId
from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from penstock_scheduler.people.units import dollars


@dataclass(frozen=True, slots=True)
class Offer:
    """Instances that can be ordered now: `nodes` instances with `gpus` GPUs in total."""

    id: str
    """The provider's name for it, such as `g5.12xlarge@us-east-1b`."""
    gpu_type: str
    nodes: int
    gpus: int
    usd_per_h: float
    """Price of all its nodes together, $/h, > 0."""
    count: int = 1
    """How many of these can run at the same time."""
    boot_s: float = 180.0
    """Time from the order to the first training step, s. This time is paid for."""
    latest_boot_s: float | None = None
    """Longest time from the order to the first training step, s, after which the boot has failed; None: `boot_s`."""

    def __str__(self) -> str:
        return f"{self.gpus} {self.gpu_type} ({self.id}, {dollars(self.usd_per_h)}/h)"


@dataclass(frozen=True, slots=True)
class CloudRun:
    """A job that runs in the cloud, or is on its way there or back."""

    job: JobId
    offer: Offer
    since_s: float
    """When it was ordered."""
    usd: float
    """Most dollars that it may cost. The run is ended before it costs more."""
    account: str = ""
    ending: bool = False
    """Whether it has been recalled and still holds its instance."""
    state: str = "running"
    """Its state by the burst manager: ordered, booting, running, leaving, ending; or unreadable."""
    stopped: str = ""
    """Why the running job was stopped there, or is being stopped; empty: it is not."""
    user: str = ""
    trouble: str = ""
    """Why nothing can be done with the run, with the remedy; empty: all is well."""
    kept_until_s: float = 0.0
    """Until when idle GPUs on site are kept for a job on its way back, s since 1970."""


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A budget of dollars, and how much of it is used: spent, or committed to jobs in the cloud."""

    account: str
    """The account; empty: the whole site."""
    period: Period
    limit_usd: float
    used_usd: float
    from_h: float = 0.0
    """Hours until the period begins, at least. Above 0, it is the next one."""
    until_h: float | None = None
    """Hours until it ends; not set: the rest of a run counts in it, however long it lasts."""

    @property
    def left_usd(self) -> float:
        """Dollars that may still be committed, >= 0."""
        return max(self.limit_usd - self.used_usd, 0.0)

    def covers(self, account: str) -> bool:
        """Whether a job of this account counts against the budget."""
        return self.account in ("", account)

    def needs_usd(self, usd: float, usd_per_h: float, data_usd: float = 0.0) -> float:
        """The most that a run ordered now may cost in the period, US dollars.

        Args:
            usd: the most that it may cost in all.
            usd_per_h: the price of its instances.
            data_usd: the part of `usd` for data, which is charged in the month in which the run ends.
        """
        until_usd = usd if self.until_h is None else usd_per_h * self.until_h + data_usd
        return max(min(usd, until_usd) - usd_per_h * self.from_h, 0.0)

    def __str__(self) -> str:
        owner = f"account {self.account}" if self.account else "the site"
        when = "in total" if self.period == "total" else "today" if self.period == "day" else f"this {self.period}"
        when = f"next {self.period}" if self.from_h > 0 else when
        return f"the cloud budget of {owner}, {dollars(self.limit_usd)} {when} ({dollars(self.used_usd)} of it used or committed)"


@dataclass(frozen=True, slots=True)
class CloudState:
    """All that a round may know about the cloud."""

    offers: tuple[Offer, ...] = ()
    runs: tuple[CloudRun, ...] = ()
    budgets: tuple[BudgetLine, ...] = ()
    waiting: WaitingPolicy = field(default_factory=lambda: WaitingPolicy(Wait.NONE))
    max_queue: int | None = None
    """Most jobs that may wait for GPUs on site and may leave. Beyond it, the newest ones leave before their waiting budget
    is over. None: any number."""
    by_default: bool = False
    """Whether a job may leave for the cloud if its job spec does not say."""
    at_cap: Literal["finish", "recall"] = "finish"
    """Effect on running jobs when a budget is used up."""
    margin: float = 0.25
    """Share by which a commitment exceeds the expected cost, since an estimate may be too low."""
    leave_s: float = 0.0
    """How long before its committed dollars are spent a job is asked to save and leave. Commitments pay for this time."""
    unknown_h: float = 24.0
    """Hours that are committed to a job of unknown running time."""
    longest_s: float | None = None
    """Longest time that a commitment may pay for; None: no limit."""
    cost_per_usd: float = 0.1
    """Weight of a dollar in a policy's program, in which leaving a job out for a round costs about 1."""
    bytes_per_s: float = 125e6
    """Bandwidth of the line to the cloud."""
    usd_per_gb: float = 0.09
    """Price of data transfer."""
    returned: dict[JobId, float] = field(default_factory=dict)
    """Jobs that have come back -> time of their return, s since 1970."""
    waits_since_s: dict[JobId, float] = field(default_factory=dict)
    """Job -> the time since which its waiting budget runs, s since 1970, as if it had waited without a break. It moves on
    only while the job is outside the queue. Jobs that are left out count from their submission or their last requeue."""
    history_s: dict[JobId, tuple[float, ...]] = field(default_factory=dict)
    """Running times of earlier jobs of the same user and script."""
    words: dict[JobId, str] = field(default_factory=dict)
    """Jobs that were sent to the cloud and do not run there -> the provider's reason."""
    protected: str = ""
    """Why nothing more is launched until an admin says so; empty: there is no such reason."""
    closed: tuple[str, ...] = ()
    """What cannot be ordered now and why. It concerns all jobs that would leave."""
    troubles: tuple[str, ...] = ()
    """What an admin must put right, with the remedy; for `penstock doctor`."""


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
