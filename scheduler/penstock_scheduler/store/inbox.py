"""Which jobs' reports the daemon reads in a tick, so that it need not look at every job's folder.

A run announces that it has reported, by a file in the spool's inbox (`penstock_profiles.wire.inbox_folder`). An announcement may
be missing: programs other than Penstock's may write reports, a disk may be full, and any user may write to the inbox. So an
announcement only makes a report known sooner:

- A job is read once when it is first seen, and after that whenever it is announced or somebody waits for its answer.
- A job whose new reports were not announced is read in every tick, until it announces some. What a first reading finds may be
  old and says nothing.
- `TURNS` of the other jobs are read in each tick, one after another. With so few jobs, all are read in every tick.

Users may put anything else there. What cannot be taken away stays and is not tried again. If it is in the place of a job's
announcement, or if there is too much of it, the whole inbox is set aside in `refused_folder`, where `penstock doctor` names its
owners, and a new one is made: three calls, however much there is. An admin removes what was set aside.
"""

from __future__ import annotations

import logging
import os
import pwd
import stat
import time
from collections import Counter
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from penstock_profiles.wire import inbox_folder
from penstock_scheduler.people.errors import StoreError

log = logging.getLogger(__name__)

TURNS = 15
"""Jobs that are read in a tick without a reason. Each costs two calls on files."""

TAKEN_AT_ONCE = 10_000
"""Most announcements that are taken away in a tick, or two for each job. An inbox with more is set aside."""

LEFT = 1_000
"""Most names that stay in the inbox because they cannot be taken away."""

SHOWN = 5
"""Users that a warning names."""

LOOKED_AT = 100
"""Entries of what is set aside that are looked at, to tell whose they are."""


def refused_folder(spool: Path) -> Path:
    """Folder with what was in the inbox and does not belong there."""
    return spool / "refused"


def owners(folder: Path) -> list[int]:
    """Users (uids) that own the first entries of a folder, those with the most first. Raises OSError."""
    with os.scandir(folder) as entries:
        found = Counter(entry.stat(follow_symlinks=False).st_uid for entry in islice(entries, LOOKED_AT))
    return [uid for uid, _ in found.most_common()]


def foreign_in(spool: Path) -> str:
    """What in a spool does not belong there, with the remedy; empty: nothing. Raises OSError."""
    told = []
    if spool.stat().st_mode & stat.S_IWOTH:
        text = f"every user can write to the spool {spool}, and so take the place of jobs' folders"
        told.append(f"{text}: chmod o-w {spool}")
    refused = refused_folder(spool)
    try:
        aside = sorted(_names(refused, LOOKED_AT))
        whose = {uid for name in aside for uid in owners(refused / name)}
    except FileNotFoundError:
        aside = []
    if aside:
        text = f"users put into {inbox_folder(spool)} what is no announcement; it is in {refused}/{aside[-1]}"
        more = f" and {len(aside) - 1} other folders there" if aside[1:] else ""
        told.append(f"{text}{more}, and of {_users(whose)}: ask why, then rm -r {refused}")
    return "; ".join(told)


def _users(uids: Collection[int]) -> str:
    """Who these users are."""
    shown = []
    for uid in sorted(uids)[:SHOWN]:
        try:
            shown.append(f"{pwd.getpwuid(uid).pw_name} (uid {uid})")
        except KeyError:
            shown.append(f"uid {uid}")
    return ", ".join([*shown, *(["others"] if len(uids) > SHOWN else [])])


class Inbox:
    """The announcements, and whose turn it is. Raises StoreError if the folder cannot be made."""

    def __init__(self, spool: Path) -> None:
        self._folder, self._refused = inbox_folder(spool), refused_folder(spool)
        self._left: set[str] = set()
        """Names in the inbox that cannot be taken away."""
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
        taken = self._take(jobs)
        announced = {job for job in jobs if job in taken} if taken else set()
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

    def _take(self, jobs: Collection[str]) -> set[str]:
        """Take the announcements away, before the reports are read: a later report is announced anew."""
        most = max(TAKEN_AT_ONCE, 2 * len(jobs))
        try:
            names = _names(self._folder, most + 1)
        except FileNotFoundError:
            return self._made_again()
        if len(names) > most:
            return names | self._set_aside(most)
        for name in names - self._left:
            try:
                (self._folder / name).unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.debug("announcement stays", extra={"job": name, "text": str(error)})
                self._left.add(name)
        self._left &= names
        if len(self._left) > LEFT or (self._left and any(job in self._left for job in jobs)):
            return names | self._set_aside(most)
        return names - self._left

    def _set_aside(self, most: int) -> set[str]:
        """Put the whole inbox aside, with whatever is in it, and make a new one. Returns names in it."""
        aside = self._refused / f"inbox-{time.time_ns()}"
        try:
            self._refused.mkdir(mode=0o700, exist_ok=True)
            self._folder.rename(aside)
            self._make()
            names, whose = _names(aside, most), owners(aside)
        except OSError as error:
            log.error("the inbox cannot be set aside", extra={"text": f"{self._folder}: {error.strerror}"})
            return set()
        self._left = set()
        text = f"{aside} has at least {len(names)} entries that are no announcements, of users {whose[:3]}"
        log.warning("set the inbox aside", extra={"text": f"{text}; see penstock doctor"})
        return names

    def _make(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # Jobs of all users leave files there, and may not take away those of others.
        if self._folder.stat().st_mode & 0o7777 != 0o1777:
            self._folder.chmod(0o1777)

    def _made_again(self) -> set[str]:
        try:
            self._make()
        except OSError as error:
            log.warning("jobs cannot announce reports", extra={"text": f"{self._folder}: {error.strerror}"})
        return set()


def _names(folder: Path, most: int) -> set[str]:
    """Names of the first entries of a folder. Raises OSError."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in islice(entries, most)}
