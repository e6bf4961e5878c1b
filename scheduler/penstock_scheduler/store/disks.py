"""Checks of the disks of the store and the spool. Each has a thread of its own, so that a disk that hangs delays nothing else."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.safety.health import DiskRecord
from penstock_scheduler.store.inbox import foreign_in
from penstock_scheduler.store.sql import SqlStore

SAMPLE_S = 60.0
"""Time between two samples of the free space."""
SAMPLES = 1440
"""Samples kept: those of a day."""
TREND_S = 3600.0
"""The growth of a shorter time says nothing about days."""
TEST_FILE = ".penstockd-writes"
TEST_BYTES = 4096


class DiskCheck:
    """Checks a place again and again: whether it can be written, what is free, and for how long that lasts.

    Args:
        what: whose place it is: "store" or "spool".
        where: its name in messages.
        write: writes a little. Raises StoreError or OSError.
        folder: a folder on its file system; None: it is on a server.
        now_s: tells the time, in seconds since 1970.
        used_bytes: what the store itself takes.
        foreign: says what is there and does not belong there. Raises OSError.
    """

    def __init__(
        self,
        what: str,
        where: str,
        write: Callable[[], None],
        folder: Path | None,
        now_s: Callable[[], float],
        used_bytes: Callable[[], int | None] = lambda: None,
        foreign: Callable[[], str] = lambda: "",
    ) -> None:
        self.record = DiskRecord(what, where)
        self._write, self._folder, self._used_bytes, self._now_s = write, folder, used_bytes, now_s
        self._foreign = foreign
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)
        self._over = threading.Event()

    def start(self, check_s: Callable[[], float]) -> None:
        """Check until `stop`, every `check_s()` seconds."""
        threading.Thread(
            target=self._run, args=(check_s,), name=f"check of the {self.record.what}", daemon=True
        ).start()

    def stop(self) -> None:
        """Begin no further check."""
        self._over.set()

    def _run(self, check_s: Callable[[], float]) -> None:
        while not self._over.is_set():
            self.check()
            self._over.wait(check_s())

    def check(self) -> None:
        """Check once."""
        self.record = replace(self.record, began_s=self._now_s())
        error = free_bytes = used_bytes = None
        foreign = ""
        try:
            if self._folder is not None:
                free_bytes = free_space(self._folder)
            self._write()
            used_bytes, foreign = self._used_bytes(), self._foreign()
        except StoreError as failed:
            error = str(failed)
        except OSError as failed:
            error = f"{self.record.where}: {failed.strerror or failed}; check the disk and its rights"
        now_s = self._now_s()
        if free_bytes is not None and (not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S):
            self._samples.append((now_s, free_bytes))
        failed_now = {} if error is None else {"last_error": error, "error_s": now_s}
        self.record = replace(
            self.record,
            began_s=None,
            checked_s=now_s,
            error=error or "",
            free_bytes=free_bytes,
            used_bytes=used_bytes,
            foreign=foreign,
            days_left=days_left(tuple(self._samples)),
            **failed_now,  # type: ignore[arg-type]
        )


def free_space(folder: Path) -> int:
    """Bytes that this process may still write on the folder's file system. Raises OSError."""
    left = os.statvfs(folder)
    return (left.f_bfree if os.geteuid() == 0 else left.f_bavail) * left.f_frsize


def days_left(samples: Sequence[tuple[float, int]]) -> float | None:
    """Days until a disk is full at its present growth; None: it does not grow, or the samples cover less than an hour.

    Args:
        samples: (s since 1970, free bytes), in order of time.
    """
    if len(samples) < 2 or samples[-1][0] - samples[0][0] < TREND_S:
        return None
    (began_s, before), (now_s, free) = samples[0], samples[-1]
    return free * (now_s - began_s) / (before - free) / 86400 if free < before else None


def store_check(store: SqlStore, now_s: Callable[[], float]) -> DiskCheck:
    """The check of the store. It writes one row, always the same."""
    file = store.file
    opened = None if file is None else _identity(file)

    def write() -> None:
        if file is not None and _identity(file) != opened:
            raise StoreError(
                f"{file} was removed or replaced while penstockd uses it, and what penstockd writes will be lost; stop it, "
                "restore a backup (penstock db restore) if there is one, and start it again: running jobs continue"
            )
        store.set_control("last check", now_s())

    return DiskCheck("store", store.name, write, file.parent if file else None, now_s, store.used_bytes)


def _identity(file: Path) -> tuple[int, int] | None:
    """Which file is at this path, whatever its contents; None: there is none. Raises OSError."""
    with suppress(FileNotFoundError):
        found = file.stat()
        return found.st_dev, found.st_ino
    return None


def spool_check(spool: Path, now_s: Callable[[], float]) -> DiskCheck:
    """The check of the spool. It writes a small file and removes it again."""

    def write() -> None:
        file = spool / TEST_FILE
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(file, flags, 0o644), "wb", buffering=0) as opened:
                opened.write(b"\0" * TEST_BYTES)
                os.fsync(opened.fileno())
        finally:
            with suppress(OSError):
                file.unlink()

    return DiskCheck("spool", str(spool), write, spool, now_s, foreign=lambda: foreign_in(spool))
