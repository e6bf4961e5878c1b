"""The daemon's logging, and its messages to systemd."""

from __future__ import annotations

import logging
import os
import socket

import structlog

log = logging.getLogger(__name__)


def configure_logging(log_format: str) -> None:
    """Log to standard error, one line an event: logfmt for people and grep, or JSON for programs."""
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
    for verbose in ("uvicorn", "alembic", "asyncio"):
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
