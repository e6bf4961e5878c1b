"""Which jobs' reports the daemon reads in a tick, so that it need not look at every job's folder.

A run announces that it has reported, by a file in the spool's inbox (`penstock_profiles.wire.inbox_folder`). An announcement may
be missing: programs other than Penstock's may write reports, a disk may be full, and any user may write to the inbox. So an
announcement only makes a report known sooner:

- A job is read once when it is first seen, and after that whenever it is announced or somebody waits for its answer.
- A job whose new reports were not announced is read in every tick, until it announces some. What a first reading finds may be
  old and says nothing.
- `TURNS` of the other jobs are read in each tick, one after another. With so few jobs, all are read in every tick.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from penstock_profiles.wire import inbox_folder
from penstock_scheduler.errors import StoreError

log = logging.getLogger(__name__)

TURNS = 15
"""Jobs that are read in a tick without a reason. Each costs two calls on files."""

TAKEN_AT_ONCE = 10_000
"""Most announcements that are taken away in a tick; any user may leave them."""


class Inbox:
    """The announcements, and whose turn it is. Raises StoreError if the folder cannot be made."""

    def __init__(self, spool: Path) -> None:
        self._folder = inbox_folder(spool)
        self._seen: dict[str, int] = {}
        """Job that was read -> its epoch."""
        self._announcing: set[str] = set()
        """Jobs whose present run has announced reports."""
        self._again: set[str] = set()
        """Jobs that are read again in the next tick."""
        self._silent: set[str] = set()
        """Jobs whose present run reports and does not announce it."""
        self._turn = 0
        try:
            self._make()
        except OSError as error:
            raise StoreError(
                f"{self._folder}: {error.strerror}; jobs announce their reports there: set [slurm] spool_dir to a folder in "
                "which penstockd may make folders"
            ) from None

    def due(self, jobs: Collection[str], awaited: Collection[str]) -> list[str]:
        """Those of these jobs that are to be read now.

        Args:
            jobs: all jobs that may have reports.
            awaited: those that are read in any case, because something depends on what they report.
        """
        announced = self._take()
        self._announcing |= announced
        self._silent -= announced
        wanted = announced | {*awaited} | self._again | self._silent
        self._again = set()
        others = [job for job in jobs if job not in wanted and job in self._seen]
        begin = self._turn if self._turn < len(others) else 0
        turns = {*others[begin : begin + TURNS]}
        self._turn = begin + TURNS
        return [job for job in jobs if job in wanted or job in turns or job not in self._seen]

    def was_read(self, job: str, epoch: int, *, new: bool, more: bool) -> None:
        """A job's reports were read.

        Args:
            job: the job.
            epoch: of its newest run; 0: it has none.
            new: whether there was something new.
            more: whether there is, or may soon be, more.
        """
        before = self._seen.get(job)
        self._seen[job] = epoch
        if before not in (None, epoch):
            self._announcing.discard(job)
        if new and before is not None and job not in self._announcing:
            self._silent.add(job)
        if more:
            self._again.add(job)

    def forget(self, keep: Collection[str]) -> None:
        """Forget all jobs but these."""
        self._seen = {job: epoch for job, epoch in self._seen.items() if job in keep}
        for table in (self._announcing, self._silent, self._again):
            table.intersection_update(keep)

    def _take(self) -> set[str]:
        """Take the announcements away, before the reports are read: a later report is announced anew."""
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in islice(entries, TAKEN_AT_ONCE)]
        except FileNotFoundError:
            names = self._made_again()
        for name in names:
            try:
                (self._folder / name).unlink()
            except OSError as error:
                log.debug("announcement stays", extra={"job": name, "text": str(error)})
        return {*names}

    def _make(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # Jobs of all users leave files there, and may not take away those of others.
        if self._folder.stat().st_mode & 0o7777 != 0o1777:
            self._folder.chmod(0o1777)

    def _made_again(self) -> list[str]:
        try:
            self._make()
        except OSError as error:
            log.warning("jobs cannot announce reports", extra={"text": f"{self._folder}: {error.strerror}"})
        return []
