"""The burst manager behind the port `Burst`: jobs in the cloud run on nodes of the same Slurm that exist while instances do.

A run goes from state to state by the table of `burst.states`, one step in each pass. Each state is stored before the next step
begins. `ordered` and its commitment in the ledger are in the store before the first call to a provider. Every call follows from
the record alone, with the same token each time, so a daemon that dies at any point continues where it was. Besides the record,
only pauses are kept: for how long a type, a market or a call is not used. Every minute, all instances with the site's tag are
compared with the runs. An instance that belongs to no run is ended, and its cost is added to the ledger. A run that has lost its
instance ends, and its job is queued again.

The *pass* does all that asks a provider, in a thread of its own; orders and closings have further ones, and do not wait for one
another. docs/decisions/0014-the-cloud-has-a-thread.md has the rules.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.ports import Clock, CloudNodes
from penstock_scheduler.burst.deciding.states import STATES, TABLE, Fact, State, Transition, step
from penstock_scheduler.burst.manager.book import Book, Unreadable
from penstock_scheduler.burst.manager.cluster_side import ClusterSide
from penstock_scheduler.burst.manager.facts import LEAVE_PATIENCE_S, LEAVE_S, Facts, World
from penstock_scheduler.burst.manager.history import SiteHistory
from penstock_scheduler.burst.manager.instances import Instances
from penstock_scheduler.burst.manager.offers import Offers
from penstock_scheduler.burst.manager.orders import CloudOrders
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.provider import Guests, JoinSlurm, Kind, LaunchFailed
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.burst.manager.share import SharedFolder
from penstock_scheduler.burst.manager.unknown_runs import ended_by, of_unknown_runs, record_of
from penstock_scheduler.burst.manager.worker import Crew, Worker
from penstock_scheduler.model import (
    Action,
    BurstJob,
    CloudAction,
    CloudRun,
    CloudState,
    Hold,
    Job,
    JobId,
    Outcome,
    Phase,
    Placement,
    Progress,
    Recall,
    Share,
    Start,
)
from penstock_scheduler.people.errors import CloudRefuses, ClusterAway
from penstock_scheduler.store.cloud_runs import OLDER_STORE, RunStore

log = logging.getLogger(__name__)

SOON_S = 5.0
"""Seconds between two listings while instances start or end."""

JOB_OVER: dict[str, Transition] = {
    row.state: row for row in TABLE if row.fact in (Fact.JOB_GONE, Fact.HAS_LEFT) and row.state != "ordered"
}
"""State of a run with instances -> its transition once its job is over."""

LEAVES = ("leaving", "ending")
"""States of a run whose job is asked to leave its nodes."""


class BurstManager:
    """See the module.

    Args:
        places: the providers.
        nodes: the cluster's cloud nodes.
        rng: for the jitter of pauses.
        guests: for detached runs: the nodes are gateways then, which the instances do not join. None: they join.
        lock: lets a thread of its own do all that asks the cloud. `places` and `guests` release the lock during each call
            (`worker.Yielding`). Without it, `observe` does it, and waits.
        share: the folder through which programs and cloud nodes speak; None: that of the settings.
    """

    def __init__(
        self,
        places: Places,
        settings: BurstSettings,
        store: RunStore,
        clock: Clock,
        nodes: CloudNodes,
        rng: random.Random,
        guests: Guests | None = None,
        lock: threading.Lock | None = None,
        share: SharedFolder | None = None,
    ) -> None:
        self._places, self._settings, self._store, self._clock = places, settings, store, clock
        self._share = SharedFolder(settings.share, settings.share_users) if share is None else share
        self._share_trouble = ""
        self._book = Book(store)
        self._cluster = ClusterSide(nodes, self._share, lambda job: self._book.of_job(job).runs)
        self._guests: Guests = JoinSlurm() if guests is None else guests
        self._offers = Offers(settings, places)
        self._history = SiteHistory(settings, store)
        self._instances = Instances(places, settings, store, self._book)
        self._orders = CloudOrders(
            settings, self._book, self._instances, self._offers, self._cluster, self._guests, rng
        )
        self._words: dict[JobId, str] = {}
        self._leaving_s: dict[str, float] = {}
        self._ending_s: dict[str, float] = {}
        self._advanced: set[str] = set()  # the runs that a thread is in the middle of
        self._fetched: set[str] = set()  # detached runs that have all their files back
        self._jobs_seen: dict[JobId, Job] = {}
        self._asked: dict[str, Action] = {}  # by run
        self._returned: dict[JobId, float] = {}
        self._recalled: set[str] = set()
        self._world = World(
            settings,
            self._cluster,
            self._instances,
            self._guests,
            self._share,
            self._recalled,
            self._leaving_s,
            self._orders.tried_s,
        )
        self._older_store: bool | None = None
        """Whether instances may belong to runs that the store does not know. Until that is known, nothing is done. Set at the
        first observation: the loop's first look at the cluster may find that the store is older."""
        self._lock = threading.Lock() if lock is None else lock
        self._worker = None if lock is None else Worker(self._pass, lock)
        self._ender = None if lock is None else Worker(self._end_all, lock)
        self._crew = None if lock is None else Crew(lock)

    @property
    def runs(self) -> Sequence[BurstRun]:
        """The open runs. Only for a manager without a thread of its own."""
        return tuple(self._book.runs.values())

    def is_recalled(self, run: BurstRun) -> bool:
        """Whether a run is to be recalled in the next pass. As above."""
        return run.id in self._recalled

    @property
    def learns_s(self) -> float:
        """When the waiting policy next follows the recorded history, s since 1970. As above."""
        return self._history.learns_s

    # --- the port

    def observe(self, jobs: Sequence[Job]) -> CloudState:
        """See `ports.Burst`. A cloud that does not answer offers nothing, and delays no job on site."""
        with self._lock:
            if self._older_store is None and self._instances.is_home(self._cluster.cluster()):
                self._older_store = self._store.control(OLDER_STORE) is not None
            self._meet_cluster(jobs)
            if self._worker is None:
                self._end_all()
                self._pass()
            elif self._older_store is False and not self._guests.on:
                self._advance_all("booting", "running", "leaving")  # asks no cloud, so a notice waits for none
        for worker in filter(None, (self._ender, self._worker)):
            worker.wake()
        with self._lock:
            if self._older_store:
                raise ClusterAway(
                    "the store was restored or is older than the jobs, and the cloud has not yet said which instances there are: "
                    f"{self._instances.away or 'it has been asked'}; until then, nothing is decided"
                )
            return self._state(jobs, self._clock.now_s())

    def asks(self) -> Sequence[Action]:
        """See `ports.Burst`."""
        with self._lock:
            states = {run.id: run.state for run in self._book.runs.values()}
            # A pass may have changed a run since it asked.
            return tuple(
                ask
                for id_, ask in self._asked.items()
                if (states.get(id_) == "booting" if isinstance(ask, Start) else states.get(id_) in LEAVES)
            )

    def apply(self, actions: Sequence[CloudAction]) -> tuple[Outcome, ...]:
        """See `ports.Burst`. The ledger and the store know of an order before this returns; the next pass launches."""
        with self._lock:
            return tuple(self._recall(each) if isinstance(each, Recall) else self._order(each) for each in actions)

    def end_protection(self) -> tuple[str, ...]:
        """See `ports.Burst`."""
        with self._lock:
            self._orders.booted()
            return self._instances.end_protection()

    def adopt(self) -> str:
        """See `ports.Burst`."""
        with self._lock:
            return self._instances.adopt()

    def accept_images(self) -> tuple[str, ...]:
        """See `ports.Burst`."""
        with self._lock:
            try:
                found = {place.name: place.accept() for place in self._places.all}
            except LaunchFailed as error:
                raise CloudRefuses(f"the image cannot be looked up: {error}") from None
            return tuple(f"{image} in {name}" for name, image in found.items() if image)

    def forget(self, run: str) -> JobId:
        """See `ports.Burst`."""
        with self._lock:
            return self._book.forget(run, self._clock.now_s())

    def _meet_cluster(self, jobs: Sequence[Job]) -> None:
        """The part that asks the cluster, and never the cloud. It changes no run: the pass may be in the middle of one."""
        self._jobs_seen = {job.id: job for job in jobs}
        if self._older_store is not False:
            self._cluster.look()
        else:
            unreadable = {bad.job for bad in self._book.unreadable.values()}
            self._cluster.meet(self._book.runs.values(), self._jobs_seen, unreadable)
        self._book.count_queue_times(jobs, self._clock.now_s())

    def _end_all(self) -> None:
        """End what belongs to jobs that are over, by what is known. No listing, order or rule of a pass holds it up."""
        if self._older_store is not False:
            return
        now_s = self._clock.now_s()
        for run in tuple(self._book.runs.values()):
            row = JOB_OVER.get(run.state)
            if row is not None and run.job not in self._jobs_seen and run.id not in self._advanced:
                self._take(run, None, row, run.why or Fact.JOB_GONE.value, now_s)
        ending = [run for run in self._book.runs.values() if run.state == "ending"]
        for run in ending:
            self._ending_s.setdefault(run.id, now_s)
        self._instances.end_all(ending, now_s)

    def _pass(self) -> None:
        """The part that asks the cloud: one step of each run, the sweep, and new offers."""
        if self._older_store is None:
            return self._offers.none()
        now_s = self._clock.now_s()
        self._guests.begin()
        self._look(now_s)
        if self._older_store and not self._know_all_runs(now_s):
            return None
        for id_ in tuple(self._book.runs):
            self._do(id_, lambda run, job, now_s: self._instances.refresh(run, now_s), beside=False)
        self._advance_all(*STATES)
        self._instances.sweep(self._jobs_seen)
        self._words = {job: text for job, text in self._words.items() if job in self._jobs_seen}
        self._returned = {job: at_s for job, at_s in self._returned.items() if job in self._jobs_seen}
        self._history.learn(now_s)
        if self._instances.protected is not None or self._guests.trouble:
            return self._offers.none()
        taken = {name for run in self._book.runs.values() for name in run.nodes}
        room = [node for node in self._cluster.nodes.values() if node.name not in taken]
        return self._offers.make(room, self._instances.usable_places(), now_s)

    def _know_all_runs(self, now_s: float) -> bool:
        """Make the records of runs that the store does not know. Returns whether all places have said what they have."""
        seen = self._instances.seen
        if seen is None or seen.trouble:
            return False
        ours = (
            each for each in self._instances.foreign if self._cluster.has(each.tags.get("job"), each.tags.get("node"))
        )
        for name, instances in of_unknown_runs([*seen.found.values(), *ours], self._book, self._jobs_seen).items():
            run = record_of(name, instances, self._cluster.nodes, self._cluster.partition)
            if isinstance(run, Unreadable):
                self._book.unreadable[name] = run
                log.error("a run that the store does not know", extra={"run": name, "text": run.trouble})
                continue
            for other in tuple(self._book.runs.values()):
                if {*other.nodes} & {*run.nodes}:
                    self._close(ended_by(other, run, seen.found), None, now_s)
            self._save(run, run.committed())
            log.warning("the store did not know this run; it goes on", extra={"run": name, "job": run.job})
        self._store.set_control(OLDER_STORE, None)
        self._older_store = False
        return True

    def _look(self, now_s: float) -> None:
        busy = any(run.state in ("booting", "leaving", "ending") for run in self._book.runs.values())
        self._instances.look(now_s, min(SOON_S, self._settings.reconcile_s) if busy else self._settings.reconcile_s)
        if self._instances.seen is not None:
            self._share_trouble = self._share.trouble()
            self._guests.trouble = ""
            self._guests.say_alive(now_s)

    def _state(self, jobs: Sequence[Job], now_s: float) -> CloudState:
        settings = self._settings
        accounts = {job.account for job in jobs} | {run.account for run in self._book.runs.values()}
        return CloudState(
            offers=tuple(offered.offer for offered in self._offers.by_id.values()),
            runs=(*(self._seen(run, now_s) for run in self._book.runs.values()), *self._book.seen_unreadable()),
            budgets=self._book.budgets(settings.budget, now_s, accounts),
            waiting=self._history.waiting,
            max_queue=settings.max_queue,
            by_default=settings.by_default,
            at_cap=settings.at_cap,
            margin=settings.margin,
            leave_s=LEAVE_S,
            unknown_h=settings.unknown_h,
            longest_s=self._guests.longest_s,
            cost_per_usd=settings.cost_per_usd,
            bytes_per_s=settings.bytes_per_s,
            usd_per_gb=settings.usd_per_gb,
            returned=dict(self._returned),
            waits_since_s=self._book.waits_since_s(jobs, now_s),
            history_s=self._history.running_times(jobs),
            words=dict(self._words),
            protected=self._instances.protected or "",
            closed=self._closed(now_s),
            troubles=(
                *(bad.trouble for bad in self._book.unreadable.values()),
                *self._instances.unended(self._book.runs.values(), self._ending_s, now_s),
                *filter(None, [self._instances.elsewhere, self._offers.stale(now_s), self._share_trouble]),
                *filter(None, [place.news() for place in self._places.all]),
            ),
        )

    def _seen(self, run: BurstRun, now_s: float) -> CloudRun:
        since_s = self._leaving_s.get(run.id, self._ending_s.get(run.id, now_s))
        return run.as_seen(since_s + LEAVE_PATIENCE_S)

    def _closed(self, now_s: float) -> tuple[str, ...]:
        told = [self._instances.elsewhere, *self._instances.told(), *self._offers.pauses.told(now_s)]
        threads = [worker.trouble for worker in (self._worker, self._ender, self._crew) if worker is not None]
        told += [
            self._offers.stale(now_s),
            *self._offers.troubles(),
            self._instances.away,
            self._guests.trouble,
            *threads,
        ]
        return tuple(text for text in told if text)

    # --- orders

    def _order(self, action: BurstJob) -> Outcome:
        now_s = self._clock.now_s()
        if any(run.job == action.job for run in self._book.runs.values()):
            return Outcome(action, Progress.DONE, "it is in the cloud, or on its way")
        job = self._jobs_seen.get(action.job)
        if job is None:
            return Outcome(action, Progress.FAILED, f"{action.offer} is not offered any more")
        refused = self._orders.refusal(action, job, now_s)
        if refused:
            return Outcome(action, Progress.FAILED, refused)
        run = self._orders.new_run(action, job, now_s)
        if isinstance(run, str):
            return Outcome(action, Progress.FAILED, run)
        self._save(run, run.committed())
        self._words.pop(run.job, None)
        log.info("ordered", extra={"job": run.job, "run": run.id, "offer": action.offer, "usd": round(run.usd, 2)})
        return Outcome(action, Progress.UNDER_WAY, f"ordered {run.offer}")

    def _recall(self, action: Recall) -> Outcome:
        run = next((run for run in self._book.runs.values() if run.job == action.job), None)
        if run is None:
            return Outcome(action, Progress.DONE, "it is back")
        if run.state in ("ordered", "booting", "running"):
            self._recalled.add(run.id)
        return Outcome(action, Progress.UNDER_WAY, "saves and comes back")

    # --- one step of a run

    def _advance_all(self, *states: State) -> None:
        """One step of each run in these states; an order is placed by another thread, if there are any."""
        for run in tuple(self._book.runs.values()):
            if run.state in states and run.id not in self._advanced:
                self._do(run.id, self._advance, beside=run.state == "ordered")

    def _do(self, id_: str, what: Callable[[BurstRun, Job | None, float], None], *, beside: bool) -> None:
        """Do something with a run, as it is by then, unless a thread is in the middle of it: calls take their time, and the
        loop orders meanwhile. A provider's refusal ends that, and not the pass.

        Args:
            id_: the run.
            what: what to do.
            beside: let another thread do it soon, if there are any.
        """
        if beside and self._crew is not None:
            return self._crew.do(id_, lambda: self._do(id_, what, beside=False))
        run = self._book.runs.get(id_)
        if run is None or id_ in self._advanced:
            return None
        self._advanced.add(id_)
        try:
            what(run, self._jobs_seen.get(run.job), self._clock.now_s())
        except LaunchFailed as error:
            self._instances.note(run.region, error)
            facts = {"run": id_, "state": run.state, "place": run.region, "text": str(error)}
            log.warning("the cloud refuses", extra=facts)
        finally:
            self._advanced.discard(id_)

    def _advance(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        """One step. A step that changes the record stores it first."""
        self._asked.pop(run.id, None)
        if run.state == "booting":
            run = self._note_request(run, job)
        if run.state == "leaving":
            self._leaving_s.setdefault(run.id, now_s)
        taken = step(run.state, Facts(self._world, run, job, now_s).why)
        if taken is None and run.state in ("ordered", "ending"):
            tried = self._orders.place(run, now_s) if run.state == "ordered" else self._end(run, job, now_s)
            run = self._book.runs[run.id]
            taken = step(run.state, lambda fact: tried.get(fact, ""))
        if taken is not None:
            self._take(run, job, *taken, now_s)
        elif run.state == "booting":
            self._start(run, job)
        elif run.state == "leaving":
            self._ask_to_leave(run, Facts(self._world, run, job, now_s))

    def _take(self, run: BurstRun, job: Job | None, row: Transition, why: str, now_s: float) -> None:
        """Do what a transition of the table says."""
        if row.to in ("leaving", "ending"):
            self._recalled.discard(run.id)  # a recall that came while the order was placed is kept until then
        if row.to == "over":
            return self._close(run, job, now_s) if self._crew is None else self._do(run.id, self._close, beside=True)
        if row.to == "booting":
            return self._save(run.model_copy(update={"state": "booting", "there_s": self._clock.now_s()}))
        if row.to == "running":
            self._orders.booted()
            return self._save(run.model_copy(update={"state": "running", "ran": True}))
        if row.boot:
            self._orders.boot_failed(run, why, now_s)
        if row.failed:
            self._words[run.job] = why
        level = logging.WARNING if row.failed else logging.INFO
        log.log(level, "run ends", extra={"run": run.id, "job": run.job, "state": row.to, "why": why})
        stopped = run.stopped or (run.state == "running" and row.fact is not Fact.JOB_GONE)
        return self._save(run.model_copy(update={"state": row.to, "why": why, "stopped": stopped}))

    def _note_request(self, run: BurstRun, job: Job | None) -> BurstRun:
        """Note whether Slurm has requested or used the run's nodes."""
        nodes = self._cluster.nodes
        if run.asked or job is None or not any(name in nodes and not nodes[name].free for name in run.nodes):
            return run
        run = run.model_copy(update={"asked": True})
        self._save(run)
        return run

    def _start(self, run: BurstRun, job: Job | None) -> None:
        """Let the cluster start the job on its nodes, unless it has."""
        assert job is not None, "a run whose job has ended does not boot"
        if job.phase is Phase.RUNNING:
            return
        per_node = run.offer.gpus // run.offer.nodes
        shares = tuple(Share(name, per_node) for name in run.nodes)
        self._asked[run.id] = Start(run.job, run.round, Placement(run.offer.gpu_type, run.partition, shares))

    def _ask_to_leave(self, run: BurstRun, facts: Facts) -> None:
        looked = self._instances.seen is not None
        if facts.money_over and facts.lost is None and looked:
            # Its output files are in the bucket, and are fetched without the instance.
            self._instances.terminate(run.region, [slot.instance for slot in run.slots if slot.instance is not None])
        if self._guests.on and run.id not in self._fetched:
            if facts.there("fetched"):
                self._fetched.add(run.id)
            elif looked:
                self._guests.stop(run.id)
            return
        self._asked[run.id] = Hold(run.job, run.round)

    def _end(self, run: BurstRun, job: Job | None, now_s: float) -> dict[Fact, str]:
        """Release the nodes once all instances have ended. Returns whether the provider and Slurm have let go of them."""
        mine = job is not None and job.phase is not Phase.QUEUED and Facts(self._world, run, job, now_s).at_nodes
        if mine:
            self._asked[run.id] = Hold(run.job, run.round)
        if mine and not run.ran:
            self._cluster.power_down(run)  # a job leaves nodes that boot only when the cluster gives them up
        if (whole := self._instances.with_strays(run)) != run:
            self._save(run := whole)
        if not self._instances.has_ended(run) or not self._cluster.power_down(run):
            return {}
        if mine and now_s - run.ordered_s < run.lifetime_s + LEAVE_PATIENCE_S:
            return {}  # Slurm still has these nodes allocated to it; until it is queued, it stays a run in the cloud
        return {Fact.ALL_GONE: "all of it is gone"}

    def _close(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        """Tidy up, charge the run and let go of it.

        All that is tidied costs little or nothing, so a refusal does not keep the run open.
        """
        try:
            self._places.of(run.region).tidy(run.id)
        except LaunchFailed as error:
            if error.kind in (Kind.THROTTLED, Kind.LOST):
                raise
            log.warning("a leftover of the run stays", extra={"run": run.id, "text": str(error)})
        if left := self._guests.tidy(run.id, run.job):
            run = run.model_copy(update={"why": f"{run.why}; {left}"})
            self._words[run.job] = run.why
        self._share.forget_notices(run.nodes)
        if run.ran:
            self._returned[run.job] = now_s
            if job is not None:
                self._book.comes_back(job, now_s)
        run = self._instances.billed(run)
        spent, used = run.spent(now_s), run.used(now_s)
        self._save(run.model_copy(update={"state": "over"}), *spent, *(line for line in used if line.amount))
        usd = sum(line.amount for line in spent)
        log.info("run is over", extra={"run": run.id, "job": run.job, "usd": round(usd, 4), "why": run.why})

    def _save(self, run: BurstRun, *lines: LedgerLine) -> None:
        self._book.save(run, self._clock.now_s(), *lines)
        if run.state == "over":
            self._cluster.forget(run)
            self._orders.forget(run)
            for table in (self._leaving_s, self._ending_s, self._asked):
                table.pop(run.id, None)
            self._fetched.discard(run.id)
            self._recalled.discard(run.id)
