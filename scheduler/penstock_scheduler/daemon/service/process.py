"""penstock-api: serves the API in a process of its own, beside penstockd.

It may be killed and started again at any time, and flooded: no round notices. It reads the store, and hands what only penstockd
can do to penstockd over a private socket. While penstockd is away, it goes on reading and says so.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock_scheduler import __version__
from penstock_scheduler.daemon.service.app import make_reading_app
from penstock_scheduler.daemon.service.forwarding import OverSocket
from penstock_scheduler.daemon.service.replica import Replica
from penstock_scheduler.daemon.service.server import Service
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.logs import configure_logging, sd_notify
from penstock_scheduler.people.safe_text import guard
from penstock_scheduler.rounds.settings import DaemonSettings, Settings, load_settings
from penstock_scheduler.safety import open_files
from penstock_scheduler.store.sql import open_store

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0 stopped when asked, 1 cannot run, 2 wrong settings or usage."""
    parser = argparse.ArgumentParser(prog="penstock-api", description="Serves penstockd's HTTP API.")
    parser.add_argument("--config", type=Path, default=Path("/etc/penstock/penstock.toml"), help="settings file (TOML)")
    parser.add_argument("--version", action="version", version=f"penstock-api {__version__}")
    arguments = parser.parse_args(argv)
    guard()
    try:
        return _run(load_settings(arguments.config))
    except ConfigError as error:
        print(f"penstock-api: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except PenstockError as error:
        print(f"penstock-api: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _run(settings: Settings) -> int:
    """Serve until stopped."""
    api, daemon = settings.section(ApiSettings), settings.section(DaemonSettings)
    if not api.enabled or api.embedded:
        raise ConfigError(
            "penstockd serves the API itself; set [api] enabled = true and embedded = false, and restart it"
        )
    stopping = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: stopping.set())
    open_files.raise_limit()
    configure_logging(daemon.log_format)
    store = open_store(api.store or daemon.store or daemon.state_dir)
    replica = Replica(store)
    app = make_reading_app(api, replica, OverSocket(api.private_socket, replica))
    gatekeeper = app.state.api.gatekeeper
    gatekeeper.daemon_uid, replica.on_tokens = replica.beat.uid, gatekeeper.forget_tokens
    service = Service(api, app, replica)
    service.start(replica.follow())
    log.info("started", extra={"version": __version__, "settings": settings.source})
    sd_notify("READY=1")
    while not stopping.wait(1.0):
        if not service.serves:
            log.error("the API ended unexpectedly; please report this as a bug")
            return 1
    sd_notify("STOPPING=1")
    service.stop()
    store.close()
    log.info("stopped", extra={"why": "asked to"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
