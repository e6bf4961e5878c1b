"""A simulated provider with limits of capacity, faults and a bill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed, Listed, Machine, Order
from penstock_scheduler.burst.manager.runs import cost_usd
from penstock_scheduler.simulator.cloud_place import Simulated


@dataclasses.dataclass(slots=True)
class SimulatedFault:
    """A fault in the next `times` calls of a method.

    Attributes:
        method: name of the provider's method.
        kind: the refusal.
        done: whether the call is carried out before its answer is lost.
    """

    method: str
    kind: Kind
    done: bool = False
    times: int = 1
    words: str = "a simulated fault"


class Faulty(Simulated):
    """See the module.

    Args:
        capacity: instance type -> instances that can run at once; types that are left out are never short.
    """

    def __init__(
        self,
        site: str,
        machines: Iterable[Machine],
        now_s: Callable[[], float],
        *,
        capacity: Mapping[str, int] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(site, machines, now_s, **named)
        self.faults: list[SimulatedFault] = []
        self.calls: list[str] = []
        self._capacity = dict(capacity or {})
        self._billed: dict[str, float] = {}
        """Instance -> its price, US dollars an hour."""
        self._ended: dict[str, tuple[float, float]] = {}
        """Instance -> when it was launched, and ended."""

    def offers(self, now_s: float) -> Sequence[Machine]:
        return self._call("offers", lambda: super(Faulty, self).offers(now_s))

    def launch_gang(self, order: Order) -> Mapping[str, str]:
        return self._call("launch_gang", lambda: self._launch(order))

    def _launch(self, order: Order) -> Mapping[str, str]:
        if order.token not in self._served:
            running = sum(each.instance_type == order.instance_type and not each.gone for each in self.world.values())
            if running + len(order.nodes) > self._capacity.get(order.instance_type, 1 << 30):
                raise LaunchFailed(Kind.CAPACITY, "NoCapacity", f"no {order.instance_type} is left in {self.name}")
        launched = super().launch_gang(order)
        self._billed |= {id_: self._usd_per_h[id_] for id_ in launched.values() if id_ in self._usd_per_h}
        return launched

    def list(self, run: str | None = None) -> Listed:
        return self._call("list", lambda: super(Faulty, self).list(run))

    def known(self, ids: Collection[str]) -> Listed:
        return self._call("known", lambda: super(Faulty, self).known(ids))

    def forgotten(self, id_: str) -> bool:
        return self._call("forgotten", lambda: super(Faulty, self).forgotten(id_))

    def terminate(self, ids: Sequence[str]) -> None:
        self._call("terminate", lambda: super(Faulty, self).terminate(ids))

    def tidy(self, run: str) -> None:
        self._call("tidy", lambda: super(Faulty, self).tidy(run))

    def _forget(self) -> None:
        self._note_ended()
        super()._forget()

    def _note_ended(self) -> None:
        found = {id_: seen for id_ in self._billed if (seen := self.world.get(id_)) is not None}
        self._ended |= {id_: (seen.launched_s, seen.ended_s) for id_, seen in found.items() if seen.ended_s is not None}

    def running(self) -> Listed:
        """Instances that are paid for now, of all sites."""
        return [each for each in self._here() if not each.gone]

    def bill_usd(self) -> float:
        """What the instances that this site has launched here and that have ended come to, US dollars."""
        self._note_ended()
        return sum(cost_usd(end_s - begin_s, self._billed[id_]) for id_, (begin_s, end_s) in self._ended.items())

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        """Note a call, and carry it out as its fault lets it. Raises LaunchFailed."""
        self.calls.append(method)
        fault = next((each for each in self.faults if each.method == method), None)
        if fault is None:
            return call()
        fault.times -= 1
        if fault.times <= 0:
            self.faults.remove(fault)
        if fault.done:
            call()
        raise LaunchFailed(fault.kind, "", fault.words)
