"""Holds: who keeps a pending job from being started, and how it is released.

Penstock itself holds jobs in Slurm between their runs. It notes that in the job's control message before it does so
(`ControlMessage.holds`), so a hold without the note is somebody else's: an admin's, the user's or Slurm's own. Such a job stays
held until it is released. A job that has never run is held by its submission.

`penstock hold` and `penstock release` leave a file for the round loop, which alone writes control messages and acts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.files import save_whole
from penstock_profiles.wire import ControlMessage, job_folder
from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.model import JobId
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store.leadership.lease import ALONE
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import Gateway, SlurmError, SlurmJob
from penstock_slurm.gateway.base import WAITING, Write
from penstock_slurm.jobs.notes import plain_shape
from penstock_slurm.jobs.states import HOLDING

log = logging.getLogger(__name__)

FOLDER = "holds"
"""In the spool: a file JOB.held for each job that `penstock hold` holds, and JOB.released for each that it is to release."""

ADMIN = "JobHeldAdmin"
"""Slurm's reason for a hold by root, SlurmUser or an operator. Penstock's own holds are user holds."""

USER = "JobHeldUser"

BY_SLURM = frozenset({"RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""Slurm's states of jobs that wait for a release, and that Penstock never asks for."""


@dataclass(frozen=True, slots=True)
class AskedHold:
    """A hold by `penstock hold`."""

    by: str
    """The user that asked for it."""
    admin: bool
    """Whether only an admin may release it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `penstock hold` and `penstock release` asked for."""

    held: dict[JobId, AskedHold]
    released: frozenset[JobId]


class HoldFiles:
    """The files in the spool. Raises StoreError if they cannot be written."""

    def __init__(self, spool: Path, leadership: Leadership = ALONE) -> None:
        self._folder, self._leadership = spool / FOLDER, leadership
        self._known: dict[str, AskedHold] = {}

    def read(self) -> Asked:
        """What was asked for. One listing of a folder, and each file is read once."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            names = []
        held, released = {}, set()
        for name in names:
            job, _, kind = name.rpartition(".")
            if kind == "released":
                released.add(job)
            elif kind == "held":
                held[job] = self._known.get(job) or self._read(job)
        self._known = held
        return Asked(dict(held), frozenset(released))

    def hold(self, job: JobId, by: str, *, admin: bool) -> None:
        """Ask for a hold."""
        job_folder(self._folder, job)
        try:
            with self._leadership.write("spool", f"hold of job {job}"):
                self._make()
                (self._folder / f"{job}.released").unlink(missing_ok=True)
                save_whole(self._folder / f"{job}.held", json.dumps({"by": by, "admin": admin}))
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; no job can be held until this is fixed") from None

    def _make(self) -> None:
        """Make the folder, for the daemon alone: it says who holds which job."""
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o700)

    def asked(self, job: JobId) -> AskedHold | None:
        """The hold of a job that was asked for; None: there is none."""
        return self._read(job) if (self._folder / f"{job}.held").exists() else None

    def release(self, job: JobId) -> None:
        """Ask for a release."""
        job_folder(self._folder, job)
        try:
            with self._leadership.write("spool", f"release of job {job}"):
                self._make()
                (self._folder / f"{job}.held").unlink(missing_ok=True)
                save_whole(self._folder / f"{job}.released", "")
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; no job can be released until this is fixed") from None

    def forget(self, job: JobId) -> None:
        """Remove the files of a job: its release was carried out, or it has ended."""
        for kind in ("held", "released"):
            if not (self._folder / f"{job}.{kind}").exists():
                continue
            with contextlib.suppress(OSError), self._leadership.write("spool", f"{job}.{kind} taken"):
                (self._folder / f"{job}.{kind}").unlink(missing_ok=True)

    def _read(self, job: JobId) -> AskedHold:
        try:
            found = json.loads((self._folder / f"{job}.held").read_bytes())
            return AskedHold(str(found["by"]), bool(found["admin"]))
        except (OSError, ValueError, KeyError, TypeError):
            return AskedHold("an unknown user", admin=True)  # in doubt, it stays held


def is_held(job: SlurmJob) -> bool:
    """Whether a pending job waits for a release in Slurm."""
    return job.state in WAITING and (job.priority == 0 or job.state in BY_SLURM)


def held_meanwhile(job: SlurmJob) -> bool:
    """Whether somebody has held a job that runs, so that it is to stay held after its run.

    Every suspended job has priority 0 in Slurm, so that only the reason tells of a hold. A resume gives the job a priority again
    and leaves the reason.
    """
    return job.reason in (ADMIN, USER) or (job.priority == 0 and job.state != "SUSPENDED")


def came_too_late(job: SlurmJob, control: ControlMessage | None) -> bool:
    """Whether the hold of a job that runs is Penstock's own: Slurm had started the job when it arrived."""
    return control is not None and control.holding == job.restarts and job.state in HOLDING and job.reason == USER


def foreign_hold(job: SlurmJob, control: ControlMessage | None) -> bool:
    """Whether somebody else than Penstock holds a job in Slurm.

    Slurm 22.05 shows an admin's hold of a job that was held with a user hold (JobHeldAdmin in place of JobHeldUser), but no hold
    of a job that requeuehold holds already.
    """
    if not is_held(job):
        return False
    if job.reason == ADMIN or job.state in BY_SLURM:
        return True
    if control is None:
        return "requeued" in job.reason  # its submission held it, and Penstock never stopped it
    if "holds" not in control.model_fields_set:
        return False  # an older daemon wrote the message
    if control.nodes is not None and job.restarts == 0 and not job.required_nodes and plain_shape(job) is None:
        return (
            False  # slurmctld was killed and forgot that Penstock sent the job to nodes: the hold is its submission's
        )
    return control.holds is None or control.holds < job.restarts


def held_text(job: SlurmJob, control: ControlMessage | None, asked: AskedHold | None) -> str:
    """Who holds a pending job, as far as Slurm tells, and how it is released; empty: nobody but Penstock."""
    if asked is not None:
        who = f"{asked.by} ({'an admin' if asked.admin else 'its user'})"
        return f"is held by {who} with `penstock hold`; release it with `penstock release {job.id}`"
    if not foreign_hold(job, control):
        return ""
    remedy = f"release it with `penstock release {job.id}`"
    if job.reason == ADMIN:
        return f"is held by an admin in Slurm ({ADMIN}); an admin can {remedy}"
    if job.reason == USER:
        return f"is held in Slurm with a user hold ({USER}); {remedy}"
    why = job.reason.replace("_", " ") or job.state
    return f"is held in Slurm ({why}); look for the cause, then {remedy}"


def mark(spool: Spool, job: SlurmJob, restarts: int | None, **also: int) -> None:
    """Note in the job's control message up to which restarts its holds are Penstock's own, and `also`. Raises StoreError."""
    control = spool.control(job.id)
    if control is None:
        control = ControlMessage(
            job_id=job.id,
            epoch=spool.newest_epoch(job.id) or 0,
            round=0,
            submitted_s=job.submit_s,
            submitted_to=job.partition[0],
        )
    told = control.model_copy(update={"holds": restarts, **also})
    if told != control:
        spool.tell(told, job.uid)


class Holds:
    """Carries out holds and releases, a step in each observation."""

    def __init__(self, gateway: Gateway, spool: Spool) -> None:
        self._gateway, self._spool = gateway, spool
        self._files = HoldFiles(spool.folder, spool.leadership)
        self._asked = Asked({}, frozenset())
        self._to_hold: list[SlurmJob] = []
        """Jobs that `penstock hold` holds, and Slurm does not hold yet."""
        self._to_keep_back: list[SlurmJob] = []

    def look(self) -> None:
        """Read what was asked for."""
        self._asked, self._to_hold, self._to_keep_back = self._files.read(), [], []

    def keep_back(self, job: SlurmJob) -> None:
        """Hold a pending job that Slurm may start, as Penstock's own hold."""
        self._to_keep_back.append(job)

    @property
    def asked_for(self) -> set[JobId]:
        """The jobs for which a hold or a release was asked."""
        return {*self._asked.held, *self._asked.released}

    def settle(self, job: SlurmJob, control: ControlMessage | None) -> bool:
        """Carry out a release, and note whose the holds of a job are. Returns whether its control message may have changed."""
        if job.id in self._asked.released:
            self._release(job)
            return True
        if job.state in WAITING and not is_held(job) and control is not None and control.holds == job.restarts:
            mark(self._spool, job, None)  # Slurm has released it: what holds it from now on is not Penstock's
            return True
        if control is not None and control.holding == job.restarts and job.state == "RUNNING":
            return self._take_back(job, control)
        return False

    def _take_back(self, job: SlurmJob, control: ControlMessage) -> bool:
        """Release a running job from a hold of Penstock's that came too late. Later holds of the run are somebody's."""
        if came_too_late(job, control) and job.id not in self._asked.held:
            try:
                self._gateway.release(job.id)
            except SlurmError as error:
                log.warning("cannot take a hold back", extra={"job": job.id, "text": str(error)})
                return False
        self._spool.tell(control.model_copy(update={"holding": None}), job.uid)
        return True

    def text(self, job: SlurmJob, control: ControlMessage | None) -> str:
        """Who holds a pending job, and how it is released; empty: nobody but Penstock, or the job is not pending."""
        asked = self._asked.held.get(job.id)
        if asked is not None and job.priority != 0 and job.state in WAITING | HOLDING:
            self._to_hold.append(job)
        return held_text(job, control, asked) if job.state in WAITING else ""

    def carry_out(self) -> None:
        """Hold jobs in Slurm that `penstock hold` holds and that Slurm might start: also a running one, if Slurm requeues it."""
        for job in self._to_hold:
            try:
                if job.state in WAITING:
                    mark(self._spool, job, job.restarts)
                self._gateway.hold(job.id)
            except SlurmError as error:
                log.warning("cannot hold the job", extra={"job": job.id, "text": str(error)})
        for job in self._to_keep_back:
            mark(self._spool, job, job.restarts, holding=job.restarts)
        held = self._gateway.write([Write(job.id, "hold") for job in self._to_keep_back])
        for job, refused in zip(self._to_keep_back, held, strict=True):
            if refused is not None:
                log.info("cannot keep the job back", extra={"job": job.id, "text": str(refused)})

    def forget(self, gone: Collection[JobId]) -> None:
        """Forget what was asked for jobs that are gone."""
        for job_id in (self._asked.held.keys() | self._asked.released) & set(gone):
            self._files.forget(job_id)

    def _release(self, job: SlurmJob) -> None:
        """What holds the job from now on is Penstock's own, so that a round may start it."""
        try:
            if job.state in WAITING:
                mark(self._spool, job, job.restarts)
            if is_held(job) and job.reason == ADMIN:
                self._gateway.hold(job.id)  # a user hold in its place; a release in Slurm might start it
            elif job.state in HOLDING | BY_SLURM and job.priority == 0:
                self._gateway.release(job.id)
        except SlurmError as error:
            log.warning("cannot release the job", extra={"job": job.id, "text": str(error)})
            return
        self._files.forget(job.id)
