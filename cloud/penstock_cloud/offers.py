"""What can be ordered now: types and markets with their prices, without what is paused or not known well enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock_cloud.catalogue import Catalogue, InstanceType
from penstock_cloud.failures import back_off_s
from penstock_cloud.settings import CloudSettings, Market
from penstock_scheduler.model import Offer
from penstock_scheduler.ports import CloudNode

SIZES = (1, 2, 4, 8)
"""Numbers of nodes that are offered."""


@dataclass(slots=True)
class Pauses:
    """What is paused until when, and why. A restarted daemon has forgotten the pauses and tries each once more."""

    until_s: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def rests(self, what: str, now_s: float) -> bool:
        """Whether this is paused."""
        return now_s < self.until_s.get(what, 0.0)

    def rest(self, what: str, now_s: float, first_s: float, words: str) -> None:
        """Pause this, for longer each time in a row."""
        self.times[what] = self.times.get(what, 0) + 1
        self.until_s[what] = now_s + back_off_s(first_s, self.times[what])
        self.words[what] = words

    def over(self, what: str) -> None:
        """End the pause: it works again."""
        for table in (self.until_s, self.words, self.times):
            table.pop(what, None)

    def told(self, now_s: float) -> list[str]:
        """Each pause as a sentence."""
        return [
            f"{what} is paused for another {self.until_s[what] - now_s:.0f} s: {words}"
            for what, words in self.words.items()
            if self.rests(what, now_s)
        ]


class Offers:
    """The offers of the newest pass, by id.

    Args:
        catalogue: returns the current catalogue of instance types; None: no catalogue describes this region.
        sizes: numbers of nodes that are offered.
    """

    def __init__(
        self, settings: CloudSettings, catalogue: Callable[[], Catalogue | None], sizes: Sequence[int] = SIZES
    ) -> None:
        self._settings, self._catalogue, self._sizes = settings, catalogue, sizes
        self.pauses = Pauses()
        self.by_id: dict[str, tuple[Offer, str, Market]] = {}
        """Id -> offer, instance type, market."""

    def none(self) -> None:
        """Offer nothing."""
        self.by_id = {}

    def make(self, room: Sequence[CloudNode], left: int, zones: Collection[str], now_s: float) -> None:
        """Offer what fits.

        Args:
            room: the nodes that no run has.
            left: how many more runs there may be.
            zones: of the site's subnets.
            now_s: now, s since 1970.
        """
        self.none()
        catalogue = self._catalogue()
        if catalogue is None or self.old_prices(now_s) is not None or left < 1:
            return
        for instance_type in self._settings.instance_types:
            kind = catalogue.types.get(instance_type)
            free = sum(suits(node, kind) for node in room)
            for market in self._settings.markets:
                rests = (line(instance_type, market), line(instance_type.split(".")[0], market))
                price = catalogue.usd_per_h(instance_type, market, zones)
                if kind is None or price is None or price <= 0 or any(self.pauses.rests(w, now_s) for w in rests):
                    continue
                for size in self._sizes:
                    if free >= size:
                        name = line(instance_type, market) if size == 1 else f"{size}x {line(instance_type, market)}"
                        count, gpus = min(free // size, left), size * kind.gpus
                        usd_per_h = size * (price + self._settings.extras_usd_per_h)
                        offer = Offer(
                            name,
                            kind.gpu_type,
                            size,
                            gpus,
                            usd_per_h,
                            count,
                            self._settings.boot_s,
                            self._settings.boot_timeout_s,
                        )
                        self.by_id[name] = offer, instance_type, market

    def kind(self, instance_type: str) -> InstanceType | None:
        """What is known of an instance type; None: nothing."""
        catalogue = self._catalogue()
        return None if catalogue is None else catalogue.types.get(instance_type)

    def old_prices(self, now_s: float) -> str | None:
        """Why the known prices may not be used any more; None: they may."""
        catalogue = self._catalogue()
        today = datetime.fromtimestamp(now_s, UTC).date()
        return None if catalogue is None else catalogue.expired(today, self._settings.price_days)


def line(what: str, market: str) -> str:
    """A type or family on a market, as messages and offers name it."""
    return what if market == "on-demand" else f"{what} spot"


def suits(node: CloudNode, kind: InstanceType | None) -> bool:
    """Whether an instance of this type may be launched for a node."""
    return (
        kind is not None
        and node.free
        and (node.gpu_type, node.gpus) == (kind.gpu_type, kind.gpus)
        and node.cpus <= kind.vcpus
        and node.memory_mb <= kind.memory_mib
    )
