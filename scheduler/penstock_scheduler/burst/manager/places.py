"""All places that matter: those of the settings, and those in which runs still are after the settings have changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.burst.manager.provider import DescribedInstance, Kind, LaunchFailed, Provider
from penstock_scheduler.burst.manager.runs import BurstRun, Slot

log = logging.getLogger(__name__)

MISSED = 3
"""Listings in a row without an instance before its place is asked for it by its id: listings may be late."""

APPEARS_S = 60.0
"""How long after its launch an instance may be missing from listings and still appear."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What the places list of the site.

    Attributes:
        found: id -> instance. Also instances of open runs that have lost their tags.
        heard: places that have answered. Of the others, nothing is known.
        stripped: ids of instances of open runs that do not have the site's tag any more.
        trouble: why places have not answered; empty: all have.
        lost: places that did not answer at all.
    """

    found: Mapping[str, DescribedInstance] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()
    stripped: frozenset[str] = frozenset()
    trouble: str = ""
    lost: frozenset[str] = frozenset()


def no_longer_set_up(name: str) -> Provider:
    """The provider of a place that the settings do not have any more, where it cannot be opened. Raises LaunchFailed."""
    words = f"[cloud] does not have {name} any more, and jobs still run there; put it back until they have ended"
    raise LaunchFailed(Kind.CONFIG, "", words)


class Places:
    """Providers by the names of their places.

    Args:
        providers: those of the settings, in which instances are launched.
        opened: makes the provider of another place, in which runs of earlier settings are. Raises LaunchFailed.
    """

    def __init__(self, providers: Sequence[Provider], opened: Callable[[str], Provider] = no_longer_set_up) -> None:
        self.all = tuple(providers)
        self._opened = opened
        self._known = {provider.name: provider for provider in providers}

    def of(self, name: str) -> Provider:
        """The provider of a place. Raises LaunchFailed."""
        if name not in self._known:
            self._known[name] = self._opened(name)
        return self._known[name]

    def listing(self, runs: Iterable[BurstRun], skip: Collection[str] = ()) -> Listing:
        """All instances with the site's tag, and the instances of these open runs whatever tags they have.

        Args:
            runs: the open runs.
            skip: places that are not asked now.
        """
        mine: dict[str, set[str]] = {place.name: set() for place in self.all}
        for run in runs:
            open_ids = {slot.instance for slot in run.slots if slot.instance is not None and slot.ended_s is None}
            mine.setdefault(run.region, set()).update(open_ids)
        found: dict[str, DescribedInstance] = {}
        heard, stripped, trouble, lost = set(), set(), [], set()
        for name, ids in mine.items():
            if name in skip:
                trouble.append(f"{name} does not answer")
                continue
            try:
                place = self.of(name)
                listed = {seen.id: seen for seen in place.list()}
                by_id = {seen.id: seen for seen in place.known(ids - set(listed))}
            except LaunchFailed as error:
                trouble.append(f"the cloud does not list the instances in {name}: {error}")
                if error.kind is Kind.LOST:
                    lost.add(name)
                log.warning("the cloud does not answer", extra={"place": name, "text": str(error)})
                continue
            heard.add(name)
            stripped |= {seen.id for seen in by_id.values() if "site" not in seen.tags and not seen.gone}
            found |= listed | by_id
        return Listing(found, frozenset(heard), frozenset(stripped), "; ".join(trouble), frozenset(lost))

    def with_times(self, run: BurstRun, found: Mapping[str, DescribedInstance], now_s: float) -> BurstRun:
        """The run with the provider's own times, and with an end for instances that it says are gone. Raises LaunchFailed."""
        return run.model_copy(update={"slots": tuple(self._with_time(run, slot, found, now_s) for slot in run.slots)})

    def _with_time(self, run: BurstRun, slot: Slot, found: Mapping[str, DescribedInstance], now_s: float) -> Slot:
        if slot.instance is None or slot.ended_s is not None:
            return slot
        seen = found.get(slot.instance)
        launched_s = seen.launched_s if seen is not None else slot.launched_s or now_s
        lived_s = max(now_s - run.began_s(launched_s), 0.0)
        if seen is not None:
            # Where the provider gives no time of the end, the instance has lived until now at most.
            ended_s = launched_s + lived_s if seen.ended_s is None else seen.ended_s
            gone = {"ended_s": ended_s, "taken": seen.taken} if seen.gone else {}
            now = {"launched_s": launched_s, "zone": seen.zone, "missed": 0, **gone}
            return slot.model_copy(update=now)
        missed = slot.missed + 1
        if (
            missed < MISSED
            or lived_s < APPEARS_S
            or (missed - MISSED) % MISSED
            or not self.of(run.region).forgotten(slot.instance)
        ):
            return slot.model_copy(update={"missed": missed})
        # A provider forgets an instance some time after its end. It ends itself when the committed dollars are spent.
        return slot.model_copy(update={"missed": missed, "ended_s": launched_s + min(lived_s, run.lifetime_s)})
