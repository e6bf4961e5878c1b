"""A place of a simulated cloud: a `Provider` with any number of instances, kept in memory.

It keeps what a real one promises and no more: the same order is served once, and an instance is billed from its launch to its
end. Tests add limits of capacity, faults and a bill.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from penstock_scheduler.burst.manager.provider import DescribedInstance, Kind, LaunchFailed, Listed, Machine, Order

LISTED_S = 3600.0
"""How long an instance is listed after its end, as on EC2."""


class Simulated:
    """One place of a simulated cloud. See `Provider` for the methods.

    Args:
        site: the site's identity; others' instances in the same `world` are never listed.
        machines: what can be ordered.
        now_s: the clock.
        world: id -> instance, of all sites of the account. Several sites may share it.
        ends_s: how long an instance that has ended is listed as one that still ends.
    """

    def __init__(
        self,
        site: str,
        machines: Iterable[Machine],
        now_s: Callable[[], float],
        *,
        name: str = "simulated",
        world: dict[str, DescribedInstance] | None = None,
        ends_s: float = 0.0,
    ) -> None:
        self.name = name
        self.machines = list(machines)
        self.world: dict[str, DescribedInstance] = {} if world is None else world
        self._site, self._now_s, self._ends_s = site, now_s, ends_s
        self._usd_per_h: dict[str, float] = {}
        self._numbers = itertools.count()
        self._served: dict[str, tuple[Order, dict[str, str]]] = {}

    def offers(self, now_s: float) -> Sequence[Machine]:
        """See `Provider`."""
        return tuple(self.machines)

    def prices(self, now_s: float) -> str:
        """See `Provider`: simulated prices are always true."""
        return ""

    def refresh(self, now_s: float) -> None:
        """See `Provider`."""

    def news(self) -> str:
        """See `Provider`."""
        return ""

    def accept(self) -> str:
        """See `Provider`."""
        return ""

    def check(self) -> str:
        """See `Provider`."""
        return ""

    def spot_prices(self, instance_type: str, zone: str, begin_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """See `Provider`."""
        return ()

    def launch_gang(self, order: Order) -> Mapping[str, str]:
        """See `Provider`."""
        if order.token in self._served:
            before, launched = self._served[order.token]
            if before != order:
                raise LaunchFailed(Kind.CONFIG, "TokenMismatch", "the same token with another order")
            return launched
        asked = order.instance_type, order.market
        if (machine := next((m for m in self.machines if (m.instance_type, m.market) == asked), None)) is None:
            raise LaunchFailed(Kind.CONFIG, "NoSuchType", f"{order.instance_type} is not sold in {self.name}")
        self._forget()
        launched = {}
        for node in order.nodes:
            id_ = f"{self.name}-{self._site}-{next(self._numbers)}"
            tags = {"site": self._site, "node": node, **order.tags}
            self.world[id_] = DescribedInstance(
                id_, "running", order.instance_type, self.name, self._now_s(), None, tags, self.name
            )
            launched[node] = id_
            self._usd_per_h[id_] = machine.usd_per_h
        self._served[order.token] = order, launched
        return launched

    def list(self, run: str | None = None) -> Listed:
        """See `Provider`."""
        return [
            each
            for each in self._here()
            if each.tags.get("site") == self._site and (run is None or each.tags.get("run") == run)
        ]

    def known(self, ids: Collection[str]) -> Listed:
        """See `Provider`."""
        return [each for each in self._here() if each.id in ids]

    def forgotten(self, id_: str) -> bool:
        """See `Provider`."""
        return id_ not in self.world

    def terminate(self, ids: Sequence[str]) -> None:
        """See `Provider`."""
        for id_ in ids:
            if id_ in self.world and not self.world[id_].gone:
                self.end(id_)

    def tidy(self, run: str) -> None:
        """See `Provider`: an order makes nothing but instances."""

    def end(self, id_: str) -> None:
        """The instance ends, as when the provider takes it back."""
        seen = self.world[id_]
        self.world[id_] = dataclasses.replace(seen, state="terminated", gone=True, ended_s=self._now_s())

    def _forget(self) -> None:
        """Forget this site's instances that have ended some time ago, and what they were ordered by."""
        before_s = self._now_s() - LISTED_S
        old = [id_ for id_ in self._usd_per_h if (end_s := self.world[id_].ended_s) is not None and end_s < before_s]
        for id_ in old:
            del self.world[id_], self._usd_per_h[id_]
        if old:
            self._served = {
                token: served
                for token, served in self._served.items()
                if any(id_ in self.world for id_ in served[1].values())
            }

    def _here(self) -> Listed:
        here = (self._as_listed(each) for each in self.world.values() if each.region == self.name)
        return sorted(here, key=lambda each: each.launched_s)

    def _as_listed(self, seen: DescribedInstance) -> DescribedInstance:
        if seen.ended_s is None or self._now_s() >= seen.ended_s + self._ends_s:
            return seen
        return dataclasses.replace(seen, state="ending", gone=False, ended_s=None)
