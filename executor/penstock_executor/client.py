"""The job's side of the spool: reports what a run does, and reads what the daemon asks of it. Without a spool, over
HTTP.

Training has priority over reporting: nothing here raises into the training loop or waits for the daemon. See
`penstock_profiles.wire` for the messages and the spool.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock_executor.checkpoint import epoch_folder, newest_epoch
from penstock_executor.environment import Environment, read_environment
from penstock_profiles.wire import (
    MAX_REPORT_BYTES,
    VERSION,
    Body,
    ControlMessage,
    Ended,
    Observation,
    Report,
    Request,
    Result,
    claimed_epochs,
    control_file,
    inbox_folder,
    left_file,
    read,
    reports_file,
    reports_folder,
)

if TYPE_CHECKING:
    from penstock_executor.post import Post

log = logging.getLogger(__name__)

WAITING_REPORTS = 256
"""The most reports kept while the spool cannot be written. If there are more, the oldest are dropped."""

PER_S = 10.0
"""The most observations and results per second that a run may report on average. If there are more, the newest are
dropped: the daemon reads reports twice a minute."""

BURST = 300
"""The most observations and results that a run may report at once."""

FIRST_REPORT_S = 5.0
"""Time from the start of a run to its first observation. It is short because policy `sia` may run a job just to measure
it."""

MAX_TEXT = 2_000
"""Most characters of a text for people; a traceback can be long."""

CLOSE_S = 4.0
"""How long the end of a run waits for a daemon that does not answer."""


def connect(checkpoints: Path | None = None, environment: Environment | None = None) -> Client:
    """Connect this run to the daemon and claim an epoch for it. Only one process of the job calls this: its first rank.

    The epoch is the one that the daemon assigned. If a run has had that epoch or a later one, it is the first epoch
    after all that the spool and the folder `checkpoints` contain. It is claimed in both, so that no two runs have the
    same epoch. Without a spool it comes from `checkpoints` alone, and reports go over HTTP, or nowhere. Without either
    it is 1.

    Args:
        checkpoints: the folder of the run's `Checkpoints`. It is made if it does not exist.
        environment: None: this process's own.

    Raises:
        EnvironmentDisagrees: see `read_environment`.
        OSError: `checkpoints` cannot be made.
    """
    environment = read_environment() if environment is None else environment
    job = _Job.of(environment)
    epoch = 0
    while True:
        known = [epoch, newest_epoch(checkpoints) if checkpoints else 0, job.newest_claimed() if job else 0]
        epoch = max(max(known) + 1, job.assigned_epoch() if job else 0)
        try:
            if job is not None:
                job.claim(epoch)
            if checkpoints is not None:
                epoch_folder(checkpoints, epoch).mkdir(parents=True)
        except FileExistsError:
            continue  # another run has claimed it meanwhile: try the next epoch
        except _SpoolUnusableError as error:
            way = "over HTTP" if environment.service is not None else "nowhere"
            log.warning("job=%s reports go %s: %s", environment.job_id, way, error)
            job, epoch = None, 0
            continue
        return Client(epoch, environment, job, checkpoints)


def present_request(environment: Environment) -> str | None:
    """Id of the daemon's present request, for any process of the job; None: there is none."""
    job = _Job.of(environment)
    control = job.control() if job is not None else None
    return control.request.id if control is not None and control.request is not None else None


def note_left(environment: Environment) -> None:
    """Note in the spool that all processes of the job on this node have ended. Slurm does not take the node before."""
    job = _Job.of(environment)
    if job is not None and environment.node is not None:
        with contextlib.suppress(OSError):
            left_file(job.spool, job.job_id, environment.restarts, environment.node).touch()


def report_killed(environment: Environment, text: str) -> None:
    """Report to the spool, from a process beside the run, that a process of the newest run was killed."""
    job = _Job.of(environment)
    if job is not None and (epoch := max(job.newest_claimed(), job.assigned_epoch())):
        with contextlib.suppress(FileExistsError, _SpoolUnusableError):
            job.claim(epoch)  # it was killed before the run could do that
        reconnect(epoch, environment=environment).close("failed", 0.0, text)


def reconnect(epoch: int, checkpoints: Path | None = None, environment: Environment | None = None) -> Client:
    """Continue a run that `connect` began in another process: for commands that each report one thing and exit.

    Args:
        epoch: the epoch that `connect` claimed.
        checkpoints: as for `connect`.
        environment: as for `connect`.
    """
    environment = read_environment() if environment is None else environment
    client = Client(epoch, environment, _Job.of(environment), checkpoints)
    client.number_after(client.reported())
    return client


class ReportSchedule:
    """When a run reports: 5 s after its start, then after another 10 s, 20 s, and so on, up to every `every_s`
    seconds."""

    def __init__(self, every_s: float, now_s: float) -> None:
        self._every_s, self._pause_s, self._last_s = every_s, min(FIRST_REPORT_S, every_s), now_s

    def due(self, now_s: float) -> bool:
        """Whether to report now. If so, the next pause begins."""
        if now_s - self._last_s < self._pause_s:
            return False
        self._last_s, self._pause_s = now_s, min(2 * self._pause_s, self._every_s)
        return True


class Client:
    """One run's connection to the daemon; `connect` makes it."""

    def __init__(self, epoch: int, environment: Environment, job: _Job | None, checkpoints: Path | None) -> None:
        self.epoch = epoch
        self.environment = environment
        self._job = job
        self._checkpoints = checkpoints
        self._sequence = 0
        self._waiting: deque[bytes] = deque(maxlen=WAITING_REPORTS)
        self._torn = False
        self._failing = False
        self._last_request: str | None = None
        self._superseded = False
        self._closed = False
        self._left, self._asked_s = float(BURST), time.monotonic()
        self._post: Post | None = None
        if job is None and environment.service is not None and environment.job_id is not None:
            from penstock_executor.post import Post  # HTTP and TLS take a while to import

            self._post = Post(environment.service, environment.job_id, epoch)
            # A run that does not see the spool may have the epoch of an earlier run; its sequence numbers must differ.
            self._sequence = time.time_ns() // 1_000_000 % 2**31

    @property
    def has_daemon(self) -> bool:
        """Whether reports go to a daemon: in a job of a site with Penstock."""
        return self._job is not None or self._post is not None

    def reported(self) -> list[Body]:
        """What this run has reported so far, read from the spool; empty without a spool."""
        if self._job is None:
            return []
        found = []
        with contextlib.suppress(OSError):
            for line in self._job.read_reports(self.epoch).splitlines():
                with contextlib.suppress(ValueError):
                    found.append(read(Report, line).body)
        return found

    def number_after(self, reported: list[Body]) -> None:
        """Number the next reports as those that follow `reported`."""
        self._sequence += len(reported)

    def report(self, body: Body) -> None:
        """Send a report to the daemon. Never raises: a report that cannot be written now is retried with the next
        one."""
        job_id = self._job.job_id if self._job is not None else self.environment.job_id
        if (self._job is None and self._post is None) or job_id is None or self._closed or not self._may(body):
            return
        report = Report(job_id=job_id, epoch=self.epoch, sequence=self._sequence, time_s=time.time(), body=body)
        line = report.model_dump_json().encode() + b"\n"
        if len(line) > MAX_REPORT_BYTES:
            log.warning("job=%s kind=%s bytes=%d too long for a report: dropped", job_id, body.kind, len(line))
            return
        self._sequence += 1
        if self._post is not None:
            self._post.put(report)
            return
        self._waiting.append(line)
        self._write_waiting()

    def poll(self, *, suspends: bool = False) -> Request | None:
        """The daemon's request, each only once; None if there is no new one. Cheap enough to be called at every step.

        Args:
            suspends: whether the caller can move off its GPUs. If not, requests to do so are not returned.
        """
        control = self._job.control() if self._job is not None else None
        request = control.request if control is not None and control.epoch <= self.epoch else None
        if request is None or request.id == self._last_request or (request.kind == "suspend" and not suspends):
            return None
        self._last_request = request.id
        return request

    @property
    def superseded(self) -> bool:
        """Whether a later run of the job exists. If so, this run must stop and write nothing more."""
        self._superseded = self._superseded or (self._post is not None and self._post.superseded)
        self._superseded = self._superseded or self.epoch < max(self._later_epochs(), default=0)
        return self._superseded

    def close(
        self, outcome: Literal["completed", "stopped", "superseded", "failed"], progress: float, text: str = ""
    ) -> None:
        """Report the end of the run, with its progress in samples. Later reports are dropped; a second call does
        nothing."""
        self.report(Ended(outcome=outcome, progress=progress, text=text[:MAX_TEXT]))
        self._closed = True
        self.flush()

    def flush(self) -> None:
        """Before the process ends, wait at most `CLOSE_S` until the reports over HTTP have arrived."""
        if self._post is not None:
            self._post.close(CLOSE_S)

    def _may(self, body: Body) -> bool:
        """Whether the rate limit allows the report. It covers observations and results, since the others are few."""
        now_s = time.monotonic()
        self._left = min(self._left + (now_s - self._asked_s) * PER_S, BURST)
        self._asked_s = now_s
        if not isinstance(body, Observation | Result):
            return True
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _later_epochs(self) -> Iterator[int]:
        if self._checkpoints is not None:
            yield newest_epoch(self._checkpoints)
        if self._job is not None:
            yield self._job.assigned_epoch()
            yield self._job.newest_claimed()

    def _write_waiting(self) -> None:
        """Append waiting reports to the spool, each with a single write."""
        assert self._job is not None
        try:
            with self._job.open_reports(self.epoch) as descriptor:
                while self._waiting:
                    # After a line that a full disk cut short, begin a new line, so that readers skip only that one.
                    line = b"\n" * self._torn + self._waiting[0]
                    written = os.write(descriptor, line)
                    if written:
                        self._torn = written < len(line)
                    if self._torn:
                        raise OSError(errno.ENOSPC, "the disk is full, a report was cut short", str(self._job.spool))
                    self._waiting.popleft()
            self._failing = False
            self._job.announce()
        except OSError as error:
            if not self._failing:
                log.warning(
                    "job=%s epoch=%d reports wait until the spool can be written: %s",
                    self._job.job_id,
                    self.epoch,
                    error,
                )
            self._failing = True


class _SpoolUnusableError(Exception):
    """No epoch can be claimed in the spool."""


class _Job:
    """One job's folder in the spool."""

    def __init__(self, spool: Path, job_id: str) -> None:
        self.spool = spool
        self.job_id = job_id
        self._control_file = control_file(spool, job_id)
        self._control: ControlMessage | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._complained = False

    @classmethod
    def of(cls, environment: Environment) -> _Job | None:
        """The job's folder; None outside Slurm or without a spool."""
        if environment.spool is None or environment.job_id is None:
            return None
        element = environment.array_element
        if element is not None:
            ours = cls(environment.spool, element).control()
            if ours is not None and ours.slurm_job == environment.job_id:
                return cls(environment.spool, element)
        return cls(environment.spool, environment.job_id)

    def control(self) -> ControlMessage | None:
        """The daemon's present control message; None if there is none or it is broken. Read only if the file has
        changed."""
        try:
            status = self._control_file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                control = read(ControlMessage, self._control_file.read_bytes())
                self._control, self._stamp = (control if control.job_id == self.job_id else None), stamp
        except FileNotFoundError:
            self._control, self._stamp = None, None
        except (OSError, ValueError) as error:
            self._complain(error)
        return self._control

    def assigned_epoch(self) -> int:
        """Epoch of the newest run that the daemon has started; 0 if there is no control message."""
        control = self.control()
        return control.epoch if control is not None else 0

    def newest_claimed(self) -> int:
        """The highest epoch that a run has claimed in the spool; 0 if there is none, or the spool cannot be read."""
        try:
            return max(claimed_epochs(self.spool, self.job_id), default=0)
        except OSError:
            return 0

    def claim(self, epoch: int) -> None:
        """Claim the epoch for this run. Raises FileExistsError if another run has claimed it, or
        _SpoolUnusableError."""
        reports = reports_folder(self.spool, self.job_id)
        try:
            # Do not make the spool itself: a mount point without its file system must stay empty.
            reports.parent.mkdir(exist_ok=True)
            reports.mkdir(exist_ok=True)
        except OSError as error:
            raise _SpoolUnusableError(str(error)) from error
        try:
            os.close(os.open(self._reports(epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            raise
        except OSError as error:
            raise _SpoolUnusableError(str(error)) from error

    @contextlib.contextmanager
    def open_reports(self, epoch: int) -> Iterator[int]:
        """The run's reports file, to append to. It is opened for each report, since the spool may be mounted again."""
        descriptor = os.open(self._reports(epoch), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def announce(self) -> None:
        """Tell the daemon that there are new reports. Without this, it finds them later."""
        path = inbox_folder(self.spool) / self.job_id
        with contextlib.suppress(OSError):  # an older daemon has no such folder
            # Not O_EXCL: a file system with a cache may show a file that the daemon has taken away already.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644))

    def read_reports(self, epoch: int) -> bytes:
        """All lines of a run."""
        return self._reports(epoch).read_bytes()

    def _reports(self, epoch: int) -> Path:
        return reports_file(self.spool, self.job_id, epoch)

    def _complain(self, error: Exception) -> None:
        """Log that the control message cannot be read. A newer version of Penstock is logged once, as a warning."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self._control_file.read_bytes())
            version = content.get("version") if isinstance(content, dict) else None
            if isinstance(version, int) and version > VERSION and not self._complained:
                log.warning(
                    "job=%s control.json has version %d, and this Penstock reads version %d: update the job's Penstock",
                    self.job_id,
                    version,
                    VERSION,
                )
                self._complained = True
                return
        log.debug("job=%s control.json ignored until it is whole: %s", self.job_id, error)
