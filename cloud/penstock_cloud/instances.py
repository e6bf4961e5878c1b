"""The site's instances on EC2: launched, listed and ended, and those that belong to no run."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Container, Sequence

from penstock_cloud.book import Book
from penstock_cloud.failures import Kind, LaunchFailed
from penstock_cloud.fleet import GONE, DescribedInstance, Order
from penstock_cloud.regions import Listing, Regions
from penstock_cloud.runs import BurstRun
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.model import JobId
from penstock_scheduler.store import SqlStore

log = logging.getLogger(__name__)

PROTECTED = "cloud.protected"
"""Name of the stored control that says why nothing is launched. An admin removes it with `penstock cloud resume`."""


class Instances:
    """See the module.

    Attributes:
        seen: what EC2 lists, if it was asked in this pass; None: it was not.
        zones: zones of the site's subnets.
        away: why EC2 did not list everything; empty: it did.
        silent: whether an answer was lost in this pass. Then no more calls are made: each may take its whole time limit.
        stripped: instances of open runs that have lost the site's tag.
    """

    def __init__(self, regions: Regions, settings: CloudSettings, store: SqlStore, book: Book) -> None:
        self._regions, self._settings, self._store, self._book = regions, settings, store, book
        self.seen: Listing | None = None
        self.zones: tuple[str, ...] = ()
        self.away = ""
        self.silent = False
        self.stripped: frozenset[str] = frozenset()
        self._settled: set[str] = set()
        self._looked_s = -1e18

    @property
    def protected(self) -> str | None:
        """Why nothing more is launched until an admin says so; None: it may be."""
        why = self._store.control(PROTECTED)
        return None if why is None else str(why)

    def look(self, now_s: float, every_s: float) -> None:
        """List all instances, if that was not done within `every_s`. Otherwise `seen` is None."""
        if now_s - self._looked_s < every_s:
            self.seen = None
            return
        seen = self._regions.listing(self._book.runs.values())
        try:
            self.zones = tuple(self._regions.home.zones().values())
        except LaunchFailed as error:
            seen = dataclasses.replace(seen, trouble=f"EC2 does not describe the subnets: {error}")
        self.seen, self.away, self.silent = seen, seen.trouble, seen.lost
        if not seen.trouble:
            self._looked_s = now_s
        if seen.stripped - self.stripped:
            facts = {"instances": ",".join(sorted(seen.stripped))}
            log.error("instances have lost the tag penstock:site; they are ended with their runs", extra=facts)
        self.stripped = seen.stripped

    def look_again(self) -> None:
        """Something has changed: let the next pass list the instances."""
        self._looked_s = -1e18

    def refreshed(self, run: BurstRun, now_s: float) -> BurstRun:
        """The run with its instances as listed in this tick. Unchanged if this tick had no listing."""
        if self.seen is None or run.region not in self.seen.heard or self.silent:
            return run
        try:
            new = self._regions.with_times(run, self.seen.found, now_s)
        except LaunchFailed as error:
            log.warning("EC2 does not answer", extra={"run": run.id, "text": str(error)})
            return run
        if new != run:
            self._book.save(new, now_s)
        return new

    def sweep(self, there: Container[JobId]) -> None:
        """End instances that have the site's tag but belong to no run, and add their cost to the ledger.

        Args:
            there: the jobs that the cluster has. While it has a job whose run's record cannot be read, its instances are
                left alone: the job may run on them.
        """
        if self.seen is None or self.silent:
            return
        claimed = {slot.instance for run in self._book.runs.values() for slot in run.slots}
        for seen in self.seen.found.values():
            run_id = seen.tags.get("run", "")
            open_run = self._book.runs.get(run_id)
            if seen.id in claimed or (open_run is not None and open_run.state in ("ordered", "ending")):
                continue
            bad = self._book.unreadable.get(run_id)
            if bad is not None and bad.job in there and seen.state not in GONE:
                continue
            if seen.state in GONE:
                if seen.id not in self._settled and seen.ended_s is not None:
                    self._book.settle(seen)
                    self._settled.add(seen.id)
                continue
            log.warning("instance without a run is ended", extra={"instance": seen.id, "run": run_id})
            try:
                self.terminate(seen.region, [seen.id])
            except LaunchFailed as error:
                log.warning("EC2 refuses", extra={"instance": seen.id, "text": str(error)})
                if error.kind is Kind.LOST:
                    return

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        """End instances. Raises LaunchFailed; a refusal also begins protected mode, since what cannot be ended costs money."""
        self._looked_s = -1e18
        try:
            self._regions.of(region).terminate(ids)
        except LaunchFailed as error:
            if error.kind not in (Kind.LOST, Kind.THROTTLED):
                self.protect(f"EC2 refuses to end {', '.join(ids)} in {region}, which go on costing money: {error}")
            raise

    def protect(self, why: str) -> None:
        """Begin protected mode, also for later daemons."""
        if self.protected == why:
            return
        log.error("protected mode: nothing more is launched", extra={"text": why})
        self._store.set_control(PROTECTED, why)

    def launch(
        self, run: BurstRun, template: str, now_s: float, *, recover: bool, launched: Callable[[BurstRun], None]
    ) -> BurstRun:
        """Launch the instances of all slots. After LaunchFailed, those launched so far are ended with the run.

        Args:
            run: the run.
            template: its own launch template; empty: the site's.
            now_s: now, s since 1970.
            recover: whether an earlier attempt may have launched instances that the run does not know.
            launched: called with the run after each instance. Saves it.
        """
        fleet = self._regions.of(run.region)
        group = f"penstock-{run.id}" if len(run.slots) > 1 else ""
        if group:
            fleet.make_group(group)
        found: dict[str, DescribedInstance] = {}
        if recover:
            found = {seen.tags.get("node", ""): seen for seen in fleet.seen(run.id) if seen.state not in GONE}
        for index, slot in enumerate(run.slots):
            if slot.instance is not None:
                continue
            if (there := found.get(slot.node)) is not None:
                instance, launched_s = there.id, there.launched_s
            else:
                token = hashlib.sha256(f"{self._settings.site} {run.id} {index}".encode()).hexdigest()[:48]
                until_s = run.ordered_s + run.lifetime_s
                own_usd_per_h = run.usd_per_h - run.extras_usd_per_h
                order = Order(
                    token, run.instance_type, run.market, run.tags(slot), own_usd_per_h, group, template, until_s
                )
                instance, launched_s = fleet.launch(order), now_s
            slots = list(run.slots)
            slots[index] = slot.model_copy(update={"instance": instance, "launched_s": launched_s})
            run = run.model_copy(update={"slots": tuple(slots)})
            launched(run)
            self._looked_s = -1e18
            log.info("launched", extra={"job": run.job, "run": run.id, "instance": instance, "node": slot.node})
        return run
