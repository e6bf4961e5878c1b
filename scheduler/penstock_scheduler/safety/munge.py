"""MUNGE credentials, with which clients over TCP identify themselves."""

from __future__ import annotations

import os
from pathlib import Path

from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.safety import children


def payload(method: str, path: str) -> str:
    """The payload of a credential, which is valid only for this request."""
    return f"penstock {method} {path}"


def credential(method: str, path: str, socket: Path | None) -> str:
    """A credential of this process's user for a request.

    Args:
        method: of the request.
        path: of the request.
        socket: munged's; None: MUNGE's default.

    Raises:
        PenstockError: munge cannot make one.
    """
    at = [] if socket is None else [f"--socket={socket}"]
    instead = "PENSTOCK_TOKEN has no token"
    try:
        argv = [children.program("munge"), *at, "-s", payload(method, path)]
        made = children.run(argv, env=os.environ, timeout_s=10.0)
    except children.ChildError as error:
        raise PenstockError(f"{instead}, and munge cannot be run ({error}); ask an admin for a token") from None
    if made.returncode != 0:
        raise PenstockError(f"{instead}, and munge failed: {made.err.strip()}; ask an admin for a token")
    return made.out.strip()
