"""The site's instances: launched, listed and ended, and those that belong to no run."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from penstock_scheduler.burst.manager.book import Book
from penstock_scheduler.burst.manager.places import Listing, Places
from penstock_scheduler.burst.manager.provider import ADOPTED, DescribedInstance, Kind, LaunchFailed, Order, Provider
from penstock_scheduler.burst.manager.runs import BurstRun, Slot
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import JobId
from penstock_scheduler.people.units import dollars, moment
from penstock_scheduler.store.cloud_runs import RunStore

log = logging.getLogger(__name__)

PROTECTED = "cloud.protected"
"""Name of the stored control that says why nothing is launched. An admin removes it with `penstock cloud resume`."""

PROTECTED_PLACES = "cloud.protected_places"
"""Name of the stored control with the places in which nothing is launched, and why."""

OWNER = "cloud.owner"
"""Name of the stored control with the store's own UUID. Instances have it in their tag `owner`."""

HOME = "cloud.home"
"""Name of the stored control that says to which cluster the store belongs."""

QUIET_S = 15.0
"""How long a place that has lost an answer is not asked, if there are others: each call may take its whole time limit."""

AGAIN_S = 60.0
"""Seconds after which an instance that nobody has seen end is ended again."""

SOON_AGAIN_S = 5.0
"""The same after a refusal."""

UNENDED_S = 600.0
"""Seconds after which an instance that should have ended is told to the admin."""

NOTHING = "nothing is launched until an admin runs `penstock cloud resume`"
"""How the text of protected mode begins."""


class Instances:
    """See the module.

    Attributes:
        seen: what the places list, if they were asked in this pass; None: they were not.
        away: why places did not list everything; empty: all did.
        silent: places that have lost an answer in this pass or a little earlier, and are not asked now.
        stripped: instances of open runs that have lost the site's tag.
        foreign: instances with the site's tag that another store has launched: that of a second site with copied settings, or
            one that is lost. They are left alone.
        elsewhere: why this store is a copy of another cluster's, which may be alive, or nothing.
    """

    def __init__(self, places: Places, settings: BurstSettings, store: RunStore, book: Book) -> None:
        self._places, self._settings, self._store, self._book = places, settings, store, book
        self.seen: Listing | None = None
        self.away = ""
        self.silent: set[str] = set()
        self.stripped: frozenset[str] = frozenset()
        self.foreign: tuple[DescribedInstance, ...] = ()
        self.elsewhere = ""
        self._home = ""
        self._owner = _owner(store)
        self._quiet_until_s: dict[str, float] = {}
        self._heard: frozenset[str] = frozenset()
        self._settled: set[str] = set()
        self._again_s: dict[str, float] = {}
        """Instance -> when it may be ended again."""
        self._looked_s = -1e18
        self._now_s = 0.0

    @property
    def protected(self) -> str | None:
        """Why nothing more is launched until an admin says so; None: it may be."""
        why = self._store.control(PROTECTED)
        return None if why is None else str(why)

    @property
    def protected_places(self) -> dict[str, str]:
        """Place -> why nothing more is launched there until an admin says so."""
        return dict(self._store.control(PROTECTED_PLACES) or {})

    def protected_in(self, place: str) -> str | None:
        """Why nothing more is launched in a place until an admin says so; None: it may be."""
        return self.protected or self.protected_places.get(place)

    def end_protection(self) -> tuple[str, ...]:
        """Launch again everywhere. Returns why that was not done."""
        everywhere = self.protected
        reasons = (() if everywhere is None else (everywhere,)) + tuple(self.protected_places.values())
        self._store.set_control(PROTECTED, None)
        self._store.set_control(PROTECTED_PLACES, None)
        return reasons

    def adopt(self) -> str:
        """Make the store this cluster's own. Returns to which other one it belonged, or nothing."""
        bound = str(self._store.control(HOME) or "")
        if not self._home or bound == self._home:
            return ""
        log.warning("the store is adopted", extra={"text": f"it belonged to {bound}, and now to {self._home}"})
        self._store.set_control(HOME, self._home)
        return bound

    def is_home(self, cluster: str) -> bool:
        """Whether the store belongs to this cluster. One that belongs to none does from now on."""
        self._home, bound = cluster, self._store.control(HOME)
        if bound is None and cluster:
            self._store.set_control(HOME, cluster)
        self.elsewhere = ""
        if bound and cluster and bound != cluster:
            self.elsewhere = (
                f"the store belongs to {bound}, and this is {cluster}: no instance is launched, ended or charged; if the other "
                "one is alive, give this one a store and a [cloud] site of its own; if it is gone, run `penstock cloud adopt`"
            )
        return not self.elsewhere

    def usable_places(self) -> list[Provider]:
        """The places of the settings that have answered last time, and are not in protected mode."""
        return [each for each in self._places.all if each.name in self._heard and self.protected_in(each.name) is None]

    def note(self, place: str, error: LaunchFailed) -> None:
        """Note a refusal. A place that did not answer is not asked again in this pass."""
        if error.kind is Kind.LOST:
            self.silent.add(place)
            if len(self._places.all) > 1:
                self._quiet_until_s[place] = self._now_s + QUIET_S

    def look(self, now_s: float, every_s: float) -> None:
        """List all instances, if that was not done within `every_s`. Otherwise `seen` is None."""
        self._now_s = now_s
        self.silent = {place for place, until_s in self._quiet_until_s.items() if now_s < until_s}
        if now_s - self._looked_s < every_s:
            self.seen = None
            return
        seen = self._without_foreign(self._places.listing(self._book.runs.values(), self.silent))
        for place in seen.lost:
            self.note(place, LaunchFailed(Kind.LOST, "", ""))
        self.seen, self.away, self._heard = seen, seen.trouble, seen.heard
        if seen.heard or not seen.trouble:
            self._looked_s = now_s
        if seen.stripped - self.stripped:
            facts = {"instances": ",".join(sorted(seen.stripped))}
            log.error("instances have lost the tag penstock:site; they are ended with their runs", extra=facts)
        self.stripped = seen.stripped

    def _without_foreign(self, seen: Listing) -> Listing:
        """The listing without `foreign`, which are noted. An instance in an open run's record is the site's own."""
        claimed = self._claimed()
        own = {
            id_: each
            for id_, each in seen.found.items()
            if id_ in claimed or each.tags.get("owner") in (self._owner, ADOPTED)
        }
        foreign = tuple(each for id_, each in seen.found.items() if id_ not in own and not each.gone)
        if new := {each.id for each in foreign} - {each.id for each in self.foreign}:
            log.error(
                "instances of this site's identity that another store launched", extra={"instances": ",".join(new)}
            )
        self.foreign = foreign
        return dataclasses.replace(seen, found=own)

    def _claimed(self) -> set[str | None]:
        """The instances in the records of open runs."""
        return {slot.instance for run in self._book.runs.values() for slot in run.slots}

    def told(self) -> Iterator[str]:
        """What an admin should know: protected mode, instances without the site's tag, and the foreign ones of each owner."""
        if (protected := self.protected) is not None:
            yield f"{NOTHING}: {protected}"
        for place, why in self.protected_places.items():
            yield f"{NOTHING} in {place}: {why}"
        if self.stripped:
            names = ", ".join(sorted(self.stripped))
            yield f"{names} have lost the tag penstock:site, so they are found only by their runs; set the tag again"
        for owner in sorted({each.tags.get("owner", "") for each in self.foreign}):
            ids = ", ".join(each.id for each in self.foreign if each.tags.get("owner", "") == owner)
            yield (
                f"{ids}: launched under this site's identity by another penstockd, or by one whose store is lost; left alone, "
                "and not charged. If two sites have the same [cloud] site, give this one a UUID of its own; if not, "
                f"`penstock cloud adopt {owner or self._settings.site}` takes them over"
            )

    def unended(self, runs: Iterable[BurstRun], since_s: Mapping[str, float], now_s: float) -> Iterator[str]:
        """A sentence about each run whose instances cost money although they should have ended long ago, with the remedy.

        Args:
            runs: the open runs.
            since_s: run -> since when its instances are to end, s since 1970.
            now_s: now, s since 1970.
        """
        for run in runs:
            due_s = since_s.get(run.id, now_s)
            if now_s - due_s >= UNENDED_S and (ids := self.alive(run)):
                yield (
                    f"{', '.join(ids)} of job {run.job} should have ended at {moment(due_s)}, and {run.region} does not "
                    f"say that it has; it costs {dollars(run.usd_per_h)} an hour: end it in the provider's console"
                )

    def refresh(self, run: BurstRun, now_s: float) -> None:
        """Note the run's instances as listed in this pass, if its place was listed. Raises LaunchFailed."""
        if self.seen is None or run.region not in self.seen.heard or run.region in self.silent:
            return
        new = self._places.with_times(run, self.seen.found, now_s)
        if new != run:
            self._book.save(new, now_s)

    def sweep(self, there: Container[JobId]) -> None:
        """End instances that have the site's tag but belong to no run, and add their cost to the ledger.

        Args:
            there: the jobs that the cluster has. While it has a job whose run's record cannot be read, its instances are
                left alone: the job may run on them.
        """
        if self.seen is None:
            return
        claimed = self._claimed()
        for seen in self.seen.found.values():
            run_id = seen.tags.get("run", "")
            open_run = self._book.runs.get(run_id)
            if (
                seen.region in self.silent
                or seen.id in claimed
                or (open_run is not None and open_run.state in ("ordered", "ending"))
            ):
                continue
            bad = self._book.unreadable.get(run_id)
            if bad is not None and bad.job in there and not seen.gone:
                continue
            if seen.gone:
                if seen.id not in self._settled and seen.ended_s is not None:
                    self._settle(seen)
                continue
            if seen.id in self._claimed():
                continue  # its order was answered while others were ended
            log.warning("instance without a run is ended", extra={"instance": seen.id, "run": run_id})
            try:
                self.terminate(seen.region, [seen.id])
            except LaunchFailed as error:
                log.warning("the cloud refuses", extra={"instance": seen.id, "text": str(error)})
                self.note(seen.region, error)

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        """End instances. Raises LaunchFailed; a refusal also begins protected mode, since what cannot be ended costs money."""
        self._looked_s = -1e18
        try:
            self._places.of(region).terminate(ids)
        except LaunchFailed as error:
            if error.kind not in (Kind.LOST, Kind.THROTTLED):
                self.protect(
                    f"the cloud refuses to end {', '.join(ids)} in {region}, which go on costing money: {error}"
                )
            raise

    def end_all(self, runs: Iterable[BurstRun], now_s: float) -> None:
        """End the instances of these runs that are not known to have ended, by their ids: no listing is needed.

        All of a place are ended in one call. A refusal is noted, and the call is repeated later.
        """
        wanted: dict[str, list[str]] = {}
        for run in runs:
            due = [id_ for id_ in self.alive(run) if now_s >= self._again_s.get(id_, now_s)]
            wanted.setdefault(run.region, []).extend(due)
        for place in sorted(wanted, key=lambda name: name in self.silent):  # those that answer first
            if not (ids := wanted[place]):
                continue
            self._again_s |= dict.fromkeys(ids, now_s + AGAIN_S)
            try:
                self.terminate(place, ids)
            except LaunchFailed as error:
                log.warning("the cloud does not end instances", extra={"place": place, "text": str(error)})
                if error.kind is not Kind.LOST:  # a lost call has taken its whole time limit
                    self._again_s |= dict.fromkeys(ids, now_s + SOON_AGAIN_S)
                self.note(place, error)

    def alive(self, run: BurstRun) -> list[str]:
        """Ids of the run's instances that may still run: those of its record, and those that have its tag."""
        ids = {slot.instance: None for slot in run.slots if slot.instance is not None and slot.ended_s is None}
        ids |= dict.fromkeys(seen.id for seen in self._tagged(run) if not seen.gone)
        return list(ids)

    def _tagged(self, run: BurstRun) -> list[DescribedInstance]:
        """The instances with the run's tag that this pass has listed."""
        return (
            [] if self.seen is None else [seen for seen in self.seen.found.values() if seen.tags.get("run") == run.id]
        )

    def with_strays(self, run: BurstRun) -> BurstRun:
        """The run with the instances that a launch with a lost answer has made: they have the run's tag."""
        return _with_instances(run, self._tagged(run))

    def has_ended(self, run: BurstRun) -> bool:
        """Whether the provider has said in this pass that all instances of the run are gone."""
        if self.seen is None or run.region not in self.seen.heard or self.alive(run):
            return False
        for slot in run.slots:
            self._again_s.pop(slot.instance or "", None)
        return True

    def _settle(self, seen: DescribedInstance) -> None:
        """Charge an instance that has ended and belongs to no open run."""

        def billed(slot: Slot) -> Slot:
            extras_usd_per_h = float(seen.tags.get("extras_usd_per_h", "0"))
            return self._billed(seen.region, seen.instance_type, slot, extras_usd_per_h) if seen.spot else slot

        try:
            self._book.settle(seen, billed)
            self._settled.add(seen.id)
        except LaunchFailed as error:
            self.note(seen.region, error)  # the next listing has it again

    def billed(self, run: BurstRun) -> BurstRun:
        """The run, whose instances have ended, at the prices that its provider bills. Raises LaunchFailed: it is to be asked
        again. After another refusal, the offered price stays."""
        if run.market != "spot":
            return run
        slots = [self._billed(run.region, run.instance_type, slot, run.extras_usd_per_h) for slot in run.slots]
        return run.model_copy(update={"slots": tuple(slots)})

    def _billed(self, region: str, instance_type: str, slot: Slot, extras_usd_per_h: float) -> Slot:
        """See `billed`."""
        prices: Sequence[tuple[float, float]] = ()
        if slot.launched_s is not None and slot.ended_s is not None and slot.zone:
            try:
                prices = self._places.of(region).spot_prices(instance_type, slot.zone, slot.launched_s, slot.ended_s)
            except LaunchFailed as error:
                if error.kind in (Kind.LOST, Kind.THROTTLED):
                    raise
                log.warning("the prices on spot are not told", extra={"instance": slot.instance, "text": str(error)})
        return slot.billed(prices, extras_usd_per_h)

    def protect(self, why: str) -> None:
        """Begin protected mode, also for later daemons."""
        if self.protected == why:
            return
        log.error("protected mode: nothing more is launched", extra={"text": why})
        self._store.set_control(PROTECTED, why)

    def protect_place(self, place: str, why: str) -> None:
        """Begin protected mode in one place. The other places, if there are any, go on."""
        if len(self._places.all) == 1:
            return self.protect(why)
        places = self.protected_places
        if places.get(place) != why:
            log.error(
                "protected mode in one place: nothing more is launched there", extra={"place": place, "text": why}
            )
            self._store.set_control(PROTECTED_PLACES, places | {place: why})
        return None

    def launch(self, run: BurstRun, guest: bytes | None, now_s: float, *, recover: bool) -> BurstRun:
        """Launch the instances of a run, all or none. After LaunchFailed, what was launched is ended with the run.

        Args:
            run: the run.
            guest: the script of its instances; None: they join Slurm.
            now_s: now, s since 1970.
            recover: whether an earlier attempt may have launched instances that the run does not know.
        """
        place = self._places.of(run.region)
        found: dict[str, DescribedInstance] = {}
        if recover:
            found = {seen.tags.get("node", ""): seen for seen in place.list(run.id) if not seen.gone}
        if set(found) >= set(run.nodes):
            launched = {name: (found[name].id, found[name].launched_s) for name in run.nodes}
        else:
            self._looked_s = -1e18
            order = Order(
                run=run.id,
                token=hashlib.sha256(f"{self._settings.site} {run.id}".encode()).hexdigest()[:48],
                instance_type=run.instance_type,
                market=run.market,
                nodes=run.nodes,
                tags=run.tags() | {"owner": self._owner},
                usd_per_h=run.usd_per_h - run.extras_usd_per_h,
                guest=guest,
                until_s=run.ordered_s + run.lifetime_s,
            )
            # An earlier attempt may have launched them as early as this. The provider's own time replaces it once it is seen.
            since_s = run.ordered_s if recover else now_s
            launched = {node: (id_, since_s) for node, id_ in place.launch_gang(order).items()}
        slots = tuple(
            slot
            if slot.instance == launched[slot.node][0]
            else slot.model_copy(update={"instance": launched[slot.node][0], "launched_s": launched[slot.node][1]})
            for slot in run.slots
        )
        log.info(
            "launched", extra={"job": run.job, "run": run.id, "instances": ",".join(s.instance or "" for s in slots)}
        )
        return run.model_copy(update={"slots": slots})


def _owner(store: RunStore) -> str:
    """The store's UUID, made at the first time."""
    if (owner := store.control(OWNER)) is None:
        owner = str(uuid.uuid4())
        store.set_control(OWNER, owner)
    return str(owner)


def _with_instances(run: BurstRun, found: Iterable[DescribedInstance]) -> BurstRun:
    """The run with those of its instances that it does not know yet, each at its node."""
    slots = list(run.slots)
    known = {slot.instance for slot in slots}
    for seen in found:
        free = [n for n, slot in enumerate(slots) if slot.instance is None]
        at = next(
            (n for n in free if slots[n].node == seen.tags.get("node")), None if "node" in seen.tags else free[:1]
        )
        if isinstance(at, list):
            at = at[0] if at else None
        if seen.id not in known and at is not None:
            slots[at] = slots[at].model_copy(
                update={"instance": seen.id, "launched_s": seen.launched_s, "zone": seen.zone}
            )
            known.add(seen.id)
    return run.model_copy(update={"slots": tuple(slots)})
