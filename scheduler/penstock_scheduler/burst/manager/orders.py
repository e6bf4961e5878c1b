"""Orders of instances: a round's orders, checked and made into runs, and placed with the provider until it has answered."""

from __future__ import annotations

import logging
import math
import random
from uuid import uuid4

from penstock_scheduler.burst.deciding.choices import CloudChoice, within
from penstock_scheduler.burst.deciding.estimates import Gravity
from penstock_scheduler.burst.deciding.states import Fact
from penstock_scheduler.burst.manager.book import Book
from penstock_scheduler.burst.manager.cluster_side import ClusterSide
from penstock_scheduler.burst.manager.facts import ORDER_PATIENCE_S
from penstock_scheduler.burst.manager.instances import Instances
from penstock_scheduler.burst.manager.offers import Offers
from penstock_scheduler.burst.manager.provider import Guests, Kind, LaunchFailed, pause_s
from penstock_scheduler.burst.manager.runs import BurstRun, Slot
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.model import BurstJob, Job
from penstock_scheduler.people.units import dollars

log = logging.getLogger(__name__)


class CloudOrders:
    """See the module.

    Attributes:
        tried_s: run -> when its order was first placed, s since 1970.
    """

    def __init__(
        self,
        settings: BurstSettings,
        book: Book,
        instances: Instances,
        offers: Offers,
        cluster: ClusterSide,
        guests: Guests,
        rng: random.Random,
    ) -> None:
        self._settings, self._book, self._instances, self._offers = settings, book, instances, offers
        self._cluster, self._guests, self._rng = cluster, guests, rng
        # Runs of an earlier daemon: an instance of its last order may exist without a record.
        self._resumed = set(book.runs)
        self._gravity = Gravity(settings.bytes_per_s, settings.usd_per_gb)
        self.tried_s: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._retry_s: dict[str, float] = {}
        self._boot_failures = 0
        self._boot_failed_s = -math.inf

    def refusal(self, action: BurstJob, job: Job, now_s: float) -> str:
        """Why a job may not be ordered now, whatever the offer, or nothing."""
        if (bad := self._book.unreadable_of(action.job)) is not None:
            return bad.trouble
        if (protected := self._instances.protected) is not None:
            return f"nothing is launched in protected mode: {protected}"
        if action.offer not in self._offers.by_id:
            return f"{action.offer} is not offered any more"
        if any(run.round == action.round for run in self._book.of_job(action.job).runs):
            return f"the run that round {action.round} ordered is over; the next round decides again"
        budgets = self._book.budgets(self._settings.budget, now_s, {job.account})
        data_usd = self._gravity.usd(float(job.spec.data_size_bytes or 0))
        to = CloudChoice(self._offers.by_id[action.offer].offer, 0.0, action.usd, action.usd, data_usd)
        broken = within(budgets, {job.id: (job.account, to)})
        return f"{broken[0]} does not allow {dollars(action.usd)} any more" if broken else ""

    def new_run(self, action: BurstJob, job: Job, now_s: float) -> BurstRun | str:
        """The run of an order, or why it is refused."""
        offered = self._offers.by_id[action.offer]
        offer, machine = offered.offer, offered.machine
        taken = {name for run in self._book.runs.values() for name in run.nodes}
        room = [node.name for node in self._cluster.nodes.values() if node.name not in taken and machine.suits(node)]
        if len(room) < offer.nodes:
            return "another job has taken the cloud nodes in the meantime"
        data = float(job.spec.data_size_bytes or 0)
        run = BurstRun(
            data_gb=data / 1e9,
            data_usd=self._gravity.usd(data),
            data_s=self._gravity.transfer_s(data),
            id=f"{action.job}.{1 + self._book.of_job(action.job).count}-{uuid4().hex}",
            job=action.job,
            region=offered.place,
            user=job.user,
            account=job.account,
            offer=offer,
            instance_type=machine.instance_type,
            market=machine.market,
            usd_per_h=offer.usd_per_h / offer.nodes,
            extras_usd_per_h=machine.extras_usd_per_h,
            usd=action.usd,
            round=action.round,
            ordered_s=now_s,
            partition=self._cluster.partition,
            state="ordered",
            slots=tuple(Slot(node=name) for name in sorted(self._cluster.by_use(room)[: offer.nodes])),
        )
        longest_s = self._guests.longest_s
        if longest_s is not None and run.lifetime_s > longest_s:
            return (
                f"{dollars(run.usd)} pay for {run.lifetime_s / 3600:.0f} h, but detached runs last at most "
                f"{longest_s / 3600:.0f} h, since their links are signed for a week; declare a shorter --runtime"
            )
        return run

    def place(self, run: BurstRun, now_s: float) -> dict[Fact, str]:
        """Place the order. Returns how that went, or nothing if it is placed again later."""
        self.tried_s.setdefault(run.id, run.ordered_s if run.id in self._resumed else now_s)
        if run.region in self._instances.silent or now_s < self._retry_s.get(run.id, 0.0):
            return {}
        try:
            guest = self._guests.prepare(run.id, run.job, run.user, run.lifetime_s, run.nodes)
            recover = run.id in self._resumed or run.id in self._tries
            launched = self._instances.launch(run, guest, now_s, recover=recover)
        except LaunchFailed as error:
            return self._refused(run, error, now_s)
        except KeyError:
            return {Fact.REFUSED: f"this machine does not know the user {run.user}"}
        self._book.save(launched, now_s)
        self._offers.launched(run)
        return {Fact.LAUNCHED: "all its instances were launched"}

    def _refused(self, run: BurstRun, error: LaunchFailed, now_s: float) -> dict[Fact, str]:
        self._instances.note(run.region, error)
        if error.kind in (Kind.THROTTLED, Kind.LOST) and now_s - self.tried_s[run.id] < ORDER_PATIENCE_S:
            self._tries[run.id] = self._tries.get(run.id, 0) + 1
            self._retry_s[run.id] = now_s + pause_s(self._tries[run.id], self._rng)
            log.info("asks the cloud again", extra={"run": run.id, "tries": self._tries[run.id], "text": str(error)})
            return {}
        if error.kind is Kind.CONFIG:
            self._instances.protect_place(
                run.region, f"{run.region} refuses the request that [cloud] describes: {error}"
            )
        else:
            self._offers.refused(run, error, now_s)
        return {Fact.REFUSED: f"{error.kind}: {error}"}

    def boot_failed(self, run: BurstRun, why: str, now_s: float) -> None:
        """Note a failed boot. Several in a row begin protected mode; runs that were ordered together count once."""
        self._offers.boot_failed(run, why, now_s)
        if run.ordered_s < self._boot_failed_s:
            return  # it was ordered before the last failure was known, and may have failed for the same reason
        self._boot_failures, self._boot_failed_s = self._boot_failures + 1, now_s
        if self._boot_failures >= self._settings.protected_after:
            self._instances.protect(
                f"{self._boot_failures} boots in a row failed, the last one: {why}; read the instance's console output"
            )

    def booted(self) -> None:
        """A boot has succeeded, or an admin has looked at the failures."""
        self._boot_failures = 0

    def forget(self, run: BurstRun) -> None:
        """The run is over."""
        self.tried_s.pop(run.id, None)
        self._tries.pop(run.id, None)
        self._retry_s.pop(run.id, None)
