"""penstockd: runs the round loop on a real cluster.

It may be killed at any moment and started again: what runs is in the cluster, the plan is in the store, and what is left
to do follows from the two.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from penstock_profiles.catalogue import CatalogueError
from penstock_profiles.families import load_families
from penstock_scheduler import __version__
from penstock_scheduler.clock import WallClock
from penstock_scheduler.errors import ConfigError, PenstockError
from penstock_scheduler.limits import LimitSettings, site_limits
from penstock_scheduler.loop import RoundLoop
from penstock_scheduler.models import LearnedModels, WishModels
from penstock_scheduler.policies import make_policy
from penstock_scheduler.ports import Accounts, Clock, Cluster, ModelSource, Store, Trigger, WishCheck
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.sensitivities import LEARNED, Sensitivities
from penstock_scheduler.service.settings import ApiSettings
from penstock_scheduler.settings import DaemonSettings, Settings, load_settings
from penstock_scheduler.store import SqlStore, open_store
from penstock_scheduler.triggers import OnEvent, Period

if TYPE_CHECKING:
    from penstock_scheduler.service.server import Service

CLUSTERS = "penstock.clusters"

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
        return _check(settings) if arguments.check else _run(settings, daemon)
    except ConfigError as error:
        print(f"penstockd: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except PenstockError as error:
        print(f"penstockd: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _run(settings: Settings, daemon: DaemonSettings) -> int:
    stop = False
    clock = WallClock()

    def on_signal(number: int, frame: object) -> None:
        nonlocal stop
        stop = True
        clock.wake()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    store = open_store(
        daemon.store or daemon.state_dir, writer=True, keep_rounds=daemon.keep_rounds, keep_days=daemon.keep_days
    )
    api = settings.section(ApiSettings)
    loop, service = make_loop(settings, clock, store), None
    if api.enabled:
        loop, service = make_service(settings, clock, store)
    configure_logging(daemon.log_format)
    if service is not None:
        service.start()
    log.info("started", extra={"version": __version__, "settings": settings.source, "policy": daemon.policy})
    sd_notify("READY=1")
    loop.run(lambda: stop, lambda: sd_notify("WATCHDOG=1"))
    sd_notify("STOPPING=1")
    if service is not None:
        service.stop()
    store.close()
    log.info("stopped", extra={"why": "asked to"})
    return 0


def _check(settings: Settings) -> int:
    cluster, _, _ = _parts(settings, WallClock())
    state = cluster.observe()
    types = sorted({node.gpu_type for node in state.nodes})
    gpus = sum(node.gpus for node in state.nodes)
    print(f"settings: ok ({settings.source})")  # noqa: T201
    print(f"cluster: {len(state.nodes)} nodes, {gpus} GPUs of {', '.join(types)}; {len(state.jobs)} jobs to manage")  # noqa: T201
    for refusal in state.refused:
        print(f"job {refusal.job} ({refusal.user}) is refused: {refusal.text}")  # noqa: T201
    return 0


def make_loop(
    settings: Settings,
    clock: Clock,
    store: Store,
    cluster: Cluster | None = None,
    models: ModelSource | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    accounts: Accounts | None = None,
) -> RoundLoop:
    """The round loop that these settings describe; a cluster and models that are given stand in. Raises ConfigError."""
    daemon = settings.section(DaemonSettings)
    policy, policy_settings = make_policy(daemon.policy, settings.policy(daemon.policy))
    if cluster is None or models is None:
        cluster, models, _ = _parts(settings, clock)
        accounts = getattr(cluster, "accounts", None)
    trigger: Trigger = Period(daemon.round_s) if daemon.rounds == "period" else OnEvent()
    return RoundLoop(
        cluster,
        clock,
        store,
        trigger,
        policy,
        models,
        tick_s=daemon.tick_s,
        settings=policy_settings,
        limits=partial(site_limits, settings.section(LimitSettings)),
        on_round=on_round,
        accounts=accounts,
    )


def make_service(settings: Settings, clock: Clock, store: SqlStore) -> tuple[RoundLoop, Service]:
    """The round loop, and the API over what it sees. Raises ConfigError."""
    try:
        from penstock_scheduler.service.app import Controls, make_app
        from penstock_scheduler.service.board import Board, Watched
        from penstock_scheduler.service.server import Service
    except ModuleNotFoundError as error:
        raise ConfigError(f"[api] {error}; install penstock[service], or set enabled = false") from None
    daemon, api = settings.section(DaemonSettings), settings.section(ApiSettings)
    cluster, wishes, sensitivities = _parts(settings, clock)
    board = Board(store, getattr(cluster, "submitter", None))
    models = LearnedModels(wishes, store, sensitivities)
    watched = Watched(cluster, board, clock.now_s, models.learn)
    loop = make_loop(settings, clock, store, watched, models, board.decided, getattr(cluster, "accounts", None))
    chosen = daemon.policy, make_policy(daemon.policy, settings.policy(daemon.policy))[1]

    def set_policy(name: str, values: dict[str, Any]) -> dict[str, Any]:
        nonlocal chosen
        policy, full = make_policy(name, settings.policy(name) | values)
        store.set_control("policy", {"name": name, "settings": full})
        loop.decide_by(policy, full)
        chosen = name, full
        return full

    def set_paused(paused: bool) -> None:
        store.set_control("paused", paused)
        loop.paused = paused

    if (kept := store.control("policy")) is not None:
        set_policy(kept["name"], kept["settings"])
    loop.paused = bool(store.control("paused"))
    controls = Controls(lambda: chosen, set_policy, lambda: loop.paused, set_paused, settings.as_dict)
    app = make_app(
        api,
        board,
        controls,
        # The loop has its own, in its thread.
        WishModels(load_families(daemon.families), daemon.restart_cost_s, sensitivities=sensitivities),
        wishes.check,
        models.learn,
    )
    return loop, Service(api, api.socket or daemon.state_dir / "api.sock", app, board)


def _parts(settings: Settings, clock: Clock) -> tuple[Cluster, WishModels, Sensitivities]:
    daemon = settings.section(DaemonSettings)
    try:
        families = load_families(daemon.families)
    except CatalogueError as error:
        raise ConfigError(f"[daemon] families: {error}") from None
    sensitivities = Sensitivities(daemon.sensitivities, daemon.state_dir / LEARNED)
    models = WishModels(families, daemon.restart_cost_s, sensitivities=sensitivities)
    return open_cluster(daemon.cluster, settings, clock, models.check), models, sensitivities


def open_cluster(name: str, settings: Settings, clock: Clock, check: WishCheck) -> Cluster:
    """The cluster of that name among the installed ones. Raises ConfigError."""
    found = {entry.name: entry for entry in entry_points(group=CLUSTERS)}
    if name not in found:
        raise ConfigError(
            f"[daemon] cluster={name!r} is not installed; installed are {', '.join(sorted(found)) or 'none'}"
        )
    cluster: Cluster = found[name].load()(settings, clock, check)
    return cluster


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
