"""What can be ordered now: types and markets with their prices, without what is paused or not known well enough."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.api.ports import CloudNode
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.provider import LONGEST_BACK_OFF_S, Kind, LaunchFailed, Machine, Provider, line
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import Offer
from penstock_scheduler.safety.back_off import back_off_s

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8)
"""Numbers of nodes that are offered."""


@dataclass(slots=True)
class Pauses:
    """What is paused until when, and why. A restarted daemon has forgotten the pauses and tries each once more."""

    until_s: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    since_s: dict[str, float] = field(default_factory=dict)

    def rests(self, what: str, now_s: float) -> bool:
        """Whether this is paused."""
        return now_s < self.until_s.get(what, 0.0)

    def rest(self, what: str, now_s: float, first_s: float, words: str, *, ordered_s: float) -> None:
        """Pause this, for longer each time in a row. Orders that were placed before the pause began do not extend it.

        Args:
            what: the type or family.
            now_s: now, s since 1970.
            first_s: length of the first pause, seconds.
            words: why.
            ordered_s: when the order was placed that was refused, s since 1970.
        """
        if ordered_s < self.since_s.get(what, ordered_s):
            return
        self.times[what] = self.times.get(what, 0) + 1
        self.since_s[what] = now_s
        self.until_s[what] = now_s + back_off_s(first_s, self.times[what], LONGEST_BACK_OFF_S)
        self.words[what] = words

    def over(self, what: str) -> None:
        """End the pause: it works again."""
        for table in (self.until_s, self.words, self.times, self.since_s):
            table.pop(what, None)

    def told(self, now_s: float) -> list[str]:
        """Each pause as a sentence."""
        return [
            f"{what} is paused for another {self.until_s[what] - now_s:.0f} s: {words}"
            for what, words in self.words.items()
            if self.rests(what, now_s)
        ]


@dataclass(frozen=True, slots=True)
class Offered:
    """An offer, its place, and the kind of instance that it consists of."""

    offer: Offer
    place: str
    machine: Machine


class Offers:
    """The offers of the newest pass, by id, over all places.

    Args:
        sizes: numbers of nodes that are offered.
    """

    def __init__(self, settings: BurstSettings, places: Places, sizes: Sequence[int] = SIZES) -> None:
        self._settings, self._places, self._sizes = settings, places, sizes
        self.pauses = Pauses()
        self.by_id: dict[str, Offered] = {}
        self._refused: dict[str, str] = {}
        """Place -> why it did not say what can be ordered."""

    def key(self, place: str, what: str) -> str:
        """A type or family in a place, as messages and offers name it. A site with one place does not name the place."""
        return what if len(self._places.all) == 1 else f"{what}@{place}"

    def refused(self, run: BurstRun, error: LaunchFailed, now_s: float) -> None:
        """Pause what the refusal of a run's order concerns: its type, or all types that share its quota."""
        settings = self._settings
        match error.kind:
            case Kind.CAPACITY:
                self._rest(run, run.instance_type, settings.capacity_back_off_s, str(error), now_s)
            case Kind.QUOTA:
                self._rest(run, run.instance_type.split(".")[0], settings.quota_back_off_s, str(error), now_s)
                text = "a quota is used up: ask the provider to raise it, or remove the type from [cloud]"
                log.error(text, extra={"place": run.region, "text": str(error)})
            case Kind.UNKNOWN:
                text = f"Penstock does not know this refusal: {error}"
                self._rest(run, run.instance_type, settings.quota_back_off_s, text, now_s)
                log.error("an order was refused for an unknown reason", extra={"place": run.region, "text": str(error)})
            case _:
                pass

    def boot_failed(self, run: BurstRun, why: str, now_s: float) -> None:
        """Pause the type of a run that did not boot."""
        self._rest(run, run.instance_type, self._settings.capacity_back_off_s, why, now_s)

    def launched(self, run: BurstRun) -> None:
        """End the pause of a run's type."""
        self.pauses.over(self.key(run.region, line(run.instance_type, run.market)))

    def _rest(self, run: BurstRun, what: str, first_s: float, why: str, now_s: float) -> None:
        self.pauses.rest(self.key(run.region, line(what, run.market)), now_s, first_s, why, ordered_s=run.ordered_s)

    def none(self) -> None:
        """Offer nothing."""
        self.by_id = {}

    def make(self, room: Sequence[CloudNode], usable: Iterable[Provider], now_s: float) -> None:
        """Offer what fits. What was offered before stays until all places have answered, since the loop orders meanwhile.

        Args:
            room: the nodes that no run has.
            usable: the places in which something may be launched now.
            now_s: now, s since 1970.
        """
        found: dict[str, Offered] = {}
        refused: dict[str, str] = {}
        for place in usable:
            place.refresh(now_s)
            try:
                machines = place.offers(now_s)
            except LaunchFailed as error:
                refused[place.name] = f"{place.name} does not say what can be ordered: {error}"
                continue
            for machine in machines:
                found |= {each.offer.id: each for each in self._sizes_of(place.name, machine, room, now_s)}
        self.by_id, self._refused = found, refused

    def _sizes_of(self, place: str, machine: Machine, room: Sequence[CloudNode], now_s: float) -> Iterator[Offered]:
        if any(self.pauses.rests(self.key(place, what), now_s) for what in (machine.line, machine.family)):
            return
        free = sum(machine.suits(node) for node in room)
        settings = self._settings
        for size in self._sizes:
            if free >= size:
                name = self.key(place, machine.line if size == 1 else f"{size}x {machine.line}")
                count, gpus = free // size, size * machine.gpus
                usd_per_h = size * machine.usd_per_h
                offer = Offer(
                    name, machine.gpu_type, size, gpus, usd_per_h, count, settings.boot_s, settings.boot_timeout_s
                )
                yield Offered(offer, place, machine)

    def stale(self, now_s: float) -> str:
        """Which prices are too old to be used; empty: none."""
        return "; ".join(why for place in self._places.all if (why := place.prices(now_s)))

    def troubles(self) -> list[str]:
        """Why places do not say what can be ordered, as sentences."""
        return list(self._refused.values())
