"""A cloud in memory whose calls take their time or hang, and a site whose cloud has threads of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock_loopback import wait_for
from penstock_scheduler.burst.manager.manager import BurstManager
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.share import NOTICES
from penstock_scheduler.burst.manager.worker import Yielding
from tests.cloud.faulty import Faulty
from tests.cloud.other_cloud import OtherSite
from tests.cloud.test_storm import Killed


class Slow(Faulty):
    """See the module.

    Attributes:
        call_s: duration of each call, seconds.
        gates: method -> its calls are carried out and then hang until this is set.
        under_way: method -> its calls that have begun and have not returned.
    """

    call_s = 0.0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.gates: dict[str, threading.Event] = {}
        self.under_way = Counter[str]()
        self.killed = False
        self._own = threading.RLock()

    def kill(self) -> None:
        """Let the threads that are in a call go no further, as when their daemon is killed."""
        self.killed = True
        for gate in self.gates.values():
            gate.set()
        wait_for(lambda: not self.under_way.total(), 60, "nobody asks any more")
        self.gates.clear()
        self.killed = False

    def running(self) -> list[Any]:
        with self._own:
            return super().running()

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        self.under_way[method] += 1
        try:
            time.sleep(self.call_s)
            with self._own:
                answer = super()._call(method, call)
            if (gate := self.gates.get(method)) is not None:
                gate.wait(60)
                if self.killed:
                    raise Killed
            return answer
        finally:
            self.under_way[method] -= 1


class SlowSite(OtherSite):
    """See the module. Its jobs are numbered from 0."""

    @property
    def cloud_of(self) -> Slow:
        (only,) = self.providers
        assert isinstance(only, Slow)
        return only

    def open(self) -> BurstManager:
        lock = threading.Lock()
        places: list[Any] = [Yielding(each, lock) for each in self.providers]
        return BurstManager(Places(places), self.settings, self.store, self, self, random.Random(1), None, lock)

    def _alive(self) -> set[str]:
        return {each.tags["node"] for each in self.cloud_of.running()}

    def order_jobs(self, count: int, usd: float = 5.0) -> None:
        """Submit this many jobs, and send them to the cloud in one round."""
        self.names = {f"a10g-{number}": "a10g" for number in range(count)}
        self.really_until(lambda: self.state.offers, "there are offers")
        self.really_until(lambda: sum(offer.count for offer in self.state.offers) >= count, "there is room")
        for number in range(count):
            self.submit(str(number))
        self.round += 1
        self.tick(*(self.order(str(number), "g5.xlarge", usd) for number in range(count)))

    def soon(self, condition: Callable[[], object], what: str) -> None:
        """Tick until this holds, for half a minute at most."""
        wait_for(
            lambda: (self.tick(), condition())[1], 30, what, details=lambda: f"{self.state.runs} {self.state.words}"
        )

    def take_back(self, job: str) -> None:
        """The provider tells the job's node that it takes the instance back."""
        folder = self.settings.share / NOTICES
        folder.mkdir(parents=True, exist_ok=True)
        (node,) = (name for name, its in self.on.items() if its == job)
        (folder / node).touch()
