"""A run of a job in the cloud: its record and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.burst.deciding.ledger import LATEST_S, Entry, by_month, month
from penstock_scheduler.burst.deciding.states import State
from penstock_scheduler.model import CloudRun, Offer
from penstock_scheduler.people.units import dollars

HOUR_S = 3600

LEAST_S = 60.0
"""Clouds bill an instance by the second, but at least a minute."""


class Slot(BaseModel):
    """One node of a run and its instance. Times are in s since 1970, by the provider's clock where it reports them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str
    instance: str | None = None
    launched_s: float | None = None
    ended_s: float | None = None
    missed: int = 0
    """Listings in a row without this instance: a new instance may take a while to appear."""
    zone: str = ""
    taken: bool = False
    """Whether the provider has taken it back from the spot market."""
    usd_per_h: float | None = None
    """The price on the spot market at which it is billed, with all that it needs, US dollars an hour; not set: the offered
    one."""

    @property
    def seconds(self) -> float:
        """Paid time of an instance that has ended, seconds."""
        if self.launched_s is None or self.ended_s is None:
            return 0.0
        return max(self.ended_s - self.launched_s, 0.0)

    def by_month(self, amount: float, now_s: float) -> dict[float, float]:
        """Begin of a month -> its part of an amount that arises while the instance exists; now, if that is not known."""
        begin_s = now_s if self.launched_s is None else self.launched_s
        return by_month(begin_s, begin_s + self.seconds, amount)

    def usd_by_month(self, usd_per_h: float, now_s: float) -> dict[float, float]:
        """Begin of a month -> the cost of the instance in it, US dollars.

        Args:
            usd_per_h: the offered price, US dollars an hour.
            now_s: now, s since 1970.
        """
        price = usd_per_h if self.usd_per_h is None else self.usd_per_h
        return self.by_month(cost_usd(self.seconds, price), now_s)

    def billed(self, prices: Sequence[tuple[float, float]], extras_usd_per_h: float) -> Slot:
        """The instance, which has ended, at these prices of the spot market.

        EC2 bills each hour of an instance at the price at the hour's begin, to the second, and no instance that it takes back
        within its first hour ("Billing for interrupted Spot Instances").
        """
        if self.launched_s is None or self.ended_s is None or not prices:
            return self
        seconds, usd = max(self.seconds, LEAST_S), 0.0
        if not (self.taken and seconds < HOUR_S):
            for begin_s in range(0, math.ceil(seconds), HOUR_S):
                held = [usd_per_h for since_s, usd_per_h in prices if since_s <= self.launched_s + begin_s]
                usd += (held[-1] if held else prices[0][1]) * min(HOUR_S, seconds - begin_s) / HOUR_S
        return self.model_copy(update={"usd_per_h": usd / seconds * HOUR_S + extras_usd_per_h})


class BurstRun(BaseModel):
    """A run. The fields of its order never change, so exactly the same order can be placed again after a crash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Job, number, and a random UUID, so nothing that an earlier run or another site has left is taken for this run's."""
    job: str
    region: str
    """The place of its instances, such as a region of EC2; also after the settings have changed."""
    user: str
    account: str
    offer: Offer
    instance_type: str
    market: Literal["on-demand", "spot"]
    usd_per_h: float
    """US dollars per hour of one instance, with all that it needs."""
    extras_usd_per_h: float = 0.0
    """The part of `usd_per_h` that is not the instance's own price: its volume and its public IPv4 address."""
    usd: float
    """US dollars committed to the run. It is ended before it costs more."""
    round: int
    ordered_s: float
    partition: str
    state: State
    slots: tuple[Slot, ...]
    there_s: float | None = None
    """When the provider first said that all its instances exist, s since 1970 by this machine's clock. Records of an older
    Penstock do not have it."""
    asked: bool = False
    """Whether the cluster has requested or used its nodes, which means that it has started the job there."""
    ran: bool = False
    """Whether the job has run there."""
    why: str = ""
    """Why the run ended or will end."""
    stopped: bool = False
    """Whether its job ran, and was stopped or is being stopped for that reason."""
    data_gb: float = 0.0
    """Data to transfer, as the user declared it, GB."""
    data_usd: float = 0.0
    """Price of the transfer, within `usd`."""
    data_s: float = 0.0
    """Duration of the transfer, while the instances are paid for."""

    @property
    def lifetime_s(self) -> float:
        """Longest life of its instances, after which the committed dollars are spent."""
        return max(self.usd - self.data_usd, 0.0) / (self.usd_per_h * len(self.slots)) * 3600

    @property
    def nodes(self) -> tuple[str, ...]:
        """The run's nodes in the cluster."""
        return tuple(slot.node for slot in self.slots)

    def began_s(self, launched_s: float) -> float:
        """When an instance was launched, by this machine's clock. The provider's may differ from it by any amount, but the
        instance was launched after its order, and before the provider said that it exists.

        Args:
            launched_s: the same by the provider's clock.
        """
        after_s = max(launched_s, self.ordered_s)
        return after_s if self.there_s is None else min(after_s, self.there_s)

    @property
    def expires_s(self) -> float | None:
        """When the committed dollars are spent, by this machine's clock; None: nothing is launched yet."""
        launched = [slot.launched_s for slot in self.slots if slot.launched_s is not None]
        return self.began_s(min(launched)) + self.lifetime_s if launched else None

    def tags(self) -> dict[str, str]:
        """Tags of all its instances, set at their launch."""
        return {
            "run": self.id,
            "job": self.job,
            "user": self.user,
            "account": self.account,
            "usd_per_h": repr(self.usd_per_h),
            "extras_usd_per_h": repr(self.extras_usd_per_h),
            "lifetime_s": f"{self.lifetime_s:.0f}",
        }

    def as_seen(self, back_s: float = 0.0) -> CloudRun:
        """The run as a round sees it. `back_s`: by when its job is back in the queue, if it is on its way, s since 1970."""
        ending = self.state in ("leaving", "ending")
        return CloudRun(
            job=self.job,
            offer=self.offer,
            since_s=self.ordered_s,
            usd=self.usd,
            account=self.account,
            ending=ending,
            state=self.state,
            stopped=self.why if self.stopped else "",
            user=self.user,
            kept_until_s=back_s if ending else 0.0,
        )

    def committed(self) -> LedgerLine:
        """The ledger line to write before anything is ordered."""
        return self._line("committed", self.usd, self.ordered_s, f"for {self.offer}")

    def by_month_usd(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """US dollars that the run may cost between two times, at most, and after the second: the rest of its commitment.

        Args:
            begin_s: begin of a month or year, s since 1970.
            end_s: its end.
        """
        began = [slot.launched_s for slot in self.slots if slot.launched_s is not None]
        early = began or [self.ordered_s] * len(self.slots)
        late = began or [self.ordered_s + LATEST_S] * len(self.slots)
        within_usd = sum(max(end_s - max(each_s, begin_s), 0.0) for each_s in early) / 3600 * self.usd_per_h
        left_usd = self._left_usd(began, begin_s)
        return min(within_usd + self.data_usd, left_usd), self._left_usd(late, end_s)

    def _left_usd(self, began: Iterable[float], since_s: float) -> float:
        """US dollars that the run may cost from a time on, at most, if its instances began at these times."""
        hours = sum(max(since_s - began_s, 0.0) for began_s in began) / 3600
        return max(self.usd - hours * self.usd_per_h, self.data_usd)

    def spent(self, now_s: float) -> list[LedgerLine]:
        """The ledger lines to write when all instances are gone: one for each month in which they ran, the newest first.

        Data is charged as declared, in the last month, since no provider bills it by job.
        """
        launched = [slot for slot in self.slots if slot.instance is not None]
        if not launched:
            return [self._line("usd", 0.0, now_s, "no charge: no instance was launched")]
        usd = added(slot.usd_by_month(self.usd_per_h, now_s) for slot in launched)
        usd[max(usd)] += self.data_usd
        times = ", ".join(f"{slot.instance} {slot.seconds:.0f} s{self._price(slot)}" for slot in launched)
        data = f", and {self.data_gb:g} GB of data for {dollars(self.data_usd)}" if self.data_usd else ""
        return split(self._line("usd", 0.0, now_s, f"for {times} of {self.instance_type}, {self.market}{data}"), usd)

    def _price(self, slot: Slot) -> str:
        """Words for the price of an instance on the spot market."""
        if self.market != "spot":
            return ""
        if slot.usd_per_h is None:
            return f" at the offered {dollars(self.usd_per_h)} an hour, as the price of that time is not known"
        return f" at {dollars(slot.usd_per_h)} an hour"

    def used(self, now_s: float) -> list[LedgerLine]:
        """The ledger lines for the GPUs of the run, for the time of their instances, by month as well."""
        gpus = self.offer.gpus / self.offer.nodes
        seconds = added(slot.by_month(slot.seconds * gpus, now_s) for slot in self.slots)
        return split(self._line("cloud-gpu-seconds", 0.0, now_s, self.offer.gpu_type), seconds)

    def _line(
        self, kind: Literal["committed", "usd", "cloud-gpu-seconds"], amount: float, time_s: float, text: str
    ) -> LedgerLine:
        return LedgerLine(
            id=0,
            key=f"cloud:{self.id}:{kind}",
            time_s=time_s,
            account=self.account,
            user=self.user,
            job=self.job,
            kind=kind,
            amount=amount,
            text=text,
        )


def cost_usd(seconds: float, usd_per_h: float) -> float:
    """Cost of an instance with this lifetime, US dollars."""
    return max(seconds, LEAST_S) / 3600 * usd_per_h


def added(each: Iterable[Mapping[float, float]]) -> dict[float, float]:
    """Begin of a month -> sum of its parts."""
    sums: dict[float, float] = {}
    for parts in each:
        for month_s, part in parts.items():
            sums[month_s] = sums.get(month_s, 0.0) + part
    return sums


def split(line: LedgerLine, parts: Mapping[float, float]) -> list[LedgerLine]:
    """A ledger line as one for each month, the newest first. Those of earlier months have the month in their keys.

    Args:
        line: with the time at which it is written, and any amount.
        parts: begin of a month, s since 1970 -> amount.
    """
    found: list[LedgerLine] = []
    for begin_s in sorted(parts, reverse=True):
        key = f"{line.key}:{datetime.fromtimestamp(begin_s, UTC):%Y-%m}" if found else line.key
        time_s = min(line.time_s, month(begin_s)[1] - 1)
        found.append(line.model_copy(update={"key": key, "time_s": time_s, "amount": parts[begin_s]}))
    return found


def entries(lines: Iterable[LedgerLine]) -> list[Entry]:
    """The ledger lines of the cloud in dollars, for the budgets."""
    return [
        Entry(
            line.key.split(":")[1],
            "committed" if line.kind == "committed" else "spent",
            line.amount,
            line.account,
            line.time_s,
        )
        for line in lines
        if line.key.startswith("cloud:") and line.kind in ("committed", "usd")
    ]
