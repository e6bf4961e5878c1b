"""Holds: who keeps a pending job from being started, and how it is released.

Penstock itself holds jobs in Slurm between their runs. It notes that in the job's control message before it does so
(`ControlMessage.holds`), so a hold without the note is somebody else's: an admin's, the user's or Slurm's own. Such a job stays
held until it is released. A job that has never run is held by its submission.

`penstock hold` and `penstock release` leave a file for the round loop, which alone writes control messages and acts.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.files import save_whole
from penstock_profiles.wire import ControlMessage, job_folder
from penstock_scheduler.errors import StoreError
from penstock_scheduler.model import JobId
from penstock_scheduler.spool import Spool
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.states import WAITING

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

    def __init__(self, spool: Path) -> None:
        self._folder = spool / FOLDER
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
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"{job}.released").unlink(missing_ok=True)
            save_whole(self._folder / f"{job}.held", json.dumps({"by": by, "admin": admin}))
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; no job can be held until this is fixed") from None

    def asked(self, job: JobId) -> AskedHold | None:
        """The hold of a job that was asked for; None: there is none."""
        return self._read(job) if (self._folder / f"{job}.held").exists() else None

    def release(self, job: JobId) -> None:
        """Ask for a release."""
        job_folder(self._folder, job)
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"{job}.held").unlink(missing_ok=True)
            save_whole(self._folder / f"{job}.released", "")
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; no job can be released until this is fixed") from None

    def forget(self, job: JobId) -> None:
        """Remove the files of a job: its release was carried out, or it has ended."""
        for kind in ("held", "released"):
            with contextlib.suppress(OSError):
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


def mark(spool: Spool, job: SlurmJob, restarts: int | None) -> None:
    """Note in the job's control message up to which restarts its holds are Penstock's own. Raises StoreError."""
    control = spool.control(job.id)
    if control is None:
        control = ControlMessage(
            job_id=job.id,
            epoch=spool.newest_epoch(job.id) or 0,
            round=0,
            submitted_s=job.submit_s,
            submitted_to=job.partition[0],
        )
    if control.holds != restarts:
        spool.tell(control.model_copy(update={"holds": restarts}), job.uid)
