"""The site's instances in all regions that matter: that of the settings, and those in which runs still are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock_cloud.failures import Kind, LaunchFailed
from penstock_cloud.fleet import GONE, DescribedInstance, Fleet
from penstock_cloud.runs import BurstRun, Slot

log = logging.getLogger(__name__)

MISSED = 3
"""Listings in a row without an instance before EC2 is asked for it by its id, since EC2 is only eventually consistent."""

APPEARS_S = 60.0
"""How long after its launch an instance may be missing from EC2's listings and still appear."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What EC2 lists of the site.

    Attributes:
        found: id -> instance. Also instances of open runs that have lost their tags.
        heard: regions that have answered. Of the others, nothing is known.
        stripped: ids of instances of open runs that do not have the site's tag any more.
        trouble: why regions have not answered; empty: all have.
        lost: whether a region did not answer at all.
    """

    found: Mapping[str, DescribedInstance] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()
    stripped: frozenset[str] = frozenset()
    trouble: str = ""
    lost: bool = False


class Regions:
    """Fleets by region, each opened when it is first needed.

    Args:
        home: the fleet of the settings' region, in which instances are launched.
        opened: makes the fleet of another region. Raises ConfigError.
    """

    def __init__(self, home: Fleet, opened: Callable[[str], Fleet]) -> None:
        self.home = home
        self._opened = opened
        self._fleets = {home.region: home}

    def of(self, region: str) -> Fleet:
        """The fleet of a region."""
        if region not in self._fleets:
            self._fleets[region] = self._opened(region)
        return self._fleets[region]

    def listing(self, runs: Iterable[BurstRun]) -> Listing:
        """All instances with the site's tag, and the instances of these open runs whatever tags they have."""
        mine: dict[str, set[str]] = {self.home.region: set()}
        for run in runs:
            open_ids = {slot.instance for slot in run.slots if slot.instance is not None and slot.ended_s is None}
            mine.setdefault(run.region, set()).update(open_ids)
        found: dict[str, DescribedInstance] = {}
        heard, stripped, trouble, lost = set(), set(), [], False
        for region, ids in mine.items():
            try:
                fleet = self.of(region)
                listed = {seen.id: seen for seen in fleet.seen()}
                by_id = {seen.id: seen for seen in fleet.known(ids - set(listed))}
            except LaunchFailed as error:
                trouble.append(f"EC2 does not list the instances in {region}: {error}")
                lost |= error.kind is Kind.LOST
                log.warning("EC2 does not answer", extra={"region": region, "text": str(error)})
                continue
            heard.add(region)
            stripped |= {seen.id for seen in by_id.values() if "site" not in seen.tags and seen.state not in GONE}
            found |= listed | by_id
        return Listing(found, frozenset(heard), frozenset(stripped), "; ".join(trouble), lost)

    def of_run(self, run: BurstRun) -> dict[str, DescribedInstance]:
        """The run's instances, by its tag and by their ids. Raises LaunchFailed."""
        fleet = self.of(run.region)
        tagged = {seen.id: seen for seen in fleet.seen(run.id)}
        ids = {slot.instance for slot in run.slots if slot.instance is not None} - set(tagged)
        return tagged | {seen.id: seen for seen in fleet.known(ids)}

    def with_times(self, run: BurstRun, found: Mapping[str, DescribedInstance], now_s: float) -> BurstRun:
        """The run with EC2's own times, and with an end for instances that EC2 says are gone. Raises LaunchFailed."""
        return run.model_copy(update={"slots": tuple(self._with_time(run, slot, found, now_s) for slot in run.slots)})

    def _with_time(self, run: BurstRun, slot: Slot, found: Mapping[str, DescribedInstance], now_s: float) -> Slot:
        if slot.instance is None or slot.ended_s is not None:
            return slot
        seen, launched_s = found.get(slot.instance), slot.launched_s or now_s
        if seen is not None:
            # Where EC2 gives no time of the end, the instance has lived until now at most.
            gone = {"ended_s": now_s if seen.ended_s is None else seen.ended_s} if seen.state in GONE else {}
            return slot.model_copy(update={"launched_s": seen.launched_s, "missed": 0, **gone})
        missed = slot.missed + 1
        if (
            missed < MISSED
            or now_s - launched_s < APPEARS_S
            or (missed - MISSED) % MISSED
            or not self.of(run.region).forgotten(slot.instance)
        ):
            return slot.model_copy(update={"missed": missed})
        # EC2 forgets an instance an hour after its end. It ends itself when the committed dollars are spent.
        return slot.model_copy(update={"missed": missed, "ended_s": min(now_s, launched_s + run.lifetime_s)})
