"""penstockd: runs the round loop on a real cluster.

It may be killed at any moment and started again: what runs is in the cluster, the plan is in the store, and what is left
to do follows from the two.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock_profiles.catalogue import CatalogueError
from penstock_profiles.families import load_families
from penstock_profiles.nvml import OF_PROGRAMS
from penstock_profiles.wire import Report
from penstock_scheduler import __version__
from penstock_scheduler.clock import WallClock
from penstock_scheduler.errors import ConfigError, PenstockError, StoreError
from penstock_scheduler.limits import LimitSettings
from penstock_scheduler.loop import RoundLoop
from penstock_scheduler.messages import BudgetView, JobView
from penstock_scheduler.model import BudgetLine, Snapshot
from penstock_scheduler.models import LearnedModels, SpecModels
from penstock_scheduler.notices import Kind, Notice, NoticeSettings, Notifier
from penstock_scheduler.pairs import PAIRS, open_pairs, read_prior
from penstock_scheduler.policies import make_policy, sharing_parts
from penstock_scheduler.policy_choice import PolicyChoice
from penstock_scheduler.ports import (
    Agents,
    Burst,
    Clock,
    CloudNodes,
    ClusterParts,
    ModelSource,
    Policy,
    SpecCheck,
    Store,
    Trigger,
)
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.rules import BudgetSettings, SchedulingRules
from penstock_scheduler.sensitivities import LEARNED, Sensitivities
from penstock_scheduler.service.board import Board, ObservedCluster
from penstock_scheduler.service.settings import ApiSettings
from penstock_scheduler.settings import DaemonSettings, Settings, load_settings
from penstock_scheduler.store import SqlStore, open_store
from penstock_scheduler.triggers import OnEvent, Period
from penstock_scheduler.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.service.server import Service

CLUSTERS = "penstock.clusters"
CLOUDS = "penstock.clouds"

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0 stopped when asked, 1 cannot run, 2 wrong settings or usage."""
    parser = argparse.ArgumentParser(prog="penstockd", description="Decides, every round, which job gets which GPUs.")
    parser.add_argument("--config", type=Path, default=Path("/etc/penstock/penstock.toml"), help="settings file (TOML)")
    parser.add_argument("--check", action="store_true", help="check the settings and the cluster's answer, then exit")
    parser.add_argument("--version", action="version", version=f"penstockd {__version__}")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(arguments.config)
        daemon = settings.section(DaemonSettings)
        return _check(settings) if arguments.check else _run(arguments.config, settings, daemon)
    except ConfigError as error:
        print(f"penstockd: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except PenstockError as error:
        print(f"penstockd: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _run(path: Path, settings: Settings, daemon: DaemonSettings) -> int:
    stop = reload = False
    clock = WallClock()

    def on_signal(number: int, frame: object) -> None:
        nonlocal stop
        stop = True
        clock.wake()

    def on_hangup(number: int, frame: object) -> None:
        nonlocal reload
        reload = True

    def on_tick() -> None:
        nonlocal reload
        sd_notify("WATCHDOG=1")
        try:
            site.watch()
        except Exception:  # a notice that cannot be told must not end the rounds
            log.exception("notices failed unexpectedly; please report this as a bug")
        if reload:
            reload = False
            site.reload()

    signal.signal(signal.SIGHUP, on_hangup)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    store = open_store(
        daemon.store or daemon.state_dir, writer=True, keep_rounds=daemon.keep_rounds, keep_days=daemon.keep_days
    )
    api = settings.section(ApiSettings)
    configure_logging(daemon.log_format)
    site = make_site(path, settings, clock, store)
    service = make_service(site, clock) if api.enabled else None
    if service is not None:
        service.start()
    log.info("started", extra={"version": __version__, "settings": settings.source, "policy": str(settings.policy)})
    sd_notify("READY=1")
    site.loop.run(lambda: stop, on_tick)
    sd_notify("STOPPING=1")
    if service is not None:
        service.stop()
    site.notifier.stop()
    store.close()
    log.info("stopped", extra={"why": "asked to"})
    return 0


def _check(settings: Settings) -> int:
    daemon = settings.section(DaemonSettings)
    make_policy(settings.policy)
    table = read_prior(daemon.pairs)
    parts, _, _ = _open(settings, WallClock())
    _decider(settings.policy, parts.agents)
    state = parts.cluster.observe()
    types = sorted({node.gpu_type for node in state.nodes})
    gpus = sum(node.gpus for node in state.nodes)
    print(f"settings: ok ({settings.source})")  # noqa: T201
    print(f"cluster: {len(state.nodes)} nodes, {gpus} GPUs of {', '.join(types)}; {len(state.jobs)} jobs to manage")  # noqa: T201
    if table is not None:
        strange = [name for name in types if name not in table.gpu_types]
        lacks = f"; it has none on {', '.join(strange)}" if strange else ""
        print(f"pairs: {daemon.pairs} has some on {', '.join(table.gpu_types)}{lacks}")  # noqa: T201
    for refusal in state.refused:
        print(f"job {refusal.job} ({refusal.user}) is refused: {refusal.text}")  # noqa: T201
    return 0


XID_AGAIN_S = 86400.0
"""An error of a GPU that comes again and again is told once in so long."""


def make_loop(
    settings: Settings,
    clock: Clock,
    store: Store,
    parts: ClusterParts,
    models: ModelSource,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    rules: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
    overspent: Callable[[str, float, float], BudgetLine | None] = lambda account, usd, now_s: None,
) -> RoundLoop:
    """The round loop that these settings describe, on this cluster. Raises ConfigError."""
    daemon = settings.section(DaemonSettings)
    site_rules = rules
    table = read_prior(daemon.pairs)
    if parts.agents is not None:
        pairs = open_pairs(daemon.state_dir / PAIRS, table)

        def rules(snapshot: Snapshot) -> Snapshot:
            return pairs.on(site_rules(snapshot))

    policy, choice = _decider(settings.policy, parts.agents)
    return RoundLoop(
        parts,
        clock,
        store,
        _trigger(daemon),
        policy,
        models,
        tick_s=daemon.tick_s,
        choice=choice,
        rules=rules,
        cloud=open_cloud(daemon.cloud, settings, clock, store, parts.cloud_nodes) if daemon.cloud is not None else None,
        overspent=overspent,
        on_round=on_round,
    )


def _decider(choice: PolicyChoice, agents: Agents | None) -> tuple[Policy, PolicyChoice]:
    """The policy, and the choice with all settings, if the cluster can do what it decides. Raises ConfigError."""
    policy, full = make_policy(choice)
    sharing = sharing_parts(choice)
    if sharing and agents is None:
        raise ConfigError(
            f"policy {sharing[0]} needs agents: it lets jobs share GPUs, and nobody on the nodes of this cluster could carry "
            "that out; on Slurm run penstock-agent on the nodes and set [slurm] agents = true (docs/admin/sharing.md), or choose "
            "a policy and stages without sharing, such as sia"
        )
    return policy, full


def _trigger(daemon: DaemonSettings) -> Trigger:
    return Period(daemon.round_s) if daemon.rounds == "period" else OnEvent(daemon.round_s)


@dataclass
class LiveScheduler:
    """The round loop on a cluster, and what of it may change while it runs."""

    path: Path
    settings: Settings
    store: SqlStore
    loop: RoundLoop
    board: Board
    rules: SchedulingRules
    notifier: Notifier
    specs: SpecModels
    sensitivities: Sensitivities
    learn: Callable[[Sequence[Report]], None]
    chosen: PolicyChoice
    """The policy that decides, with all settings."""
    parts: ClusterParts
    _told_of_failing: bool = False
    _xids_s: dict[tuple[str, int, int], float] = field(default_factory=dict)
    """Node, GPU, XID -> when it was last told of, s since 1970."""

    def set_policy(self, choice: PolicyChoice) -> PolicyChoice:
        """Decide by this policy from the next round on, also after a restart.

        Settings that the choice leaves out are those of the settings file.

        Returns:
            The choice with all settings.

        Raises:
            ConfigError: the policy cannot be made.
        """
        policy, full = _decider(choice.over(self.settings.policies), self.parts.agents)
        self.store.set_control("policy", full.model_dump(mode="json"))
        self.loop.decide_by(policy, full)
        self.chosen = full
        return full

    def take_up_policy(self, choice: PolicyChoice) -> None:
        """Decide by what an admin had set before the restart. If this version cannot (an upgrade, a setting that is gone), by
        the settings file, and say so: jobs that wait for a daemon which will not start are worse off."""
        try:
            self.set_policy(choice)
        except ConfigError as error:
            text = (
                f"the policy {choice} that an admin had set cannot be made any more: {error}. Rounds are decided by "
                f"{self.chosen}, as the settings file says; set it anew with penstock policy set"
            )
            log.error("policy not taken up", extra={"text": text})
            self._note(allowed=False, text=text, action="take up policy")
            self.notifier.tell(
                Notice("protected", f"the policy {choice} is not in force", text[0].upper() + text[1:] + ".")
            )

    def set_paused(self, paused: bool) -> None:
        """Decide no more rounds, or go on."""
        self.store.set_control("paused", paused)
        self.loop.paused = paused

    def watch(self) -> None:
        """Tell of GPUs that idle or fail, of jobs that are silent or were contained, and of rounds that fail."""
        wanted, now_s = self.notifier.settings, time.time()
        for view, idle_s in self.board.idle(wanted.gpu_idle_s):
            done = f"which have done nothing for {duration(idle_s)} by what NVML sees of them"
            self._tell_of(view, "gpu-idle", "{what} of job {job} are idle", done, {"idle_s": idle_s})
        for view, silent_s in self.board.silent(wanted.silent_s, now_s):
            done = f"and has reported nothing for {duration(silent_s)}"
            self._tell_of(view, "job-silent", "job {job} is silent", done, {"silent_s": silent_s})
        self._tell_of_nodes()
        failing_s = self.loop.failing_s
        if failing_s is None or failing_s < wanted.failing_s:
            if self._told_of_failing and failing_s is None:
                self.notifier.tell(Notice("protected", "rounds are decided again", "The daemon is well again."))
            self._told_of_failing = self._told_of_failing and failing_s is not None
        elif not self._told_of_failing:
            self._told_of_failing = True
            text = (
                f"For {duration(failing_s)} no round could be decided: {self.loop.failure}. What runs goes on running."
            )
            self.notifier.tell(Notice("protected", "no round is decided", text, facts={"failing_s": failing_s}))

    def _tell_of_nodes(self) -> None:
        """Tell what the nodes' agents have done about jobs, and which GPUs fail, also since before this daemon."""
        events = self.parts.node_events
        if events is None:
            return
        for contained in events.take_contained():
            whose = self.board.job(contained.job)
            user = whose.user if whose is not None else ""
            subject = f"job {contained.job} {'was cancelled' if contained.killed else 'did not share as it must'}"
            text = f"On GPUs that it shares, {contained.text}"
            facts = contained.model_dump(mode="json", exclude={"text", "time_s", "number"})
            self.notifier.tell(Notice("job-contained", subject, text, user, facts, contained.time_s))
        for node, seen in events.take_xids():
            error = node, seen.device, seen.xid
            if seen.xid in OF_PROGRAMS or seen.time_s - self._xids_s.get(error, -math.inf) < XID_AGAIN_S:
                continue
            self._xids_s[error] = seen.time_s
            text = (
                f"NVIDIA's driver on {node} told error XID {seen.xid} of GPU {seen.device}. The kernel's log there says more "
                "(journalctl -k | grep NVRM), and NVIDIA's list of XIDs what to do. Jobs go on being placed there: drain the "
                "node if the GPU is broken."
            )
            facts = {"node": node, "gpu": seen.device, "xid": seen.xid}
            subject = f"GPU {seen.device} of {node} fails: XID {seen.xid}"
            self.notifier.tell(Notice("gpu-error", subject, text, facts=facts, time_s=seen.time_s))

    def _tell_of(self, view: JobView, kind: Kind, subject: str, done: str, facts: dict[str, float]) -> None:
        """Tell of a job that holds GPUs and does not seem to use them."""
        assert view.allocation is not None, "it holds GPUs"
        what = f"{view.allocation.gpus} {view.allocation.gpu_type} GPUs"
        text = (
            f"Job {view.id} ({view.name}) of {view.user} holds {what}, {done}. "
            f"See penstock logs {view.id}; penstock cancel {view.id} ends it."
        )
        of_it = {"job": view.id, "gpus": view.allocation.gpus} | facts
        self.notifier.tell(Notice(kind, subject.format(what=what, job=view.id), text, view.user, of_it))

    def reload(self) -> None:
        """Take up the settings file again: from the next round on, if it is good; else all stays as it is, and that is said."""
        try:
            new = load_settings(self.path)
            daemon, limits = new.section(DaemonSettings), new.section(LimitSettings)
            budgets, notices = new.section(BudgetSettings), new.section(NoticeSettings)
            policy, full = _decider(new.policy, self.parts.agents)
            changed, later = changes(self.settings, new)
            decides_anew = any(key.startswith("policy.") for key in changed)
            if decides_anew:
                self.store.set_control("policy", None)  # what the file says now is newer than what an admin had set
        except (ConfigError, StoreError) as error:
            log.error("settings refused, the old ones stay", extra={"text": str(error)})
            self._note(allowed=False, text=str(error))
            return
        if decides_anew:
            self.loop.decide_by(policy, full)
            self.chosen = full
        if any(key in ("daemon.rounds", "daemon.round_s", "daemon.tick_s") for key in changed):
            self.loop.pace(_trigger(daemon), daemon.tick_s)
        self.rules.use(budgets, limits)
        self.notifier.settings = notices
        self.settings = new
        log.info("settings taken up", extra={"changed": ",".join(changed) or "nothing"})
        if later:
            log.warning("settings wait for a restart", extra={"text": ", ".join(later)})
        self._note(
            allowed=True,
            text=f"changed: {', '.join(changed) or 'nothing'}; after a restart: {', '.join(later) or 'nothing'}",
        )

    def _note(self, *, allowed: bool, text: str, action: str = "reload settings") -> None:
        try:
            self.store.note("", "admin", action, str(self.path), allowed=allowed, text=text)
        except StoreError as error:
            log.error("audit log", extra={"text": str(error)})


LIVE = (
    "daemon.rounds",
    "daemon.round_s",
    "daemon.tick_s",
    "policy.",
    "limits.",
    "budgets.",
    "notices.",
)
"""Settings that are taken up while the daemon runs: keys, or sections."""


def changes(before: Settings, after: Settings) -> tuple[list[str], list[str]]:
    """Keys that differ, `section.key`: those that can be taken up at once, and those that wait for a restart."""
    old, new = before.in_full(), after.in_full()
    keys = {f"{name}.{key}" for tables in (old, new) for name, table in tables.items() for key in table}
    parted = [(key, *key.split(".", 1)) for key in sorted(keys)]
    differ = [key for key, name, rest in parted if old.get(name, {}).get(rest) != new.get(name, {}).get(rest)]
    live = [key for key in differ if key in LIVE or key.startswith(tuple(each for each in LIVE if each.endswith(".")))]
    return live, [key for key in differ if key not in live]


def make_site(path: Path, settings: Settings, clock: Clock, store: SqlStore) -> LiveScheduler:
    """The round loop that these settings describe, watched by a board. Raises ConfigError."""
    parts, specs, sensitivities = _open(settings, clock)
    notifier = Notifier(settings.section(NoticeSettings))

    def reached(budget: BudgetView, limit: str) -> None:
        whose = f"account {budget.account}" if budget.account else "the site"
        text = (
            f"The {limit} budget of {whose} for the {budget.period} is reached: {budget.used_gpu_hours:.1f} GPU-hours and "
            f"{budget.used_usd:.2f} USD are used. See penstock budget."
        )
        subject = f"{whose} has reached its {limit} budget"
        notifier.tell(Notice("budget", subject, text, facts=budget.model_dump(mode="json") | {"limit": limit}))

    def ended(view: JobView) -> None:
        used = ", ".join(f"{s / 3600:.2f} GPU-hours of {t}" for t, s in sorted(view.gpu_seconds.items())) or "no GPUs"
        how = view.ended + (f", exit status {view.exit_code}" if view.exit_code else "")
        text = f"Job {view.id} ({view.name}) has ended: {how}. It used {used} and was moved {view.restarts} times."
        facts = {"job": view.id, "ended": view.ended, "exit_code": view.exit_code, "gpu_seconds": view.gpu_seconds}
        notifier.tell(Notice("job-ended", f"job {view.id} {view.name}: {view.ended}", text, view.user, facts))

    rules = SchedulingRules(settings.section(BudgetSettings), settings.section(LimitSettings), store, reached)
    board = Board(store, parts.submitter, ended)
    models = LearnedModels(specs, store, sensitivities)
    watched = ObservedCluster(parts, board, clock.now_s, models.learn)
    loop = make_loop(
        settings,
        clock,
        store,
        replace(parts, cluster=watched),
        models,
        board.take_round,
        lambda snapshot: board.results.on(rules.on(snapshot)),
        rules.overspent,
    )
    chosen = make_policy(settings.policy)[1]
    site = LiveScheduler(
        path,
        settings,
        store,
        loop,
        board,
        rules,
        notifier,
        specs,
        sensitivities,
        models.learn,
        chosen,
        parts,
    )
    if (kept := store.control("policy")) is not None:
        site.take_up_policy(PolicyChoice.model_validate(kept))
    loop.paused = bool(store.control("paused"))
    return site


def make_service(site: LiveScheduler, clock: Clock) -> Service:
    """The API over what the site's loop sees. Raises ConfigError."""
    try:
        from penstock_scheduler.service.app import Controls, make_app
        from penstock_scheduler.service.server import Service
    except ModuleNotFoundError as error:
        raise ConfigError(f"[api] {error}; install penstock[service], or set enabled = false") from None
    daemon, api = site.settings.section(DaemonSettings), site.settings.section(ApiSettings)
    controls = Controls(
        lambda: site.chosen,
        site.set_policy,
        lambda: site.loop.paused,
        site.set_paused,
        lambda: site.settings.as_dict(),
        site.rules,
    )
    app = make_app(
        api,
        site.board,
        controls,
        # The loop has its own, in its thread.
        SpecModels(load_families(daemon.families), daemon.restart_cost_s, sensitivities=site.sensitivities),
        site.specs.check,
        site.learn,
    )
    return Service(api, api.socket or daemon.state_dir / "api.sock", app, site.board)


def _open(settings: Settings, clock: Clock) -> tuple[ClusterParts, SpecModels, Sensitivities]:
    daemon = settings.section(DaemonSettings)
    try:
        families = load_families(daemon.families)
    except CatalogueError as error:
        raise ConfigError(f"[daemon] families: {error}") from None
    sensitivities = Sensitivities(daemon.sensitivities, daemon.state_dir / LEARNED)
    models = SpecModels(families, daemon.restart_cost_s, sensitivities=sensitivities)
    return open_cluster(daemon.cluster, settings, clock, models.check), models, sensitivities


def open_cluster(name: str, settings: Settings, clock: Clock, check: SpecCheck) -> ClusterParts:
    """The cluster of that name among the installed ones. Raises ConfigError."""
    found = {entry.name: entry for entry in entry_points(group=CLUSTERS)}
    if name not in found:
        raise ConfigError(
            f"[daemon] cluster={name!r} is not installed; installed are {', '.join(sorted(found)) or 'none'}"
        )
    parts: ClusterParts = found[name].load()(settings, clock, check)
    return parts


def open_cloud(name: str, settings: Settings, clock: Clock, store: Store, nodes: CloudNodes | None) -> Burst:
    """The cloud of that name among the installed ones, for the nodes that the cluster has for one. Raises ConfigError."""
    found = {entry.name: entry for entry in entry_points(group=CLOUDS)}
    if name not in found:
        raise ConfigError(
            f"[daemon] cloud={name!r} is not installed; installed are {', '.join(sorted(found)) or 'none'}"
        )
    if nodes is None:
        raise ConfigError(
            "[daemon] cloud: the cluster has no nodes for it; name their partition in [slurm] cloud_partition"
        )
    cloud: Burst = found[name].load()(settings, clock, store, nodes)
    return cloud


def configure_logging(log_format: str) -> None:
    """Logs of all modules to standard error, a line each: logfmt for people and grep, or JSON."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "event", "round", "job"], bool_as_flag=False
        )
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    for talkative in ("uvicorn", "alembic", "asyncio"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def sd_notify(message: str) -> None:
    """Tell systemd, if it started us (sd_notify(3)); a message that cannot be sent is not worth failing for."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send(message.encode())
    except OSError as error:
        log.debug("sd_notify", extra={"text": str(error)})


if __name__ == "__main__":
    sys.exit(main())
