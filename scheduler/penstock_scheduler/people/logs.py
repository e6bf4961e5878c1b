"""The daemon's logging, and its messages to systemd."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable

import structlog

from penstock_scheduler.people.safe_text import LOG_LINE, one_line

log = logging.getLogger(__name__)

BOUNDED = ("penstock_scheduler.daemon.service", "uvicorn", "asyncio")
"""Loggers of what clients can cause. Lines on jobs and rounds are never left out."""
LINES = 60
LINES_S = 60.0
"""Of each message of these loggers, at most this many lines are written in this time."""


class BoundLines(logging.Filter):
    """Leaves out lines that clients cause again and again. The first line of the next minute says how many."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._lines: dict[tuple[str, str], tuple[float, int]] = {}
        """(logger, message) -> when its present minute began, and its lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a line. Called under the handler's lock or not: a line more or less does not matter."""
        if not record.name.startswith(BOUNDED):
            return True
        key, now_s = (record.name, str(record.msg)[:200]), self._now_s()
        began_s, lines = self._lines.get(key, (now_s, 0))
        if now_s - began_s >= LINES_S:
            if lines > LINES:
                record.left_out = lines - LINES
            began_s, lines = now_s, 0
        if len(self._lines) > 1000:
            self._lines.clear()
        self._lines[key] = began_s, lines + 1
        return lines < LINES


class _OneLine(structlog.stdlib.ProcessorFormatter):
    """Each record in a line of its own: no text in it begins another record, steers a terminal or is split by journald."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record), LOG_LINE)


def configure_logging(log_format: str, *, writes: bool = False) -> None:
    """Log to standard error, one line an event: logfmt for people and grep, or JSON for programs.

    `writes`: whether to log each write to the store, Slurm, the spool and the cloud.
    """
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
    formatter = _OneLine(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handler.addFilter(BoundLines())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    if writes:
        logging.getLogger("penstock_scheduler.store.leadership").setLevel(logging.DEBUG)
    for verbose in ("uvicorn", "alembic", "asyncio", "httpx"):
        logging.getLogger(verbose).setLevel(logging.WARNING)


def sd_notify(message: str) -> None:
    """Send a message to systemd, if it started this process (sd_notify(3)). A failure is ignored."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send(message.encode())
    except OSError as error:
        log.debug("sd_notify", extra={"text": str(error)})
