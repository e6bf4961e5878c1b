"""The daemon's side of the spool: the shared folder through which reports and control messages travel (`penstock_profiles.wire`).

Users can write to the reports of their own jobs, so nothing in there is trusted. Only regular files are read, without following
links, and a bounded amount at a time. A line that is not a report, or that belongs to another job, is logged and skipped.

Read positions do not outlive a restart. Reports carry a sequence number, so the store recognises those that it has.

Lets nobody but a job's user and the daemon into the job's folder of the spool.

The user must read the control message, and must not change it. So the folder stays the daemon's, and the user may pass: by an
access control list where the file system has these, and otherwise as a member of the user's own group. Users whose own group is
one that they share can then see each other's control messages, not each other's reports: the reports folder is the user's alone.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from penstock_profiles.files import open_regular, save_whole
from penstock_profiles.wire import (
    EPOCH_FILE,
    MAX_REPORT_BYTES,
    Checkpointed,
    ControlMessage,
    Ended,
    Report,
    SaveFailed,
    Started,
    UnknownVersion,
    claimed_epochs,
    control_file,
    left_file,
    read,
    reports_file,
    reports_folder,
)
from penstock_scheduler.model.plausible import check_plausible
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store.inbox import Inbox
from penstock_scheduler.store.leadership.lease import ALONE

if TYPE_CHECKING:  # the agent loads no more than it needs
    from penstock_scheduler.api.ports import Leadership

import contextlib
import pwd
import stat
import struct

from penstock_profiles.files import open_folder

log = logging.getLogger(__name__)

READ_AT_ONCE = 1024 * 1024
"""Most bytes of one job's reports that are read in one tick."""

READ_IN_TICK = 16 * READ_AT_ONCE
"""Bytes of all jobs after which each further job that is not awaited has only `READ_AT_LEAST` in this tick.

A mebibyte takes about 0.15 s. A daemon that has started has whole files of many jobs to read."""

READ_AT_LEAST = 16 * 1024
"""Bytes of one job's reports that are read in one tick in any case. A report is a few hundred."""

MOST_NAMES = 100_000
"""Names of one job's reports folder that are looked at. Each run leaves a few, and one for each of its nodes."""

LISTED_IN_TICK = 200_000
"""Names in such folders after which further jobs' folders are not listed in this tick: a new run is found in a later one.
So many take 0.1 s."""

BY_USER = frozenset({errno.EACCES, errno.EEXIST, errno.ELOOP, errno.ENOTCONN, errno.ENOTDIR})
"""Errors of a folder of reports in whose place its user has put something else. A spool that is away shows when the daemon writes
the control message."""

MIN_REPORT_BYTES = 64
"""No report is shorter."""


class Led(TypedDict):
    """Arguments of `files.write_whole`."""

    writer: str
    ready: Callable[[], object]


def led(leadership: Leadership) -> Led:
    """For a file in the spool that only the leader writes: asked again at the end, because writing to a slow disk takes time."""
    return Led(writer=f"{leadership.number}.tmp", ready=lambda: leadership.expect("spool"))


class Spool:
    """The spool folder, created if it does not exist. Raises StoreError if that fails.

    Args:
        folder: its path.
        alone: this object alone writes control messages, so it keeps them in memory and reads each from the disk once; and it
            takes the announcements of reports. Otherwise, every question is a look at the disk.
        leadership: is asked before each write.
    """

    def __init__(self, folder: Path, *, alone: bool = False, leadership: Leadership = ALONE) -> None:
        self.folder = folder
        self.leadership = leadership
        self._controls: dict[str, ControlMessage | None] = {}
        """The control messages that are known; None: the job has none."""
        self._on_disk: set[str] = set()
        """Names in the folder, of jobs that are not in `_controls`."""
        self._unknown: set[str] = set()
        """Jobs whose control message is of an unknown version."""
        self._unreadable: set[str] = set()
        """Jobs with something else in place of the folder of their reports."""
        self._inbox: Inbox | None = None
        self._changed: set[str] = set()
        self._offsets: dict[tuple[str, int], int] = {}
        self._partial: dict[tuple[str, int], bytes] = {}
        self._sizes: dict[tuple[str, int], int] = {}
        """Size of each reports file when it was first seen, bytes."""
        self._older: set[str] = set()
        """Jobs of which the last reports were in such a file already when it was first seen."""
        self._claimed: dict[str, int] = {}
        """The newest epoch that each job's folder had when it was last listed."""
        self._newest: dict[str, Started] = {}
        self._started_epoch: dict[str, int] = {}
        self._checkpoints: dict[str, tuple[str, float]] = {}
        self._failures: dict[str, dict[str, str]] = {}
        """Job -> the requests in vain for a checkpoint since the last one was written -> why."""
        self._ended: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise StoreError(
                f"spool {folder}: {error.strerror}; set [slurm] spool_dir to a folder that all nodes share"
            ) from None
        if alone:
            self._on_disk, self._inbox = {*os.listdir(folder)}, Inbox(folder)

    def next_epoch(self, job_id: str) -> int:
        """An epoch that no run of the job has had."""
        control = self.control(job_id)
        return max([control.epoch if control else 0, *claimed_epochs(self.folder, job_id)]) + 1

    def control(self, job_id: str) -> ControlMessage | None:
        """The job's newest control message; None: there is none, or it cannot be read."""
        if job_id in self._controls:
            return self._controls[job_id]
        found = None
        if self._inbox is None or job_id in self._on_disk:
            try:
                found = read(ControlMessage, control_file(self.folder, job_id).read_bytes())
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                if isinstance(error, UnknownVersion) and job_id not in self._unknown:
                    self._unknown.add(job_id)
                    log.error("control message not read", extra={"job": job_id, "text": str(error)})
                self._changed.add(job_id)
                return None  # it is there, and may be readable the next time
        if self._inbox is not None:
            self._controls[job_id] = found
        return found

    def tell(self, control: ControlMessage, uid: int | None = None) -> None:
        """Write a control message for its job, all or nothing. `uid` will own the job's reports folder. Raises StoreError."""
        with self.leadership.write("spool", f"control message of job {control.job_id}, epoch {control.epoch}"):
            self._tell(control, uid)

    def _tell(self, control: ControlMessage, uid: int | None) -> None:
        path = control_file(self.folder, control.job_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_reports(control.job_id, uid)
            text = control.model_dump_json()
            save_whole(path, text, **led(self.leadership))
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; jobs get no control messages until this is fixed") from None
        if self._inbox is not None:  # as it is on the disk: with every field set
            self._controls[control.job_id] = ControlMessage.model_validate_json(text)
        self._changed.add(control.job_id)

    def _make_reports(self, job_id: str, uid: int | None) -> None:
        """Make the folder of a job's reports. What its user has put in its place, such as a mount that lets nobody else in, is
        that job's own trouble. Raises OSError."""
        try:
            reports_folder(self.folder, job_id).mkdir(exist_ok=True)
            if uid is not None:
                let_only(self.folder, job_id, uid)
        except OSError as error:
            if error.errno not in BY_USER:
                raise
            self._warn(job_id, error)

    def _warn(self, job_id: str, error: OSError) -> None:
        """Log that a job's reports cannot be read, once."""
        if job_id not in self._unreadable:
            self._unreadable.add(job_id)
            log.warning("reports unreadable", extra={"job": job_id, "text": str(error)})

    def take_changed(self) -> set[str] | None:
        """The jobs with another control message or new reports since the last call; None: it is not known, since others
        write control messages, too."""
        changed, self._changed = self._changed, set()
        return None if self._inbox is None else changed

    def recent(self, since_s: float) -> set[str]:
        """Jobs with runs that have begun since then. A daemon that restarts may have missed their end.

        Folders that an older daemon has made become private.
        """
        found = set()
        for name in os.listdir(self.folder):
            try:
                about = reports_folder(self.folder, name).lstat()
                if about.st_mtime >= since_s:
                    found.add(name)
                if about.st_mode & 0o077 and about.st_uid != os.geteuid():
                    let_only(self.folder, name, about.st_uid)
            except (OSError, ValueError):
                continue
        return found

    def read(
        self, job_ids: Collection[str], owners: Mapping[str, int] | None = None, awaited: Collection[str] = ()
    ) -> list[Report]:
        """New reports of these jobs' newest runs. A spool that is `alone` reads those of `awaited` jobs and those that its inbox
        names; see `inbox`.

        Files of older epochs are not read. Reports of a superseded run are ignored: it may live on, on a node that is silent,
        but what it reports no longer holds.

        For a job in `owners` (job -> uid), only files of that user count.
        """
        found: list[Report] = []
        left, listed = READ_IN_TICK, 0
        for job_id in job_ids if self._inbox is None else self._inbox.due(job_ids, awaited):
            newest = self._claimed.get(job_id, 0)
            if not newest or listed <= LISTED_IN_TICK or job_id in awaited:
                newest, names = self._newest_claimed(job_id)
                listed += names
            before = self._offsets.get((job_id, newest), 0)
            most = READ_AT_ONCE if left > 0 or job_id in awaited else READ_AT_LEAST
            if newest:
                found.extend(self._read_run(job_id, newest, (owners or {}).get(job_id), most))
            fresh = self._offsets.get((job_id, newest), 0) - before
            left -= fresh
            if self._inbox is not None:
                more = fresh == most or bool(self._partial.get((job_id, newest)))
                self._inbox.was_read(job_id, newest, new=fresh > 0, more=more)
        return found

    def _newest_claimed(self, job_id: str) -> tuple[int, int]:
        """The newest epoch that a job has claimed, 0 for none; and how many names were read to find it."""
        try:
            with os.scandir(reports_folder(self.folder, job_id)) as entries:
                names = [entry.name for entry in islice(entries, MOST_NAMES)]
        except FileNotFoundError:
            return 0, 0
        except OSError as error:  # its user has put something else there
            self._warn(job_id, error)
            return 0, 0
        self._claimed[job_id] = max((int(name[:-6]) for name in names if EPOCH_FILE.fullmatch(name)), default=0)
        return self._claimed[job_id], len(names)

    def started(self, job_id: str, epoch: int) -> Started | None:
        """What the run of this epoch reported when it began; None: it has not reported yet."""
        return self._newest.get(job_id) if self._started_epoch.get(job_id) == epoch else None

    def newest_epoch(self, job_id: str) -> int | None:
        """Epoch of the newest run that has reported its beginning."""
        return self._started_epoch.get(job_id)

    def answered(self, job_id: str, request_id: str) -> float | None:
        """When the job reported that it had served this request, by its node's clock; None: it has not."""
        answer = self._checkpoints.get(job_id)
        return answer[1] if answer is not None and answer[0] == request_id else None

    def refused(self, job_id: str, request_id: str) -> tuple[str, int]:
        """Why the job could not serve this request for a checkpoint, and how many requests in a row were in vain.

        The reason is empty if the job has not answered.
        """
        failures = self._failures.get(job_id, {})
        return failures.get(request_id, ""), len(failures)

    def has_left(self, job_id: str, restarts: int, nodes: Collection[str]) -> bool:
        """Whether the processes of this run of Slurm's have ended on all these nodes."""
        return all(os.path.lexists(left_file(self.folder, job_id, restarts, node)) for node in nodes)

    def catches_up(self, job_id: str) -> bool:
        """Whether the last reports of this job may have been read by an earlier daemon, or all came before the first look."""
        return job_id in self._older

    def ended(self, job_id: str) -> bool:
        """Whether the newest run has reported that the job is over, completed or failed."""
        return job_id in self._ended and self._ended[job_id] == self._started_epoch.get(job_id)

    def forget(self, keep: set[str], there: Collection[str] = ()) -> None:
        """Forget all jobs but these, except the control messages of those that are still `there`."""
        self._unknown &= keep
        self._unreadable &= keep
        if self._inbox is not None:
            self._inbox.forget(keep)
            for job_id in self._controls.keys() - keep - {*there}:
                if self._controls.pop(job_id) is not None:
                    self._on_disk.add(job_id)
        for key in [key for key in self._offsets if key[0] not in keep]:
            del self._offsets[key]
            self._partial.pop(key, None)
            self._sizes.pop(key, None)
        self._older &= keep
        for table in (self._claimed, self._newest, self._started_epoch, self._checkpoints, self._failures, self._ended):
            for job_id in [job_id for job_id in table if job_id not in keep]:
                del table[job_id]

    def _read_run(self, job_id: str, epoch: int, owner: int | None, most: int) -> list[Report]:
        key = (job_id, epoch)
        path = reports_file(self.folder, job_id, epoch)
        try:
            opened = open_regular(path, owner)
        except OSError as error:
            log.debug("reports unreadable", extra={"job": job_id, "text": str(error)})
            return []
        with opened as file:
            offset = self._offsets.get(key, 0)
            file.seek(offset)
            fresh = file.read(most)
            size = self._sizes.setdefault(key, os.fstat(file.fileno()).st_size)
        (self._older.add if offset < size else self._older.discard)(job_id)
        self._offsets[key] = offset + len(fresh)
        if fresh and (control := self.control(job_id)) is not None and epoch < control.epoch:
            log.warning("report of a superseded run ignored", extra={"job": job_id, "epoch": epoch})
            return []
        *lines, rest = (self._partial.get(key, b"") + fresh).split(b"\n")
        self._partial[key] = rest if len(rest) <= MAX_REPORT_BYTES else b""
        likely = [line for line in lines if MIN_REPORT_BYTES <= len(line) <= MAX_REPORT_BYTES]
        found, ignored, why = [], len(lines) - len(likely), "a line is shorter or longer than any report"
        for line in likely:
            try:
                found.append(self._parse(job_id, epoch, line))
            except ValueError as error:
                ignored, why = ignored + 1, str(error)[:200]
        if ignored:  # logged once: a job may write a million such lines
            log.warning("report ignored", extra={"job": job_id, "epoch": epoch, "lines": ignored, "text": why})
        return found

    def _parse(self, job_id: str, epoch: int, line: bytes) -> Report:
        """A line of a reports file. Raises ValueError if it is no report of this run."""
        report = read(Report, line)
        if (report.job_id, report.epoch) != (job_id, epoch):
            raise ValueError(f"it names job {report.job_id}, epoch {report.epoch}")
        check_plausible(report)
        self._changed.add(job_id)
        if isinstance(report.body, Started):
            self._newest[job_id], self._started_epoch[job_id] = report.body, epoch
        elif isinstance(report.body, Checkpointed):
            self._failures.pop(job_id, None)
            if report.body.request is not None:
                self._checkpoints[job_id] = (report.body.request, report.time_s)
        elif isinstance(report.body, SaveFailed) and report.body.request is not None:
            self._failures.setdefault(job_id, {}).setdefault(report.body.request, report.body.text)
        elif isinstance(report.body, Ended) and report.body.outcome in ("completed", "failed"):
            self._ended[job_id] = epoch
        return report


ACL = "system.posix_acl_access"

_VERSION = 2
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF


def let_only(spool: Path, job_id: str, uid: int) -> None:
    """Give a job's folder these rights, and its user the folder of its reports. A running job keeps what it needs meanwhile.

    A daemon that is not root can only let its own user in, or, where there are access control lists, others.

    Raises OSError: one of the two is missing or no folder, or has a link in its place.
    """
    top = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        job = open_folder(job_id, top)
        try:
            reports = open_folder("reports", job)
            try:
                _give(job, reports, uid)
            finally:
                os.close(reports)
        finally:
            os.close(job)
    finally:
        os.close(top)


def _give(job: int, reports: int, uid: int) -> None:
    about = os.fstat(reports)
    if uid == os.geteuid():
        wanted = ((job, 0o700), (reports, 0o700))
        for folder, mode in wanted:
            if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
                os.fchmod(folder, mode)
    elif os.geteuid() == 0:
        if about.st_uid == uid and not about.st_mode & 0o077:
            return
        if not _list(job, uid, 0o5):
            with contextlib.suppress(KeyError):
                os.fchown(job, 0, pwd.getpwuid(uid).pw_gid)
                os.fchmod(job, 0o750)
        os.fchown(reports, uid, -1)
        os.fchmod(reports, 0o700)
    elif stat.S_IMODE(about.st_mode) != 0o770 and _list(reports, uid, 0o7):
        _list(job, uid, 0o5)


def _list(folder: int, uid: int, rights: int) -> bool:
    """Let the owner and this user into a folder, and nobody else. Returns whether the file system can."""
    entries = (
        (_OWNER, 0o7, _NO_ID),
        (_USER, rights, uid),
        (_GROUP, 0, _NO_ID),
        (_MASK, rights, _NO_ID),
        (_OTHERS, 0, _NO_ID),
    )
    try:
        os.setxattr(folder, ACL, struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *each) for each in entries))
    except OSError:
        return False
    return stat.S_IMODE(os.fstat(folder).st_mode) == 0o700 | rights << 3
