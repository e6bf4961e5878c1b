"""EC2 behind the port `Burst`. A job in the cloud runs on nodes of the same Slurm, which exist while their instances do.

A run goes through these states, one step in each tick. Each state is stored before the next step begins::

    ordered --launch--> booting --joins Slurm--> running --ends, or recalled--> (leaving -->) ending --gone--> over

`ordered` and its commitment in the ledger are in the store before the first call to EC2. Every call to EC2 follows from the
record alone, with the same ClientToken each time, so a daemon that dies at any point continues where it was. Besides the
record, only pauses are kept: for how long a type, a market or a call is not used. Every minute, all instances with the site's
tag are compared with the runs. An instance that belongs to no run is ended, and its cost is added to the ledger. A run that has
lost its instance ends, and its job is queued again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pwd
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from penstock_cloud.catalogue import Catalogue, InstanceType
from penstock_cloud.failures import Kind, LaunchFailed, back_off_s, pause_s
from penstock_cloud.fleet import GONE, DescribedInstance, Order
from penstock_cloud.regions import MISSED, Listing, Regions
from penstock_cloud.runs import BurstRun, Slot, State, cost_usd, entries
from penstock_cloud.settings import CloudSettings, Market
from penstock_cloud.staging import CLOUD_RUNNER, INSTANCE, LONGEST_S, StagingBucket
from penstock_cloud.user_data import ALIVE, NOTICES, detached
from penstock_scheduler.burst.choices import within
from penstock_scheduler.burst.estimates import Gravity
from penstock_scheduler.burst.history import averages, histories
from penstock_scheduler.burst.ledger import budget_lines
from penstock_scheduler.burst.queue_times import QueueTime, counted, returned
from penstock_scheduler.messages import JobView, LedgerLine
from penstock_scheduler.model import (
    Action,
    BudgetLine,
    BurstJob,
    CloudAction,
    CloudState,
    Hold,
    Job,
    JobId,
    Offer,
    Outcome,
    Phase,
    Placement,
    Progress,
    Recall,
    Share,
    Start,
)
from penstock_scheduler.model.waiting import Averages, Wait, WaitingPolicy, by_budget
from penstock_scheduler.ports import Clock, CloudNode, CloudNodes
from penstock_scheduler.store import CloudRunRow, SqlStore

log = logging.getLogger(__name__)

UNASKED = "it requests cloud nodes itself; submit it to the site's partitions with --burst, and Penstock sends it to the cloud"
"""Message to the user of a job that was submitted to cloud nodes directly."""

PROTECTED = "cloud.protected"
"""Name of the stored control that says why nothing is launched. An admin removes it with `penstock cloud resume`."""

QUEUE_TIMES = "cloud.queue_times"
"""Name of the stored control with the jobs' times outside the queue. It is written when a job enters or leaves the queue."""

ORDER_PATIENCE_S = 300.0
"""How long an order is repeated while EC2 throttles or does not answer."""

LEAVE_PATIENCE_S = 180.0
"""How long a job may take to save and leave before its instance is ended."""

SOON_S = 5.0
"""Seconds between two listings while instances start or end."""

LEAD_S = 120.0
"""How long before its committed dollars are spent a job is asked to save and leave."""

HISTORY_S = 300.0
"""How often the site's recorded history is read again."""

NEWEST = 2000
"""Number of ended jobs that it covers."""

SIZES = (1, 2, 4, 8)
"""Numbers of nodes that are offered."""

DETACHED = "detached"
"""Folder in the share with a file for each detached job. It has the cloud runner's links, and only the job's user can read
it."""

LINKS_S = 3600.0
"""How long a run's links stay valid after the end of its instance's longest life."""


@dataclass(slots=True)
class _Pauses:
    """What is paused until when, and why. A restarted daemon has forgotten the pauses and tries each once more."""

    until_s: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def rests(self, what: str, now_s: float) -> bool:
        return now_s < self.until_s.get(what, 0.0)

    def rest(self, what: str, now_s: float, first_s: float, words: str) -> None:
        self.times[what] = self.times.get(what, 0) + 1
        self.until_s[what] = now_s + back_off_s(first_s, self.times[what])
        self.words[what] = words

    def over(self, what: str) -> None:
        for table in (self.until_s, self.words, self.times):
            table.pop(what, None)


class Ec2Cloud:
    """See the module.

    Args:
        catalogue: returns the current catalogue of instance types; None: no catalogue describes this region.
        nodes: the cluster's cloud nodes.
        rng: for the jitter of pauses.
        staging bucket: for detached runs: the nodes are gateways then, which the instances do not join. None: they join.
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
    ) -> None:
        self._staging = staging
        self._regions, self._settings, self._store, self._clock = regions, settings, store, clock
        self._catalogue, self._nodes, self._rng = catalogue, nodes, rng
        self._runs = {run.id: run for row in store.cloud_runs() for run in [BurstRun.model_validate_json(row.record)]}
        self._lines = store.cloud_ledger()
        # Runs of an earlier daemon: an instance of its last order may exist without a record.
        self._resumed = set(self._runs)
        self._pauses = _Pauses()
        self._tries: dict[str, int] = {}
        self._retry_s: dict[str, float] = {}
        self._words: dict[JobId, str] = {}
        self._leaving_s: dict[str, float] = {}
        self._fetched: set[str] = set()  # detached runs that have all their files back
        self._boot_failures = 0
        self._jobs_seen: dict[JobId, Job] = {}
        self._settled: set[str] = set()
        self._zones: tuple[str, ...] = ()
        self._seen: Listing | None = None
        self._stripped: frozenset[str] = frozenset()
        self._looked_s = -1e18
        self._away = ""
        self._silent = self._staging_silent = False
        self._undeleted: set[Path] = set()
        self._read_s = -1e18
        self._past: list[JobView] = []
        self._waiting = self._policy(())
        self._offers: dict[str, tuple[Offer, str, Market]] = {}
        self._asks: list[Action] = []
        self._returned: dict[JobId, float] = {}
        kept = store.control(QUEUE_TIMES) or {}
        self._queue_times = {job: QueueTime.model_validate(time) for job, time in kept.items()}
        self._saved_times: dict[JobId, QueueTime] | None = None

    # --- the port

    def observe(self, jobs: Sequence[Job]) -> CloudState:
        """See `ports.Burst`. A cloud that does not answer offers nothing, and delays no job on site."""
        now_s = self._clock.now_s()
        self._asks, self._silent, self._staging_silent = [], False, False
        self._sign_of_life()
        self._look(now_s)
        self._hear_slurm()
        self._refuse_strangers()
        there = self._jobs_seen = {job.id: job for job in jobs}
        nodes = {node.name: node for node in self._nodes.nodes()}
        for run in tuple(self._runs.values()):
            self._advance(run, there.get(run.job), nodes, now_s)
        self._sweep(now_s)
        self._count_queue_times(jobs, now_s)
        self._words = {job: text for job, text in self._words.items() if job in there}
        self._returned = {job: at_s for job, at_s in self._returned.items() if job in there}
        self._learn(now_s)
        offers = self._make_offers(nodes.values(), now_s)
        return CloudState(
            offers=offers,
            runs=tuple(run.as_seen() for run in self._runs.values()),
            budgets=self._budgets(now_s, {job.account for job in jobs} | {run.account for run in self._runs.values()}),
            waiting=self._waiting,
            by_default=self._settings.by_default,
            at_cap=self._settings.at_cap,
            margin=self._settings.margin,
            unknown_h=self._settings.unknown_h,
            longest_s=None if self._staging is None else self._longest_s,
            cost_per_usd=self._settings.cost_per_usd,
            bytes_per_s=self._settings.bytes_per_s,
            usd_per_gb=self._settings.usd_per_gb,
            returned=dict(self._returned),
            waits_since_s={job.id: self._queue_times[job.id].waits_since_s(job.submit_s, now_s) for job in jobs},
            history_s=histories(jobs, self._past),
            words=dict(self._words),
            protected=self._store.control(PROTECTED) or "",
            closed=self._closed(now_s),
        )

    def asks(self) -> Sequence[Action]:
        """See `ports.Burst`."""
        return tuple(self._asks)

    def apply(self, actions: Sequence[CloudAction]) -> tuple[Outcome, ...]:
        """See `ports.Burst`."""
        return tuple(self._recall(each) if isinstance(each, Recall) else self._order(each) for each in actions)

    def _count_queue_times(self, jobs: Sequence[Job], now_s: float) -> None:
        self._queue_times = times = counted(self._queue_times, jobs, now_s)
        if times != self._saved_times:
            self._saved_times = times
            self._store.set_control(QUEUE_TIMES, {job: time.model_dump() for job, time in times.items()})

    def _budgets(self, now_s: float, accounts: Iterable[str]) -> tuple[BudgetLine, ...]:
        return budget_lines(self._settings.budget, entries(self._lines), now_s, accounts)

    # --- orders

    def _order(self, action: BurstJob) -> Outcome:
        now_s = self._clock.now_s()
        if any(run.job == action.job for run in self._runs.values()):
            return Outcome(action, Progress.DONE, "it is in the cloud, or on its way")
        if (protected := self._store.control(PROTECTED)) is not None:
            return Outcome(action, Progress.FAILED, f"nothing is launched in protected mode: {protected}")
        known = self._offers.get(action.offer)
        job = self._jobs_seen.get(action.job)
        if known is None or job is None:
            return Outcome(action, Progress.FAILED, f"{action.offer} is not offered any more")
        if len(self._runs) >= self._settings.max_runs:
            return Outcome(
                action, Progress.FAILED, f"[cloud] max_runs={self._settings.max_runs} jobs are in the cloud already"
            )
        before = [BurstRun.model_validate_json(row.record) for row in self._store.cloud_runs(job=action.job)]
        if any(run.round == action.round for run in before):
            text = f"the run that round {action.round} ordered is over; the next round decides again"
            return Outcome(action, Progress.FAILED, text)
        broken = within(self._budgets(now_s, {job.account}), {job.id: (job.account, action.usd)})
        if broken:
            return Outcome(action, Progress.FAILED, f"{broken[0]} does not allow ${action.usd:.2f} any more")
        settings = self._settings
        offer, instance_type, market = known
        taken = {name for run in self._runs.values() for name in run.nodes}
        kind = self._catalogue_type(instance_type)
        room = [node.name for node in self._nodes.nodes() if node.name not in taken and _suits(node, kind)]
        if kind is None or len(room) < offer.nodes:
            return Outcome(action, Progress.FAILED, "another job has taken the cloud nodes in the meantime")
        data, gravity = float(job.spec.data_size_bytes or 0), Gravity(settings.bytes_per_s, settings.usd_per_gb)
        run = BurstRun(
            data_gb=data / 1e9,
            data_usd=gravity.usd(data),
            data_s=gravity.transfer_s(data),
            id=f"{action.job}.{1 + len(before)}-{uuid4().hex}",
            job=action.job,
            region=self._regions.home.region,
            user=job.user,
            account=job.account,
            offer=offer,
            instance_type=instance_type,
            market=market,
            usd_per_h=offer.usd_per_h / offer.nodes,
            usd=action.usd,
            round=action.round,
            ordered_s=now_s,
            partition=self._nodes.partition,
            state="ordered",
            slots=tuple(Slot(node=name) for name in sorted(room)[: offer.nodes]),
        )
        if self._staging is not None and run.lifetime_s > self._longest_s:
            text = (
                f"${run.usd:.2f} pay for {run.lifetime_s / 3600:.0f} h, but detached runs last at most "
                f"{self._longest_s / 3600:.0f} h, since AWS signs links for a week; declare a shorter --runtime"
            )
            return Outcome(action, Progress.FAILED, text)
        self._save(run, run.committed())
        self._words.pop(run.job, None)
        log.info("ordered", extra={"job": run.job, "run": run.id, "offer": offer.id, "usd": round(run.usd, 2)})
        return Outcome(action, Progress.UNDER_WAY, f"ordered {offer}")

    def _recall(self, action: Recall) -> Outcome:
        run = next((run for run in self._runs.values() if run.job == action.job), None)
        if run is None:
            return Outcome(action, Progress.DONE, "it is back")
        if run.state in ("ordered", "booting", "running"):
            self._leave(run, "it was recalled")
        return Outcome(action, Progress.UNDER_WAY, "saves and comes back")

    # --- the states

    def _advance(self, run: BurstRun, job: Job | None, nodes: Mapping[str, CloudNode], now_s: float) -> None:
        """One step. A step that changes the record stores it first. A refusal by EC2 ends the step, not the tick.

        After a lost answer, this tick makes no more calls to EC2: each call may take its whole time limit while the loop waits.
        """
        run = self._refreshed(run)
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
            self._silent |= error.kind is Kind.LOST
            log.warning("EC2 refuses", extra={"run": run.id, "state": run.state, "text": str(error)})

    def _launch(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        if job is None:
            return self._finish(run, "its job is gone")
        if job.phase is not Phase.QUEUED:
            return self._finish(run, "its job runs elsewhere")
        if (protected := self._store.control(PROTECTED)) is not None:
            return self._finish(run, f"nothing is launched in protected mode: {protected}", failed=True)
        if self._silent and now_s - run.ordered_s >= ORDER_PATIENCE_S:
            return self._finish(run, f"{Kind.LOST}: EC2 does not answer", failed=True)
        if self._silent or now_s < self._retry_s.get(run.id, 0.0):
            return None
        try:
            template = "" if self._staging is None else self._prepare(run, self._staging)
            run = self._launch_all(run, template, now_s)
        except LaunchFailed as error:
            return self._refused(run, error, now_s)
        except KeyError:
            return self._finish(run, f"this machine does not know the user {run.user}", failed=True)
        self._pauses.over(_line(run.instance_type, run.market))
        self._save(run.model_copy(update={"state": "booting"}))
        return None

    def _prepare(self, run: BurstRun, staging: StagingBucket) -> str:
        """Write the links for the run's cloud runner and instance. Returns the launch template. Raises LaunchFailed,
        KeyError."""
        uid = pwd.getpwnam(run.user).pw_uid  # KeyError: no such user
        good_s = run.lifetime_s + LONGEST_S - self._longest_s
        mine = staging.links(run.id, INSTANCE, good_s) | {"get_alive": staging.alive_link(good_s)}
        template = self._regions.of(run.region).own_template(run.id, detached(self._settings, mine))
        file = self._cloud_runner_file(run)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.parent.chmod(0o711)
            _write_for(file, json.dumps(staging.links(run.id, CLOUD_RUNNER, good_s)), uid)
        except OSError as error:
            raise LaunchFailed(Kind.THROTTLED, "", f"{file}: {error}") from error  # this is not an error of EC2's
        return template

    @property
    def _longest_s(self) -> float:
        """Longest life of a detached run's instance. Its links must be valid from before its boot until its files are
        fetched."""
        return LONGEST_S - self._settings.boot_timeout_s - LINKS_S

    def _cloud_runner_file(self, run: BurstRun) -> Path:
        return self._settings.share / DETACHED / f"{run.job}.json"

    def _launch_all(self, run: BurstRun, template: str, now_s: float) -> BurstRun:
        """Launch the instances of all slots. After LaunchFailed, those launched so far are ended with the run."""
        fleet = self._regions.of(run.region)
        group = f"penstock-{run.id}" if len(run.slots) > 1 else ""
        if group:
            fleet.make_group(group)
        found: dict[str, DescribedInstance] = {}
        if run.id in self._resumed or self._tries.get(run.id):
            found = {seen.tags.get("node", ""): seen for seen in fleet.seen(run.id) if seen.state not in GONE}
        for index, slot in enumerate(run.slots):
            if slot.instance is not None:
                continue
            if (there := found.get(slot.node)) is not None:
                instance, launched_s = there.id, there.launched_s
            else:
                token = hashlib.sha256(f"{self._settings.site} {run.id} {index}".encode()).hexdigest()[:48]
                until_s = run.ordered_s + run.lifetime_s
                order = Order(
                    token, run.instance_type, run.market, run.tags(slot), run.usd_per_h, group, template, until_s
                )
                instance, launched_s = fleet.launch(order), now_s
            slots = list(run.slots)
            slots[index] = slot.model_copy(update={"instance": instance, "launched_s": launched_s})
            run = run.model_copy(update={"slots": tuple(slots)})
            self._save(run)
            self._looked_s = -1e18
            log.info("launched", extra={"job": run.job, "run": run.id, "instance": instance, "node": slot.node})
        return run

    def _refused(self, run: BurstRun, error: LaunchFailed, now_s: float) -> None:
        run = self._runs[run.id]
        settings = self._settings
        self._silent |= error.kind is Kind.LOST
        if error.kind in (Kind.THROTTLED, Kind.LOST) and now_s - run.ordered_s < ORDER_PATIENCE_S:
            self._tries[run.id] = self._tries.get(run.id, 0) + 1
            self._retry_s[run.id] = now_s + pause_s(self._tries[run.id], self._rng)
            log.info("asks EC2 again", extra={"run": run.id, "tries": self._tries[run.id], "text": str(error)})
            return
        line = _line(run.instance_type, run.market)
        match error.kind:
            case Kind.CAPACITY:
                self._pauses.rest(line, now_s, settings.capacity_back_off_s, str(error))
            case Kind.QUOTA:
                quota = _line(run.instance_type.split(".")[0], run.market)
                self._pauses.rest(quota, now_s, settings.quota_back_off_s, str(error))
                log.error(
                    "a quota is used up: ask AWS to raise it, or remove the type from [cloud]",
                    extra={"text": str(error)},
                )
            case Kind.CONFIG:
                self._protect(f"EC2 refuses the request that [cloud] describes: {error}")
            case _:
                pass
        self._finish(run, f"{error.kind}: {error}", failed=True)

    def _boot(self, run: BurstRun, job: Job | None, nodes: Mapping[str, CloudNode], now_s: float) -> None:
        if job is None:
            return self._finish(run, "its job is gone")
        if (lost := _lost(run)) is not None:
            return self._boot_failed(run, f"instance {lost} ended before it joined Slurm", now_s)
        up = all(name in nodes and nodes[name].up for name in run.nodes)
        if self._staging is not None and up:  # a gateway is always up; a detached instance reports its start itself
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
                reason = self._nodes.reason(run.job) or "it does not say why"
                return self._finish(run, f"Slurm did not start it: {reason}", failed=True)
            if self._has(run, "input") is False:  # it is still on its way, which is no fault of the image or the type
                why = f"its input had not arrived within {patience_s:.0f} s; declare its size with --data-size"
                return self._finish(run, why, failed=True)
            late = "did not join Slurm" if self._staging is None else "did not start on its input"
            return self._boot_failed(run, f"it {late} within {patience_s:.0f} s", now_s)
        if job.phase is Phase.RUNNING and _at(job, run):
            return None
        per_node = run.offer.gpus // run.offer.nodes
        shares = tuple(Share(name, per_node) for name in run.nodes)
        self._asks.append(Start(run.job, run.round, Placement(run.offer.gpu_type, run.partition, shares)))
        return None

    def _boot_failed(self, run: BurstRun, why: str, now_s: float) -> None:
        self._boot_failures += 1
        if self._boot_failures >= self._settings.protected_after:
            self._protect(
                f"{self._boot_failures} boots in a row failed, the last one: {why}; read the instance's console output"
            )
        self._pauses.rest(_line(run.instance_type, run.market), now_s, self._settings.capacity_back_off_s, why)
        self._finish(run, why, failed=True)

    def _watch(self, run: BurstRun, job: Job | None, now_s: float) -> None:
        if job is None:
            return self._finish(run, "its job has ended")
        if (lost := _lost(run)) is not None:
            taken = f"EC2 has taken instance {lost}"
            if self._has(run, "stopped"):
                return self._leave(run, taken)
            # Its cloud runner fetches the result, or S3 does not answer. Nothing is paid for while its links are valid.
            fetched = self._staging is not None and self._has(run, "result") is not False
            if fetched and (run.expires_s is None or now_s < run.expires_s + LINKS_S):
                return None
            return self._finish(run, taken, failed=True)
        if job.phase in (Phase.QUEUED, Phase.STARTING):
            return self._finish(run, "Slurm has put its job back into the queue", failed=True)
        if run.expires_s is not None and now_s >= run.expires_s - min(LEAD_S, run.lifetime_s / 2):
            return self._leave(run, f"the ${run.usd:.2f} committed to it are spent")
        if self._there(run, "stopped"):
            return self._leave(run, "EC2 takes its instance back within two minutes")
        try:
            notices = [name for name in run.nodes if (self._settings.share / NOTICES / name).exists()]
        except OSError as error:
            log.warning("notices of interruption cannot be read", extra={"run": run.id, "text": str(error)})
            notices = []
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
        nothing_comes = (over or lost) and (self._staging is None or self._handed_back(run) is False)
        if job is None or job.phase is Phase.QUEUED or nothing_comes or now_s - since_s > LEAVE_PATIENCE_S:
            return self._finish(run, run.why)
        if (
            over and not lost and self._seen is not None
        ):  # its output files are in S3, and are fetched without the instance
            self._terminate(run.region, [slot.instance for slot in run.slots if slot.instance is not None])
        if self._staging is not None and run.id not in self._fetched:
            if self._there(run, "fetched"):
                self._fetched.add(run.id)
            elif self._seen is not None:
                self._ask_staging(lambda staging: staging.stop(run.id))
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
        if self._silent:
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
            self._terminate(run.region, [*alive, *(id_ for id_ in unseen if id_ is not None)])
            self._seen = None  # earlier observations are out of date
            found = self._regions.of_run(run)
        run = self._regions.with_times(run, found, now_s)
        self._runs[run.id] = run
        if any(slot.instance is not None and slot.ended_s is None for slot in run.slots):
            return
        self._nodes.power_down(run.nodes)
        if mine and now_s - run.ordered_s < run.lifetime_s + LEAVE_PATIENCE_S:
            return  # Slurm still has these nodes allocated to it; until it is queued, it stays a run in the cloud
        run = self._tidy(run)
        for name in run.nodes:
            self._delete(self._settings.share / NOTICES / name)
        if run.ran:
            self._returned[run.job] = now_s
            if job is not None:
                self._queue_times[run.job] = returned(job, now_s)
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
            if self._staging is not None:
                self._regions.of(run.region).drop_template(run.id)
        except LaunchFailed as error:
            if error.kind is not Kind.CONFIG:
                raise
            log.warning("a leftover of the run stays", extra={"run": run.id, "text": str(error)})
        if self._staging is not None:
            self._delete(self._cloud_runner_file(run))
            if self._has(run, "fetched") or self._has(run, "output") is False:
                self._ask_staging(lambda staging: staging.clear(run.id))
            elif self._has(run, "output"):  # perhaps the only copy; the bucket's lifecycle rule deletes it eventually
                where = f"its output files were not fetched; they are in {self._staging.where(run.id)}"
                log.warning(
                    "the objects of a run stay in the bucket", extra={"run": run.id, "job": run.job, "text": where}
                )
                run = run.model_copy(update={"why": f"{run.why}; {where}"})
                self._words[run.job] = run.why
        return run

    def _there(self, run: BurstRun, what: str) -> bool:
        """Whether a detached run has written this object, as far as is known now. S3 is asked as often as EC2."""
        return self._seen is not None and self._has(run, what) is True

    def _has(self, run: BurstRun, what: str) -> bool | None:
        """Whether a detached run has written this object. None if S3 does not answer, or if the run is not detached."""
        return self._ask_staging(lambda staging: staging.has(run.id, what))

    def _handed_back(self, run: BurstRun) -> bool | None:
        """Whether a detached run has written all its output files. None if S3 does not answer."""
        told = [self._has(run, what) for what in ("stopped", "result")]
        return True if True in told else None if None in told else False

    def _ask_staging(self, ask: Callable[[StagingBucket], bool | None]) -> bool | None:
        """Ask S3. None if it does not answer, which is only logged: an error of S3 must not prevent instances from being
        ended."""
        if self._staging is None or self._staging_silent:
            return None
        try:
            return ask(self._staging)
        except LaunchFailed as error:
            self._staging_silent = error.kind is Kind.LOST
            self._away = f"S3 refuses the objects that instances need: {error}"
            log.warning("S3 is away", extra={"text": str(error)})
            return None

    # --- listings, and instances without a run

    def _look(self, now_s: float) -> None:
        busy = any(run.state in ("booting", "leaving") for run in self._runs.values())
        if now_s - self._looked_s < (min(SOON_S, self._settings.reconcile_s) if busy else self._settings.reconcile_s):
            self._seen = None
            return
        seen = self._regions.listing(self._runs.values())
        try:
            self._zones = tuple(self._regions.home.zones().values())
        except LaunchFailed as error:
            seen = dataclasses.replace(seen, trouble=f"EC2 does not describe the subnets: {error}")
        self._seen, self._away, self._silent = seen, seen.trouble, seen.lost
        if not seen.trouble:
            self._looked_s = now_s
        if seen.stripped - self._stripped:
            facts = {"instances": ",".join(sorted(seen.stripped))}
            log.error("instances have lost the tag penstock:site; they are ended with their runs", extra=facts)
        self._stripped = seen.stripped
        self._ask_staging(lambda staging: staging.say_alive(now_s))

    def _refreshed(self, run: BurstRun) -> BurstRun:
        """The run with its instances as listed in this tick. Unchanged if this tick had no listing."""
        if self._seen is None or run.region not in self._seen.heard or self._silent:
            return run
        try:
            new = self._regions.with_times(run, self._seen.found, self._clock.now_s())
        except LaunchFailed as error:
            log.warning("EC2 does not answer", extra={"run": run.id, "text": str(error)})
            return run
        if new != run:
            self._save(new)
        return new

    def _sweep(self, now_s: float) -> None:
        """End instances that have the site's tag but belong to no run, and add their cost to the ledger."""
        if self._seen is None or self._silent:
            return
        claimed = {slot.instance for run in self._runs.values() for slot in run.slots}
        for seen in self._seen.found.values():
            run_id = seen.tags.get("run", "")
            open_run = self._runs.get(run_id)
            if seen.id in claimed or (open_run is not None and open_run.state in ("ordered", "ending")):
                continue
            if seen.state in GONE:
                if seen.id not in self._settled and seen.ended_s is not None:
                    line = _unpaid(seen, self._billed(seen.tags.get("job", ""), seen.id))
                    if line is not None:
                        self._charge(line)
                    self._settled.add(seen.id)
                continue
            log.warning("instance without a run is ended", extra={"instance": seen.id, "run": run_id})
            try:
                self._terminate(seen.region, [seen.id])
            except LaunchFailed as error:
                log.warning("EC2 refuses", extra={"instance": seen.id, "text": str(error)})
                if error.kind is Kind.LOST:
                    return

    def _terminate(self, region: str, ids: Sequence[str]) -> None:
        """End instances. Raises LaunchFailed; a refusal also begins protected mode, since what cannot be ended costs money."""
        self._looked_s = -1e18
        try:
            self._regions.of(region).terminate(ids)
        except LaunchFailed as error:
            if error.kind not in (Kind.LOST, Kind.THROTTLED):
                self._protect(f"EC2 refuses to end {', '.join(ids)} in {region}, which go on costing money: {error}")
            raise

    def _billed(self, job: str, instance: str) -> Slot | None:
        """The slot of an ended run of this job that was charged for this instance."""
        rows = self._store.cloud_runs(job=job)
        slots = [slot for row in rows for slot in BurstRun.model_validate_json(row.record).slots]
        return next((slot for slot in slots if slot.instance == instance), None)

    # --- offers

    def _make_offers(self, nodes: Iterable[CloudNode], now_s: float) -> tuple[Offer, ...]:
        self._offers = {}
        catalogue = self._catalogue()
        if catalogue is None or self._store.control(PROTECTED) is not None or self._away:
            return ()
        if self._old_prices(now_s) is not None:
            return ()
        taken = {name for run in self._runs.values() for name in run.nodes}
        room = [node for node in nodes if node.name not in taken]
        left = self._settings.max_runs - len(self._runs)
        for instance_type in self._settings.instance_types:
            kind = catalogue.types.get(instance_type)
            free = sum(_suits(node, kind) for node in room)
            for market in self._settings.markets:
                rests = (_line(instance_type, market), _line(instance_type.split(".")[0], market))
                price = catalogue.usd_per_h(instance_type, market, self._zones)
                if (
                    kind is None
                    or price is None
                    or price <= 0
                    or any(self._pauses.rests(what, now_s) for what in rests)
                ):
                    continue
                for size in SIZES if self._staging is None else SIZES[:1]:
                    if free >= size and left > 0:
                        name = _line(instance_type, market) if size == 1 else f"{size}x {_line(instance_type, market)}"
                        count, gpus = min(free // size, left), size * kind.gpus
                        offer = Offer(name, kind.gpu_type, size, gpus, size * price, count, self._settings.boot_s)
                        self._offers[name] = offer, instance_type, market
        return tuple(offer for offer, _, _ in self._offers.values())

    def _old_prices(self, now_s: float) -> str | None:
        catalogue = self._catalogue()
        today = datetime.fromtimestamp(now_s, UTC).date()
        return None if catalogue is None else catalogue.expired(today, self._settings.price_days)

    def _catalogue_type(self, instance_type: str) -> InstanceType | None:
        catalogue = self._catalogue()
        return None if catalogue is None else catalogue.types.get(instance_type)

    def _closed(self, now_s: float) -> tuple[str, ...]:
        told = [
            f"{what} is paused for another {self._pauses.until_s[what] - now_s:.0f} s: {words}"
            for what, words in self._pauses.words.items()
            if self._pauses.rests(what, now_s)
        ]
        protected = self._store.control(PROTECTED)
        if protected is not None:
            told.insert(0, f"nothing is launched until an admin runs `penstock cloud resume`: {protected}")
        if self._stripped:
            told.append(
                f"{', '.join(sorted(self._stripped))} have lost the tag penstock:site, so they are found only by their runs; "
                "set the tag again"
            )
        told += [text for text in (self._old_prices(now_s), self._away) if text]
        return tuple(told)

    def _protect(self, why: str) -> None:
        if self._store.control(PROTECTED) == why:
            return
        log.error("protected mode: nothing more is launched", extra={"text": why})
        self._store.set_control(PROTECTED, why)

    # --- Slurm's requests

    def _sign_of_life(self) -> None:
        try:
            self._settings.share.mkdir(parents=True, exist_ok=True)
            (self._settings.share / ALIVE).touch()
        except OSError as error:
            log.warning("the daemon's sign of life for cloud nodes cannot be written", extra={"text": str(error)})

    def _hear_slurm(self) -> None:
        """Handle the requests of Slurm's resume and suspend programs."""
        known = {name: run for run in self._runs.values() for name in run.nodes}
        for kind in ("resume", "suspend"):
            try:
                files = sorted({*(self._settings.share / kind).glob("*.json")} - self._undeleted)
            except OSError as error:
                log.warning("Slurm's requests for cloud nodes cannot be read", extra={"text": str(error)})
                return
            for file in files:
                try:
                    asked = json.loads(file.read_text(encoding="utf-8"))
                    jobs = {self._nodes.job_of(number): names for number, names in asked["jobs"].items()}
                    nodes = [str(name) for name in asked["nodes"]]
                except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    log.warning("unreadable request is dropped", extra={"file": str(file), "text": str(error)})
                    self._delete(file)
                    continue
                if kind == "resume":
                    self._send_back(jobs, nodes, known)
                else:
                    for run in {known[name].id: known[name] for name in nodes if name in known}.values():
                        if run.state in ("booting", "running"):
                            self._finish(run, "Slurm has suspended its nodes")
                self._delete(file)

    def _delete(self, file: Path) -> None:
        """Delete a request from the share, or else never read it again: by then, its nodes may belong to other jobs."""
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self._undeleted.add(file)
            log.warning("cannot be deleted", extra={"file": str(file), "text": str(error)})

    def _send_back(
        self, jobs: Mapping[JobId, Sequence[str]], nodes: Sequence[str], known: Mapping[str, BurstRun]
    ) -> None:
        """Refuse jobs on nodes that were not ordered for them."""
        strangers = [
            job for job, names in jobs.items() if any(name not in known or known[name].job != job for name in names)
        ]
        unasked = [name for name in nodes if name not in known]
        if strangers or unasked:
            facts = {"nodes": ",".join(nodes), "jobs": ",".join(strangers)}
            log.warning("jobs on cloud nodes that were not ordered for them", extra=facts)
        for job in strangers:
            self._nodes.refuse(job, UNASKED)
        self._nodes.power_down(unasked)

    def _refuse_strangers(self) -> None:
        """Refuse jobs on another job's instances. Slurm does not request a node that is up already."""
        owners = {name: run.job for run in self._runs.values() for name in run.nodes}
        for job, names in self._nodes.jobs_on_instances().items():
            if any(owners.get(name, job) != job for name in names):
                self._nodes.refuse(job, UNASKED)

    def _learn(self, now_s: float) -> None:
        if now_s - self._read_s < HISTORY_S:
            return
        self._read_s = now_s
        self._past = [view for _, view in reversed(self._store.jobs(states=("ended",), limit=NEWEST))]
        self._waiting = self._policy(self._past)

    def _policy(self, past: Sequence[JobView]) -> WaitingPolicy:
        settings = self._settings
        prior = Averages(1.0, settings.mean_runtime_h, settings.mean_gpus)
        return by_budget(
            Wait(settings.wait),
            settings.waiting_budget_percent,
            averages(past, prior),
            short_h=settings.short_h,
            t_max_h=settings.t_max_h,
            patience=settings.patience,
        )

    # --- the store

    def _save(self, run: BurstRun, *lines: LedgerLine) -> None:
        over = run.state == "over"
        ended_s = self._clock.now_s() if over else None
        row = CloudRunRow(run.id, run.job, run.state, run.ordered_s, ended_s, run.model_dump_json())
        self._store.save_cloud_run(row, lines)
        self._lines.extend(lines)
        self._runs[run.id] = run
        if over:
            del self._runs[run.id]
            for table in (self._tries, self._retry_s, self._leaving_s):
                table.pop(run.id, None)
            self._fetched.discard(run.id)

    def _charge(self, line: LedgerLine) -> None:
        self._store.charge([line])
        if all(line.key != known.key for known in self._lines):
            self._lines.append(line)


def _write_for(file: Path, text: str, uid: int) -> None:
    """Write a file that only this user may read. Raises OSError."""
    beside = file.with_suffix(".new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
        if os.geteuid() == 0:
            os.fchown(descriptor, uid, -1)
    beside.rename(file)


def _line(what: str, market: str) -> str:
    """A type or family on a market, as messages and offers name it."""
    return what if market == "on-demand" else f"{what} spot"


def _suits(node: CloudNode, kind: InstanceType | None) -> bool:
    return (
        kind is not None
        and node.free
        and (node.gpu_type, node.gpus) == (kind.gpu_type, kind.gpus)
        and node.cpus <= kind.vcpus
        and node.memory_mb <= kind.memory_mib
    )


def _at(job: Job, run: BurstRun) -> bool:
    """Whether the job holds, or is about to hold, nodes of the run."""
    return job.allocation is not None and {share.node for share in job.allocation.shares} <= set(run.nodes)


def _lost(run: BurstRun) -> str | None:
    return next((slot.instance for slot in run.slots if slot.ended_s is not None), None)


def _unpaid(seen: DescribedInstance, billed: Slot | None) -> LedgerLine | None:
    """The charge for an instance that has ended and belongs to no open run. None if it is paid for.

    An instance that EC2 did not list for long was charged as if it had lived until then. The surplus is credited.
    """
    tags = seen.tags
    usd_per_h = float(tags.get("usd_per_h", "0"))
    seconds = max((seen.ended_s or seen.launched_s) - seen.launched_s, 0.0)
    usd, text = cost_usd(seconds, usd_per_h), f"for {seen.id} {seconds:.0f} s of {seen.instance_type}"
    if billed is None:
        text = f"{text}, which belonged to no run"
    elif billed.missed >= MISSED:
        usd -= cost_usd(billed.seconds, usd_per_h)
        text = f"{text}, which EC2 did not list, in place of {billed.seconds:.0f} s"
    else:
        return None
    return LedgerLine(
        id=0,
        key=f"cloud:orphan-{seen.id}:usd",
        time_s=seen.ended_s or seen.launched_s,
        account=tags.get("account", ""),
        user=tags.get("user", ""),
        job=tags.get("job", ""),
        kind="usd",
        amount=usd,
        text=text,
    )
