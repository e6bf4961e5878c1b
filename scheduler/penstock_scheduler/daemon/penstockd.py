"""penstockd: runs the round loop on a real cluster.

It may be killed at any moment and started again. What runs is in the cluster, the plan is in the store, and what is left to do
follows from the two.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_profiles.catalogue import CatalogueError
from penstock_profiles.families import load_families
from penstock_scheduler import __version__
from penstock_scheduler.accounts.limits import LimitSettings
from penstock_scheduler.accounts.rules import BudgetSettings, SchedulingRules
from penstock_scheduler.api.ports import Clock, ClusterParts, Leadership, ModelSource, RoundListener, Store
from penstock_scheduler.burst.deciding.choices import check_cloud
from penstock_scheduler.daemon.candidate import StandingBy, candidate
from penstock_scheduler.daemon.live import LiveScheduler, SiteModels, make_decider, make_trigger
from penstock_scheduler.daemon.notices import NoticeSettings, Notifier
from penstock_scheduler.daemon.plugins import load_cloud, open_cloud, open_cluster
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.board import Board, ObservedCluster
from penstock_scheduler.daemon.service.estimator import Estimator
from penstock_scheduler.daemon.service.reconciling import Reconciler
from penstock_scheduler.daemon.service.samples import Sampler
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.daemon.service.vitals import Vitals
from penstock_scheduler.daemon.service.waits import WaitLog
from penstock_scheduler.daemon.watcher import Watcher
from penstock_scheduler.jobs.kin import KinOfJobs
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.pairs import PAIRS, open_pairs, read_prior
from penstock_scheduler.jobs.sensitivities import LEARNED, Sensitivities
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError, PenstockError, RoundFailed
from penstock_scheduler.people.logs import configure_logging, sd_notify
from penstock_scheduler.people.safe_text import guard
from penstock_scheduler.rounds.loop import RoundLoop, RoundSurroundings, RoundTiming
from penstock_scheduler.rounds.one_thread import one_blas_thread
from penstock_scheduler.rounds.plan_gate import Approval, SafetySettings
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import DaemonSettings, Settings, load_settings
from penstock_scheduler.safety import open_files
from penstock_scheduler.safety.health import HealthSettings
from penstock_scheduler.simulator.estimates import EstimatesOrder
from penstock_scheduler.store.backup import RESTORED
from penstock_scheduler.store.disks import DiskCheck, spool_check, store_check
from penstock_scheduler.store.leadership.lease import ALONE, Leaving
from penstock_scheduler.store.leadership.site_clock import SITE_CLOCK
from penstock_scheduler.store.opening import is_server
from penstock_scheduler.store.sql import SqlStore, open_store

if TYPE_CHECKING:
    from penstock_scheduler.daemon.service.publisher import Publisher
    from penstock_scheduler.daemon.service.server import Service

import threading

from penstock_scheduler.store.leadership.site_clock import site_time_s

log = logging.getLogger(__name__)

STANDS_BY = 75
"""Exit status of a penstockd that leads no longer. systemd starts it again, and it stands by."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0 stopped when asked, 1 cannot run, 2 wrong settings or usage, 75 leads no longer."""
    parser = argparse.ArgumentParser(prog="penstockd", description="Decides, every round, which job gets which GPUs.")
    parser.add_argument("--config", type=Path, default=Path("/etc/penstock/penstock.toml"), help="settings file (TOML)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the settings and what they name, observe the cluster once, then exit",
    )
    parser.add_argument("--version", action="version", version=f"penstockd {__version__}")
    arguments = parser.parse_args(argv)
    guard()
    try:
        settings = load_settings(arguments.config)
        daemon = settings.section(DaemonSettings)
        if arguments.check:
            return _check(settings)
        with one_blas_thread():
            return _run(arguments.config, settings, daemon)
    except ConfigError as error:
        print(f"penstockd: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except PenstockError as error:
        print(f"penstockd: {error}", file=sys.stderr)  # noqa: T201
        return 1


class _Signals:
    """SIGTERM and SIGINT stop the daemon after the present tick; SIGHUP reloads the settings after it."""

    def __init__(self, clock: WallClock) -> None:
        self.stop = False
        self._reload = False
        self._clock = clock
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        # Python's own handlers run between two instructions of the main thread. A solver may keep it for 20 s.
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, self._on_hangup)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)

    def take_reload(self) -> bool:
        """Whether to reload the settings now."""
        wanted, self._reload = self._reload, False
        return wanted

    def hurry(self) -> None:
        """Let the loop see at once that it should end."""
        self._clock.wake()
        self._waker.send(b"\0")

    def wait(self) -> None:
        """Wait until the daemon should end, in a thread of its own."""
        while self._woken.recv(1)[0] == signal.SIGHUP:
            pass

    def _on_stop(self, number: int, frame: object) -> None:
        self.stop = True
        self._clock.wake()

    def _on_hangup(self, number: int, frame: object) -> None:
        self._reload = True


def _run(path: Path, settings: Settings, daemon: DaemonSettings) -> int:
    """Run until stopped. Returns the exit status.

    1. Open the store. On a database server, stand by until this penstockd leads. A file has one penstockd.
    2. Lead.
    """
    clock = WallClock()
    signals = _Signals(clock)
    open_files.raise_limit()
    configure_logging(daemon.log_format, writes=daemon.log_writes)
    lease = None
    if daemon.store is not None and is_server(daemon.store):
        waiting = StandingBy(daemon.store, candidate(daemon, settings.section(ApiSettings)))
        from penstock_scheduler.daemon.standing_by import stand_by  # needs the extra `service`

        _prepare(settings, clock)
        lease = stand_by(waiting, settings, lambda: signals.stop)
        if lease is None:
            log.info("stopped", extra={"why": "asked to"})
            return 0
        lease.tell_time(SITE_CLOCK.ask)
    store = open_store(
        daemon.store or daemon.state_dir,
        writer=True,
        leadership=lease,
        keep_rounds=daemon.keep_rounds,
        keep_days=daemon.keep_days,
        keep_audit_days=daemon.keep_audit_days,
    )
    return _lead(make_site(path, settings, clock, store), signals, clock)


def _lead(site: LiveScheduler, signals: _Signals, clock: WallClock) -> int:
    """Lead until a signal says stop, an admin hands over, or the term is lost.

    1. Open the API if it is enabled.
    2. Tick. After each tick: sign of life to systemd, notices, reload.
    3. Give the lead up, and close in the opposite order. If others may lead, this does not wait for a long observation or
       decision: whatever comes of that is not written any more.
    """
    settings, store, handover = site.settings, site.store, site.handover
    handover.hurry = signals.hurry
    api = settings.section(ApiSettings)
    service, publisher = make_service(site) if api.enabled else (None, None)
    if publisher is not None:
        publisher.start()
    if service is not None:
        service.start()
    site.vitals.start()
    estimator = _estimator(site)
    if estimator is not None:
        estimator.start()

    def leave() -> None:
        store.leadership.close(handover.successor)
        if service is not None:
            service.stop()

    leaving = Leaving(site.loop.health, leave)
    if store.leadership.fenced:
        leaving.start(signals.wait)

    def on_tick() -> None:
        sd_notify("WATCHDOG=1")
        try:
            site.watcher.check(site.loop.failing_s, site.loop.failure)
            site.watcher.check_cloud(site.loop.cloud_protected)
            site.watcher.check_cloud_troubles(site.loop.cloud_troubles)
            site.watcher.check_cloud_stops(site.loop.cloud_stops)
            for disk in site.vitals.disk_states(clock.now_s()):
                site.watcher.check_disk(*disk)
            site.settle()
        except Exception:  # a notice that cannot be sent must not end the rounds
            log.exception("notices failed unexpectedly; please report this as a bug")
        if signals.take_reload():
            site.reload()

    log.info(
        "started",
        extra={
            "version": __version__,
            "settings": settings.source,
            "policy": str(settings.policy),
            "fencing": store.leadership.number,
        },
    )
    sd_notify("READY=1")
    site.loop.run(lambda: signals.stop or handover.wanted or bool(store.leadership.lost), on_tick)
    sd_notify("STOPPING=1" if signals.stop else "STATUS=hands over")
    leaving.now()
    if estimator is not None:
        estimator.stop()
    if publisher is not None:
        publisher.stop()
    site.vitals.stop()
    site.watcher.notifier.stop()
    store.close()
    if signals.stop:
        log.info("stopped", extra={"why": "asked to"})
        return 0
    log.info("stopped", extra={"why": store.leadership.lost or "handed over; the next start stands by"})
    return STANDS_BY


def _prepare(settings: Settings, clock: Clock) -> None:
    """Load what a leader needs, and check the settings, so that a takeover is quick and does not fail. Raises ConfigError."""
    daemon = settings.section(DaemonSettings)
    parts, _, _ = _open(settings, clock)
    make_decider(settings.policy, parts.agents)
    read_prior(daemon.pairs)
    if daemon.cloud is not None:
        load_cloud(daemon.cloud)


def _estimator(site: LiveScheduler) -> Estimator | None:
    """What estimates when jobs start and end; None: the settings want none, or there is no API that would show it."""
    daemon = site.settings.section(DaemonSettings)
    if daemon.estimate_cores == 0 or not site.settings.section(ApiSettings).enabled:
        return None
    order = EstimatesOrder(
        store=site.store_place,
        cores=daemon.estimate_cores,
        every_s=daemon.round_s,
        restart_cost_s=daemon.restart_cost_s,
        families=None if daemon.families is None else daemon.families.absolute(),
    )
    return Estimator(order, site.board)


def _check(settings: Settings) -> int:
    from penstock_scheduler.daemon.reaching import faults, valid_until_s  # a start needs none of it

    daemon = settings.section(DaemonSettings)
    make_policy(settings.policy)
    table = read_prior(daemon.pairs)
    parts, _, _ = _open(settings, WallClock())
    make_decider(settings.policy, parts.agents)
    if daemon.cloud is not None:
        load_cloud(daemon.cloud)
    wrong = faults(settings)
    try:
        state = parts.cluster.observe()
    except RoundFailed as error:
        wrong.append(f"[daemon] cluster: {error}")
    if wrong:
        print("\n".join(f"penstockd: {text}" for text in wrong), file=sys.stderr)  # noqa: T201
        return 1
    types = sorted({node.gpu_type for node in state.nodes})
    gpus = sum(node.gpus for node in state.nodes)
    print(f"settings: ok ({settings.source})")  # noqa: T201
    print(f"cluster: {len(state.nodes)} nodes, {gpus} GPUs of {', '.join(types)}; {len(state.jobs)} jobs to manage")  # noqa: T201
    if (api := settings.section(ApiSettings)).tls_certificate is not None and api.tls_key is not None:
        end = datetime.fromtimestamp(valid_until_s(api.tls_certificate, api.tls_key), UTC)
        print(f"certificate: {api.tls_certificate} expires on {end:%Y-%m-%d}")  # noqa: T201
    if daemon.cloud is not None:
        print("cloud: `penstock cloud doctor` asks it")  # noqa: T201
    if table is not None:
        strange = [name for name in types if name not in table.gpu_types]
        lacks = f"; it has none on {', '.join(strange)}" if strange else ""
        print(f"pairs: {daemon.pairs} has some on {', '.join(table.gpu_types)}{lacks}")  # noqa: T201
    for refusal in state.refused:
        print(f"job {refusal.job} ({refusal.user}) is refused: {refusal.text}")  # noqa: T201
    return 0


def make_loop(
    settings: Settings,
    clock: Clock,
    store: Store,
    parts: ClusterParts,
    models: ModelSource,
    site: RoundSurroundings | None = None,
    settle_s: float = 0.0,
) -> RoundLoop:
    """The round loop that these settings describe, on this cluster; they add to `site`. Raises ConfigError."""
    daemon, site = settings.section(DaemonSettings), site or RoundSurroundings()
    table = read_prior(daemon.pairs)
    pairs = () if parts.agents is None else (open_pairs(daemon.state_dir / PAIRS, table),)
    cloud = None if daemon.cloud is None else open_cloud(daemon.cloud, settings, clock, store, parts.cloud_nodes)
    policy, choice = make_decider(settings.policy, parts.agents)
    timing = RoundTiming(make_trigger(daemon), daemon.tick_s, settle_s=settle_s)
    safety = settings.section(SafetySettings)
    complete = replace(site, annotators=(*site.annotators, *pairs), cloud=cloud, safety=safety)
    return RoundLoop(parts, clock, store, timing, policy, models, choice, complete)


def make_site(path: Path, settings: Settings, clock: Clock, store: SqlStore) -> LiveScheduler:
    """The round loop that these settings describe, watched by a board. Raises ConfigError."""
    parts, specs, sensitivities = _open(settings, clock, store.leadership)
    notifier = Notifier(settings.section(NoticeSettings))
    board = Board(store, parts.submitter, notifier.job_ended)
    watcher = Watcher(notifier, board, parts.node_events)
    rules = SchedulingRules(
        settings.section(BudgetSettings), settings.section(LimitSettings), store, watcher.budget_reached
    )
    models = _models(settings, store, specs, sensitivities)
    restored = _is_restored(store)
    loop = make_loop(
        settings,
        clock,
        store,
        replace(parts, cluster=ObservedCluster(parts.cluster, board, models.learn)),
        models.learned,
        RoundSurroundings(
            rules=rules,
            annotators=(board.results,),
            leadership=store.leadership,
            listeners=(board, *_logs(store, parts), models.sampler, watcher),
        ),
        settle_s=settings.section(SafetySettings).grace_s if restored else 0.0,
    )
    vitals = Vitals(
        settings.section(HealthSettings),
        settings.section(DaemonSettings).round_s,
        loop,
        _disks(store, parts, clock),
        board,
        store.leadership,
    )
    site = LiveScheduler(path, settings, store, parts, loop, rules, board, watcher, vitals, models, restored=restored)
    _take_up(site)
    return site


def _models(settings: Settings, store: SqlStore, specs: SpecModels, sensitivities: Sensitivities) -> SiteModels:
    daemon = settings.section(DaemonSettings)
    kin = KinOfJobs(store, specs.beginning, recalls=daemon.recall_models)
    learned = LearnedModels(specs, store, sensitivities, kin.of if kin.recalls else None, store.last_round())
    return SiteModels(specs, sensitivities, kin, learned, Sampler(store, daemon))


def _is_restored(store: SqlStore) -> bool:
    """Whether the store was restored from a backup, and no loop has acted since."""
    if store.control(RESTORED) is None:
        return False
    text = "Penstock only looks at first, and acts after [safety] grace_s"
    log.warning("the store was restored from a backup", extra={"text": text})
    return True


def _logs(store: SqlStore, parts: ClusterParts) -> tuple[RoundListener, ...]:
    """What writes jobs' allocations and waits to the store, and corrects them where the cluster's accounts know better."""

    def cloud_nodes() -> list[str]:
        return [] if parts.cloud_nodes is None else [node.name for node in parts.cloud_nodes.nodes()]

    allocations, waits = AllocationLog(store, parts.gpu_ids, cloud_nodes), WaitLog(store)
    if parts.submitter is None or parts.accounts is None:
        return allocations, waits
    return allocations, waits, Reconciler(store, parts.submitter, parts.accounts, cloud_nodes, allocations)


def _disks(store: SqlStore, parts: ClusterParts, clock: Clock) -> list[DiskCheck]:
    spool = [] if parts.spool is None else [spool_check(parts.spool, clock.now_s)]
    return [store_check(store, clock.now_s), *spool]


def _take_up(site: LiveScheduler) -> None:
    """Take up what admins had chosen before the restart."""
    if (kept := site.store.control("policy")) is not None:
        site.restore_policy(PolicyChoice.model_validate(kept, extra="ignore"))
    site.loop.paused = bool(site.store.control("paused"))
    if site.loop.gate is not None and (approval := site.store.control("approval")) is not None:
        site.loop.gate.approval = Approval.model_validate(approval, extra="ignore")


def make_service(site: LiveScheduler) -> tuple[Service, Publisher | None]:
    """The API over what the site's loop sees, and what publishes that to an API in a process of its own. Raises ConfigError."""
    try:
        from penstock_scheduler.daemon.service.app import make_app
        from penstock_scheduler.daemon.service.forwarding import PublishFirst
        from penstock_scheduler.daemon.service.port import Chosen
        from penstock_scheduler.daemon.service.publisher import Publisher
        from penstock_scheduler.daemon.service.server import Service, let_read
    except ModuleNotFoundError as error:
        raise ConfigError(f"[api] {error}; install Penstock with its extra `service`, or set enabled = false") from None
    daemon, api = site.settings.section(DaemonSettings), site.settings.section(ApiSettings)

    def check(spec: JobSpec) -> None:
        """Raises BadJobSpec for a job spec that this site refuses at submission."""
        site.models.specs.check(spec)
        check_cloud(spec, has_cloud=daemon.cloud is not None)

    app = make_app(
        api,
        site.board,
        site,
        # The loop has its own, in its thread.
        SpecModels(
            load_families(daemon.families),
            daemon.restart_cost_s,
            sensitivities=site.models.sensitivities,
            check_claims=daemon.check_claims,
        ),
        check,
        site.models.learn,
    )
    if api.embedded:
        return Service(api, app, site.board), None
    let_read(site.store, api)
    gatekeeper = app.state.api.gatekeeper
    publisher = Publisher(site.board, lambda: Chosen.of(site), lambda: gatekeeper.changes)
    app.add_middleware(PublishFirst, publish=publisher.publish)
    return Service(api, app, site.board, private=True), publisher


def _open(
    settings: Settings, clock: Clock, leadership: Leadership = ALONE
) -> tuple[ClusterParts, SpecModels, Sensitivities]:
    daemon = settings.section(DaemonSettings)
    try:
        families = load_families(daemon.families)
    except CatalogueError as error:
        raise ConfigError(f"[daemon] families: {error}") from None
    sensitivities = Sensitivities(daemon.sensitivities, daemon.state_dir / LEARNED)
    models = SpecModels(families, daemon.restart_cost_s, sensitivities=sensitivities, check_claims=daemon.check_claims)
    return open_cluster(daemon.cluster, settings, clock, models.check, leadership), models, sensitivities


class WallClock:
    """The site's time; `wake` ends a sleep early."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def now_s(self) -> float:
        """Seconds since 1970."""
        return site_time_s()

    def sleep(self, seconds: float) -> None:
        """Wait, until woken at the latest."""
        self._woken.wait(seconds)

    def wake(self) -> None:
        """End this sleep and all later ones at once, because the process is about to stop."""
        self._woken.set()


if __name__ == "__main__":
    sys.exit(main())
