"""One agent for a node: two would suspend and resume the same jobs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from penstock_scheduler.people.errors import PenstockError

NAME = "agent.lock"


@contextlib.contextmanager
def held(*folders: Path) -> Iterator[None]:
    """Hold the lock of each folder: that of the state and that of the jobs' files. The kernel releases it when the
    agent ends, however it ends.

    Raises:
        PenstockError: another agent holds one of them.
        OSError: a folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for folder in folders:
            handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise PenstockError(
                    f"another penstock-agent (process {other}) works in {folder}, and two would act on the same jobs; "
                    "end that one first, or give this node its own state_dir and run_dir with %n"
                ) from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
