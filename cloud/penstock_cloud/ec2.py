"""EC2 behind the port `Burst`. A job in the cloud runs on nodes of the same Slurm, which exist while their instances do.

A run goes through these states, one step in each tick. Each state is stored before the next step begins::

    ordered --launch--> booting --joins Slurm--> running --ends, or recalled--> (leaving -->) ending --gone--> over

`ordered` and its commitment in the ledger are in the store before the first call to EC2. Every call to EC2 follows from the
record alone, with the same ClientToken each time, so a daemon that dies at any point continues where it was. Besides the
record, only pauses are kept: for how long a type, a market or a call is not used. Every minute, all instances with the site's
tag are compared with the runs. An instance that belongs to no run is ended, and its cost is added to the ledger. A run that has
lost its instance ends, and its job is queued again.

The *pass* does all that asks EC2 or S3, in a thread of its own. docs/decisions/0014-the-cloud-has-a-thread.md has its rules.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import uuid4

from penstock_cloud.book import Book
from penstock_cloud.catalogue import Catalogue
from penstock_cloud.cluster_side import ClusterSide
from penstock_cloud.detached_runs import LINKS_S, DetachedRuns
from penstock_cloud.failures import Kind, LaunchFailed, pause_s
from penstock_cloud.fleet import GONE
from penstock_cloud.history import SiteHistory
from penstock_cloud.instances import Instances
from penstock_cloud.offers import SIZES, Offers, line, suits
from penstock_cloud.regions import Regions
from penstock_cloud.runs import BurstRun, Slot, State
from penstock_cloud.settings import CloudSettings
from penstock_cloud.share import Share
from penstock_cloud.staging import StagingBucket
from penstock_cloud.worker import Worker
from penstock_scheduler.burst.choices import within
from penstock_scheduler.burst.estimates import Gravity
from penstock_scheduler.burst.history import histories
from penstock_scheduler.ledger_messages import LedgerLine
from penstock_scheduler.model import (
    Action,
    BudgetLine,
    BurstJob,
    CloudAction,
    CloudState,
    Hold,
    Job,
    JobId,
    Outcome,
    Phase,
    Placement,
    Progress,
    Recall,
    Start,
)
from penstock_scheduler.model import (
    Share as NodeShare,
)
from penstock_scheduler.ports import Clock, CloudNode, CloudNodes
from penstock_scheduler.store import SqlStore

log = logging.getLogger(__name__)

ORDER_PATIENCE_S = 300.0
"""How long an order is repeated while EC2 throttles or does not answer."""

LEAVE_PATIENCE_S = 180.0
"""How long a job may take to save and leave before its instance is ended."""

SOON_S = 5.0
"""Seconds between two listings while instances start or end."""

LEAVE_S = 120.0
"""How long before its committed dollars are spent a job is asked to save and leave."""

LEAVES = ("leaving", "ending")
"""States of a run whose job is asked to leave its nodes."""


class Ec2Cloud:
    """See the module.

    Args:
        catalogue: returns the current catalogue of instance types; None: no catalogue describes this region.
        nodes: the cluster's cloud nodes.
        rng: for the jitter of pauses.
        staging: for detached runs: the nodes are gateways then, which the instances do not join. None: they join.
        lock: lets a thread of its own do all that asks the cloud. `regions` and `staging` release the lock during each call
            (`worker.Yielding`). None: `observe` does it, and waits.
    """

    def __init__(
        self,
        regions: Regions,
        settings: CloudSettings,
        store: SqlStore,
        clock: Clock,
        catalogue: Callable[[], Catalogue | None],
        nodes: CloudNodes,
        rng: random.Random,
        staging: StagingBucket | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        self._regions, self._settings, self._store, self._clock = regions, settings, store, clock
        self._rng = rng
        self._share = Share(settings.share)
        self._cluster = ClusterSide(nodes, self._share)
        self._detached = DetachedRuns(settings, self._share, staging)
        self._offers = Offers(settings, catalogue, SIZES[:1] if self._detached.on else SIZES)
        self._pauses = self._offers.pauses
        self._book = Book(store)
        self._history = SiteHistory(settings, store)
        self._instances = Instances(regions, settings, store, self._book)
        # Runs of an earlier daemon: an instance of its last order may exist without a record.
        self._resumed = set(self._book.runs)
        self._tries: dict[str, int] = {}
        self._retry_s: dict[str, float] = {}
        self._words: dict[JobId, str] = {}
        self._leaving_s: dict[str, float] = {}
        self._fetched: set[str] = set()  # detached runs that have all their files back
        self._boot_failures = 0
        self._jobs_seen: dict[JobId, Job] = {}
        self._asks: list[Action] = []
        self._asked: list[Action] = []
        self._returned: dict[JobId, float] = {}
        self._recalled: set[str] = set()
        self._lock = threading.Lock() if lock is None else lock
        self._worker = None if lock is None else Worker(self._pass, lock)

    # --- the port

    def observe(self, jobs: Sequence[Job]) -> CloudState:
        """See `ports.Burst`. A cloud that does not answer offers nothing, and delays no job on site."""
        with self._lock:
            self._meet_cluster(jobs)
            if self._worker is None:
                self._pass()
        if self._worker is not None:
            self._worker.wake()
        with self._lock:
            return self._state(jobs, self._clock.now_s())

    def _meet_cluster(self, jobs: Sequence[Job]) -> None:
        """The part that asks the cluster, and never the cloud. It changes no run: the pass may be in the middle of one."""
        self._jobs_seen = {job.id: job for job in jobs}
        self._cluster.meet(self._book.runs.values(), {bad.job for bad in self._book.unreadable.values()})
        self._book.count_queue_times(jobs, self._clock.now_s())

    def _pass(self) -> None:
        """The part that asks the cloud: one step of each run, the sweep, and new offers."""
        now_s = self._clock.now_s()
        there, nodes = self._jobs_seen, self._cluster.nodes
        self._asks, self._instances.silent = [], False
        self._detached.begin()
        self._look(now_s)
        for run in tuple(self._book.runs.values()):
            self._advance(self._book.runs[run.id], there.get(run.job), nodes, now_s)
        self._instances.sweep(there)
        self._asked = self._asks
        self._words = {job: text for job, text in self._words.items() if job in self._jobs_seen}
        self._returned = {job: at_s for job, at_s in self._returned.items() if job in self._jobs_seen}
        self._history.learn(now_s)
        if self._instances.protected is not None or self._instances.away or self._detached.trouble:
            return self._offers.none()
        taken = {name for run in self._book.runs.values() for name in run.nodes}
        room = [node for node in self._cluster.nodes.values() if node.name not in taken]
        return self._offers.make(room, self._settings.max_runs - self._book.open_count, self._instances.zones, now_s)

    def _state(self, jobs: Sequence[Job], now_s: float) -> CloudState:
        return CloudState(
            offers=tuple(offer for offer, _, _ in self._offers.by_id.values()),
            runs=(*(run.as_seen() for run in self._book.runs.values()), *self._book.seen_unreadable()),
            budgets=self._budgets(
                now_s, {job.account for job in jobs} | {run.account for run in self._book.runs.values()}
            ),
            waiting=self._history.waiting,
            max_queue=self._settings.max_queue,
            by_default=self._settings.by_default,
            at_cap=self._settings.at_cap,
            margin=self._settings.margin,
            leave_s=LEAVE_S,
            unknown_h=self._settings.unknown_h,
            longest_s=self._detached.longest_s,
            cost_per_usd=self._settings.cost_per_usd,
            bytes_per_s=self._settings.bytes_per_s,
            usd_per_gb=self._settings.usd_per_gb,
            returned=dict(self._returned),
            waits_since_s=self._book.waits_since_s(jobs, now_s),
            history_s=histories(jobs, self._history.past),
            words=dict(self._words),
            protected=self._instances.protected or "",
            closed=self._closed(now_s),
            troubles=tuple(bad.trouble for bad in self._book.unreadable.values()),
        )

    def asks(self) -> Sequence[Action]:
        """See `ports.Burst`."""
        with self._lock:
            states = {run.job: run.state for run in self._book.runs.values()}
            # A pass may have changed a run since it asked.
            return tuple(
                ask
                for ask in self._asked
                if (states.get(ask.job) == "booting" if isinstance(ask, Start) else states.get(ask.job) in LEAVES)
            )

    def apply(self, actions: Sequence[CloudAction]) -> tuple[Outcome, ...]:
        """See `ports.Burst`. The ledger and the store know of an order before this returns; the next pass launches."""
        with self._lock:
            return tuple(self._recall(each) if isinstance(each, Recall) else self._order(each) for each in actions)

    def _budgets(self, now_s: float, accounts: Iterable[str]) -> tuple[BudgetLine, ...]:
        return self._book.budgets(self._settings.budget, now_s, accounts)

    # --- orders

    def _order(self, action: BurstJob) -> Outcome:
        now_s = self._clock.now_s()
        if any(run.job == action.job for run in self._book.runs.values()):
            return Outcome(action, Progress.DONE, "it is in the cloud, or on its way")
        if (bad := self._book.unreadable_of(action.job)) is not None:
            return Outcome(action, Progress.FAILED, bad.trouble)
        if (protected := self._instances.protected) is not None:
            return Outcome(action, Progress.FAILED, f"nothing is launched in protected mode: {protected}")
        known = self._offers.by_id.get(action.offer)
        job = self._jobs_seen.get(action.job)
        if known is None or job is None:
            return Outcome(action, Progress.FAILED, f"{action.offer} is not offered any more")
        if self._book.open_count >= self._settings.max_runs:
            return Outcome(
                action, Progress.FAILED, f"[cloud] max_runs={self._settings.max_runs} jobs are in the cloud already"
            )
        before = self._book.of_job(action.job)
        if any(run.round == action.round for run in before.runs):
            text = f"the run that round {action.round} ordered is over; the next round decides again"
            return Outcome(action, Progress.FAILED, text)
        broken = within(self._budgets(now_s, {job.account}), {job.id: (job.account, action.usd)})
        if broken:
            return Outcome(action, Progress.FAILED, f"{broken[0]} does not allow ${action.usd:.2f} any more")
        settings = self._settings
        offer, instance_type, market = known
        taken = {name for run in self._book.runs.values() for name in run.nodes}
        kind = self._offers.kind(instance_type)
        room = [node.name for node in self._cluster.nodes.values() if node.name not in taken and suits(node, kind)]
        if kind is None or len(room) < offer.nodes:
            return Outcome(action, Progress.FAILED, "another job has taken the cloud nodes in the meantime")
        data, gravity = float(job.spec.data_size_bytes or 0), Gravity(settings.bytes_per_s, settings.usd_per_gb)
        run = BurstRun(
            data_gb=data / 1e9,
            data_usd=gravity.usd(data),
            data_s=gravity.transfer_s(data),
            id=f"{action.job}.{1 + before.count}-{uuid4().hex}",
            job=action.job,
            region=self._regions.home.region,
            user=job.user,
            account=job.account,
            offer=offer,
            instance_type=instance_type,
            market=market,
            usd_per_h=offer.usd_per_h / offer.nodes,
            extras_usd_per_h=settings.extras_usd_per_h,
            usd=action.usd,
            round=action.round,
            ordered_s=now_s,
            partition=self._cluster.partition,
            state="ordered",
            slots=tuple(Slot(node=name) for name in sorted(room)[: offer.nodes]),
        )
        longest_s = self._detached.longest_s
        if longest_s is not None and run.lifetime_s > longest_s:
            text = (
                f"${run.usd:.2f} pay for {run.lifetime_s / 3600:.0f} h, but detached runs last at most "
                f"{longest_s / 3600:.0f} h, since AWS signs links for a week; declare a shorter --runtime"
            )
            return Outcome(action, Progress.FAILED, text)
        self._save(run, run.committed())
        self._words.pop(run.job, None)
        log.info("ordered", extra={"job": run.job, "run": run.id, "offer": offer.id, "usd": round(run.usd, 2)})
        return Outcome(action, Progress.UNDER_WAY, f"ordered {offer}")

    def _recall(self, action: Recall) -> Outcome:
        run = next((run for run in self._book.runs.values() if run.job == action.job), None)
        if run is None:
            return Outcome(action, Progress.DONE, "it is back")
        if run.state in ("ordered", "booting", "running"):
            self._recalled.add(run.id)
        return Outcome(action, Progress.UNDER_WAY, "saves and comes back")

    # --- the states

    def _advance(self, run: BurstRun, job: Job | None, nodes: Mapping[str, CloudNode], now_s: float) -> None:
        """One step. A step that changes the record stores it first. A refusal by EC2 ends the step, not the pass.

        After a lost answer, this pass makes no more calls to EC2: each call may take its whole time limit.
        """
        run = self._instances.refreshed(run, now_s)
        if self._cluster.suspended(run) and run.state in ("booting", "running"):
            return self._finish(run, "Slurm has suspended its nodes")
        if run.id in self._recalled and run.state in ("ordered", "booting", "running"):
            self._recalled.discard(run.id)
            return self._leave(run, "it was recalled")
        try:
            match run.state:
                case "ordered":
                    self._launch(run, job, now_s)
                case "booting":
                    self._boot(run, job, nodes, now_s)
                case "running":
                    self._watch(run, job, now_s)
                case "leaving":
                    self._clear(run, job, now_s)
                case "ending":
                    self._end(run, job, now_s)
                case "over":
                    raise AssertionError("runs that are over are not in the record")
        except LaunchFailed as error:
            self._instances.silent |= error.kind is Kind.LOST
            log.warning("EC2 refuses", extra={"run": run.id, "state": run.state, "text": str(error)})
        return None

    def _launch(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        if job is None:
            return self._finish(run, "its job is gone")
        if job.phase is not Phase.QUEUED:
            return self._finish(run, "its job runs elsewhere")
        if (protected := self._instances.protected) is not None:
            return self._finish(run, f"nothing is launched in protected mode: {protected}", failed=True)
        if self._instances.silent and now_s - run.ordered_s >= ORDER_PATIENCE_S:
            return self._finish(run, f"{Kind.LOST}: EC2 does not answer", failed=True)
        if self._instances.silent or now_s < self._retry_s.get(run.id, 0.0):
            return None
        try:
            template = self._detached.prepare(run, self._regions.of(run.region))
            recover = run.id in self._resumed or run.id in self._tries
            run = self._instances.launch(run, template, now_s, recover=recover, launched=self._save)
        except LaunchFailed as error:
            return self._refused(run, error, now_s)
        except KeyError:
            return self._finish(run, f"this machine does not know the user {run.user}", failed=True)
        self._pauses.over(line(run.instance_type, run.market))
        self._save(run.model_copy(update={"state": "booting"}))
        return None

    def _refused(self, run: BurstRun, error: LaunchFailed, now_s: float) -> None:
        run = self._book.runs[run.id]
        settings = self._settings
        self._instances.silent |= error.kind is Kind.LOST
        if error.kind in (Kind.THROTTLED, Kind.LOST) and now_s - run.ordered_s < ORDER_PATIENCE_S:
            self._tries[run.id] = self._tries.get(run.id, 0) + 1
            self._retry_s[run.id] = now_s + pause_s(self._tries[run.id], self._rng)
            log.info("asks EC2 again", extra={"run": run.id, "tries": self._tries[run.id], "text": str(error)})
            return
        what = line(run.instance_type, run.market)
        match error.kind:
            case Kind.CAPACITY:
                self._pauses.rest(what, now_s, settings.capacity_back_off_s, str(error))
            case Kind.QUOTA:
                quota = line(run.instance_type.split(".")[0], run.market)
                self._pauses.rest(quota, now_s, settings.quota_back_off_s, str(error))
                log.error(
                    "a quota is used up: ask AWS to raise it, or remove the type from [cloud]",
                    extra={"text": str(error)},
                )
            case Kind.CONFIG:
                self._instances.protect(f"EC2 refuses the request that [cloud] describes: {error}")
            case _:
                pass
        self._finish(run, f"{error.kind}: {error}", failed=True)

    def _boot(self, run: BurstRun, job: Job | None, nodes: Mapping[str, CloudNode], now_s: float) -> None:
        if job is None:
            return self._finish(run, "its job is gone")
        if (lost := _lost(run)) is not None:
            return self._boot_failed(run, f"instance {lost} ended before it joined Slurm", now_s)
        up = all(name in nodes and nodes[name].up for name in run.nodes)
        if self._detached.on and up:  # a gateway is always up; a detached instance reports its start itself
            up = self._there(run, "started")
        if job.phase is Phase.RUNNING and up and _at(job, run):
            self._boot_failures = 0
            self._save(run.model_copy(update={"state": "running", "ran": True}))
            return None
        if job.phase is Phase.RUNNING and not _at(job, run):
            return self._finish(run, "its job runs elsewhere")
        if run.expires_s is not None and now_s >= run.expires_s:
            return self._finish(run, f"the ${run.usd:.2f} committed to it were spent before it ran", failed=True)
        if not run.asked and any(name in nodes and not nodes[name].free for name in run.nodes):
            run = run.model_copy(update={"asked": True})
            self._save(run)
        patience_s = self._settings.boot_timeout_s + run.data_s
        if now_s - run.ordered_s > patience_s:
            if not run.asked:  # no fault of the image or the type is known
                reason = self._cluster.reason(run.job) or "it does not say why"
                return self._finish(run, f"Slurm did not start it: {reason}", failed=True)
            if (
                self._detached.has(run, "input") is False
            ):  # it is still on its way, which is no fault of the image or the type
                why = f"its input had not arrived within {patience_s:.0f} s; declare its size with --data-size"
                return self._finish(run, why, failed=True)
            late = "did not start on its input" if self._detached.on else "did not join Slurm"
            return self._boot_failed(run, f"it {late} within {patience_s:.0f} s", now_s)
        if job.phase is Phase.RUNNING and _at(job, run):
            return None
        per_node = run.offer.gpus // run.offer.nodes
        shares = tuple(NodeShare(name, per_node) for name in run.nodes)
        self._asks.append(Start(run.job, run.round, Placement(run.offer.gpu_type, run.partition, shares)))
        return None

    def _boot_failed(self, run: BurstRun, why: str, now_s: float) -> None:
        self._boot_failures += 1
        if self._boot_failures >= self._settings.protected_after:
            self._instances.protect(
                f"{self._boot_failures} boots in a row failed, the last one: {why}; read the instance's console output"
            )
        self._pauses.rest(line(run.instance_type, run.market), now_s, self._settings.capacity_back_off_s, why)
        self._finish(run, why, failed=True)

    def _watch(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        if job is None:
            return self._finish(run, "its job has ended")
        if (lost := _lost(run)) is not None:
            taken = f"EC2 has taken instance {lost}"
            if self._detached.has(run, "stopped"):
                return self._leave(run, taken)
            # Its cloud runner fetches the result, or S3 does not answer. Nothing is paid for while its links are valid.
            fetched = self._detached.on and self._detached.has(run, "result") is not False
            if fetched and (run.expires_s is None or now_s < run.expires_s + LINKS_S):
                return None
            return self._finish(run, taken, failed=True)
        if job.phase in (Phase.QUEUED, Phase.STARTING):
            return self._finish(run, "Slurm has put its job back into the queue", failed=True)
        if run.expires_s is not None and now_s >= run.expires_s - min(LEAVE_S, run.lifetime_s / 2):
            return self._leave(run, f"the ${run.usd:.2f} committed to it are spent")
        if self._there(run, "stopped"):
            return self._leave(run, "EC2 takes its instance back within two minutes")
        notices = self._share.notices(run.nodes)
        if notices:
            return self._leave(run, f"EC2 takes {', '.join(notices)} back within two minutes")
        return None

    def _leave(self, run: BurstRun, why: str) -> None:
        state: State = "leaving" if run.state == "running" else "ending"
        log.info("leaves the cloud", extra={"job": run.job, "run": run.id, "why": why})
        self._save(run.model_copy(update={"state": state, "why": why}))

    def _clear(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        since_s = self._leaving_s.setdefault(run.id, now_s)
        over = run.expires_s is not None and now_s >= run.expires_s
        lost = _lost(run) is not None
        nothing_comes = (over or lost) and (not self._detached.on or self._detached.handed_back(run) is False)
        if job is None or job.phase is Phase.QUEUED or nothing_comes or now_s - since_s > LEAVE_PATIENCE_S:
            return self._finish(run, run.why)
        if (
            over and not lost and self._instances.seen is not None
        ):  # its output files are in S3, and are fetched without the instance
            self._instances.terminate(run.region, [slot.instance for slot in run.slots if slot.instance is not None])
        if self._detached.on and run.id not in self._fetched:
            if self._there(run, "fetched"):
                self._fetched.add(run.id)
            elif self._instances.seen is not None:
                self._detached.stop(run)
            return None
        self._asks.append(Hold(run.job, run.round))
        return None

    def _finish(self, run: BurstRun, why: str, *, failed: bool = False) -> None:
        """Begin to end the run: its instances are no longer needed."""
        if failed:
            self._words[run.job] = why
        log.log(
            logging.WARNING if failed else logging.INFO, "run ends", extra={"run": run.id, "job": run.job, "why": why}
        )
        self._save(run.model_copy(update={"state": "ending", "why": why}))

    def _end(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        """End the instances and release the nodes. The run is over once EC2 and Slurm have released all of them."""
        mine = job is not None and job.phase is not Phase.QUEUED and _at(job, run)
        if mine:
            self._asks.append(Hold(run.job, run.round))
        if self._instances.silent:
            return
        # An order with a lost answer may have launched an instance that is not in the record. It has the run's tag.
        found = self._regions.of_run(run)
        known = {slot.instance for slot in run.slots}
        for seen in found.values():
            slot = next((s for s in run.slots if s.node == seen.tags.get("node") and s.instance is None), None)
            if slot is not None and seen.id not in known:
                adopted = slot.model_copy(update={"instance": seen.id, "launched_s": seen.launched_s})
                run = run.model_copy(update={"slots": tuple(adopted if s is slot else s for s in run.slots)})
                known.add(seen.id)
                self._save(run)
        alive = [seen.id for seen in found.values() if seen.state not in GONE]
        unseen = [s.instance for s in run.slots if s.instance and s.ended_s is None and s.instance not in found]
        if alive or unseen:
            self._instances.terminate(run.region, [*alive, *(id_ for id_ in unseen if id_ is not None)])
            self._instances.seen = None  # earlier observations are out of date
            found = self._regions.of_run(run)
        run = self._regions.with_times(run, found, now_s)
        self._book.runs[run.id] = run
        if any(slot.instance is not None and slot.ended_s is None for slot in run.slots):
            return
        if not self._cluster.power_down(run):
            return
        if mine and now_s - run.ordered_s < run.lifetime_s + LEAVE_PATIENCE_S:
            return  # Slurm still has these nodes allocated to it; until it is queued, it stays a run in the cloud
        run = self._tidy(run)
        self._share.forget_notices(run.nodes)
        if run.ran:
            self._returned[run.job] = now_s
            if job is not None:
                self._book.comes_back(job, now_s)
        spent, used = run.spent(now_s), run.used(now_s)
        self._save(run.model_copy(update={"state": "over"}), spent, *([used] if used.amount else ()))
        log.info(
            "run is over",
            extra={"run": run.id, "job": run.job, "usd": round(spent.amount, 4), "why": run.why},
        )

    def _tidy(self, run: BurstRun) -> BurstRun:
        """Delete what was created for the run besides its instances. Returns the run, with a message about what is left.

        All of this costs little or nothing, so a refusal by EC2 or S3 does not keep the run open.
        """
        try:
            if len(run.slots) > 1:
                self._regions.of(run.region).drop_group(f"penstock-{run.id}")
            if self._detached.on:
                self._regions.of(run.region).drop_template(run.id)
        except LaunchFailed as error:
            if error.kind is not Kind.CONFIG:
                raise
            log.warning("a leftover of the run stays", extra={"run": run.id, "text": str(error)})
        if left := self._detached.tidy(run):
            run = run.model_copy(update={"why": f"{run.why}; {left}"})
            self._words[run.job] = run.why
        return run

    def _look(self, now_s: float) -> None:
        busy = any(run.state in ("booting", "leaving") for run in self._book.runs.values())
        self._instances.look(now_s, min(SOON_S, self._settings.reconcile_s) if busy else self._settings.reconcile_s)
        if self._instances.seen is not None:
            self._detached.trouble = ""
            self._detached.say_alive(now_s)

    # --- what is told

    def _closed(self, now_s: float) -> tuple[str, ...]:
        told = self._pauses.told(now_s)
        protected = self._instances.protected
        if protected is not None:
            told.insert(0, f"nothing is launched until an admin runs `penstock cloud resume`: {protected}")
        if self._instances.stripped:
            told.append(
                f"{', '.join(sorted(self._instances.stripped))} have lost the tag penstock:site, so they are found only by their "
                "runs; set the tag again"
            )
        thread = "" if self._worker is None else self._worker.trouble
        told += [
            text
            for text in (self._offers.old_prices(now_s), self._instances.away, self._detached.trouble, thread)
            if text
        ]
        return tuple(told)

    def _there(self, run: BurstRun, what: str) -> bool:
        """Whether a detached run has written this object, as far as is known now. S3 is asked as often as EC2."""
        return self._instances.seen is not None and self._detached.has(run, what) is True

    def _save(self, run: BurstRun, *lines: LedgerLine) -> None:
        self._book.save(run, self._clock.now_s(), *lines)
        if run.state == "over":
            self._cluster.forget(run)
            for table in (self._tries, self._retry_s, self._leaving_s):
                table.pop(run.id, None)
            self._fetched.discard(run.id)
            self._recalled.discard(run.id)


def _at(job: Job, run: BurstRun) -> bool:
    """Whether the job holds, or is about to hold, nodes of the run."""
    return job.allocation is not None and {share.node for share in job.allocation.shares} <= set(run.nodes)


def _lost(run: BurstRun) -> str | None:
    return next((slot.instance for slot in run.slots if slot.ended_s is not None), None)
