"""Holds: who keeps a pending job from being started, and how it is released.

Penstock itself holds jobs in Slurm between their runs. It notes that in the job's control message before it does so
(`ControlMessage.holds`), so a hold without the note is somebody else's: an admin's, the user's or Slurm's own. Such a job stays
held until it is released; only an admin releases what an admin holds. A job that has never run is held by its submission.

`penstock hold` and `penstock release` leave a file for the round loop, which alone writes control messages and acts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_profiles.files import save_whole
from penstock_profiles.wire import ControlMessage, job_folder
from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.model import JobId
from penstock_scheduler.people.errors import BadJobSpec, StoreError
from penstock_scheduler.store.leadership.lease import ALONE
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmWriter
from penstock_slurm.gateway.base import ADMIN, WAITING, Write
from penstock_slurm.jobs.messages import in_turn
from penstock_slurm.jobs.notes import never_satisfied, plain_shape
from penstock_slurm.jobs.states import HOLDING, LEAVING

log = logging.getLogger(__name__)

FOLDER = "holds"
"""In the spool: a file JOB.held for each job that `penstock hold` holds, JOB.released for each that is to be released, and
JOB.by-admin for each that an admin has held in Slurm while it ran. Slurm forgets whose that hold is when the job is stopped."""

KINDS = ("held", "released", "by-admin")

USER = "JobHeldUser"

BY_SLURM = frozenset({"RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""Slurm's states of jobs that wait for a release, and that Penstock never asks for."""

MOST_HOLDS = 200
"""Jobs that `penstock hold` holds and that are held in Slurm in one observation. The others come in the next ones."""

MOST_RELEASES = 20
"""Jobs of a user for which Slurm is asked for a release in one observation: each is a process of its own."""


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
    released: dict[JobId, bool]
    """Whether an admin asked, who may also lift an admin's hold."""
    by_admin: frozenset[JobId] = frozenset()
    """Jobs that an admin has held in Slurm while they ran."""


class HoldFiles:
    """The files in the spool. Raises StoreError if they cannot be written.

    Several threads may ask at once: nothing that a user asks for takes the place of an admin's hold.
    """

    def __init__(self, spool: Path, leadership: Leadership = ALONE) -> None:
        self._folder, self._leadership = spool / FOLDER, leadership
        self._known: dict[str, AskedHold] = {}
        self._lock = threading.Lock()

    def read(self) -> Asked:
        """What was asked for. One listing of a folder, and each file is read once."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            names = []
        held, released, by_admin = {}, dict[JobId, bool](), set[JobId]()
        for name in names:
            job, _, kind = name.rpartition(".")
            if kind == "released":
                released[job] = self._released_by_admin(job)
            elif kind == "held":
                held[job] = self._known.get(job) or self._read(job)
            elif kind == "by-admin":
                by_admin.add(job)
        self._known = held
        return Asked(dict(held), released, frozenset(by_admin))

    def hold(self, job: JobId, by: str, *, admin: bool) -> None:
        """Ask for a hold. An admin's hold stays as it is, unless an admin asks."""
        job_folder(self._folder, job)
        try:
            with self._lock, self._leadership.write("spool", f"hold of job {job}"):
                self._make()
                before = self.asked(job)
                if before is not None and before.admin and not admin:
                    return
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

    def release(self, job: JobId, *, admin: bool = False) -> None:
        """Ask for a release. Raises BadJobSpec if an admin holds the job, and no admin asks."""
        job_folder(self._folder, job)
        try:
            with self._lock, self._leadership.write("spool", f"release of job {job}"):
                self._make()
                before = self.asked(job)
                if before is not None and before.admin and not admin:
                    raise BadJobSpec(held_by_admin(job))
                (self._folder / f"{job}.held").unlink(missing_ok=True)
                save_whole(self._folder / f"{job}.released", json.dumps({"admin": admin}))
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; no job can be released until this is fixed") from None

    def forget(self, job: JobId, kinds: Sequence[str] = KINDS) -> None:
        """Remove files of a job: its release was carried out, or it has ended."""
        for kind in kinds:
            if not (self._folder / f"{job}.{kind}").exists():
                continue
            with contextlib.suppress(OSError), self._leadership.write("spool", f"{job}.{kind} taken"):
                (self._folder / f"{job}.{kind}").unlink(missing_ok=True)

    def note_admin(self, job: JobId) -> None:
        """Note that an admin has held a running job in Slurm."""
        try:
            with self._leadership.write("spool", f"an admin holds job {job}"):
                self._make()
                save_whole(self._folder / f"{job}.by-admin", "")
        except OSError as error:
            raise StoreError(f"{self._folder}: {error.strerror}; users can lift holds until this is fixed") from None

    def by_admin(self, job: JobId) -> bool:
        """Whether an admin has held the job in Slurm while it ran."""
        return (self._folder / f"{job}.by-admin").exists()

    def _read(self, job: JobId) -> AskedHold:
        try:
            found = json.loads((self._folder / f"{job}.held").read_bytes())
            return AskedHold(str(found["by"]), bool(found["admin"]))
        except (OSError, ValueError, KeyError, TypeError):
            return AskedHold("an unknown user", admin=True)  # in doubt, it stays held

    def _released_by_admin(self, job: JobId) -> bool:
        """Whether an admin asked for this release."""
        try:
            return json.loads((self._folder / f"{job}.released").read_bytes())["admin"] is True
        except (OSError, ValueError, KeyError, TypeError):
            return False  # an older daemon wrote it


def held_by_admin(job: JobId) -> str:
    """Why a user cannot release a job."""
    return f"an admin holds job {job}; ask an admin to release it"


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
    if not is_held(job) or never_satisfied(job):
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
    if "requeued" in job.reason and control.released == job.restarts:
        return False  # slurmctld was killed and forgot the release: a second stop would have made it one restart more
    return control.holds is None or control.holds < job.restarts


def held_text(job: SlurmJob, control: ControlMessage | None, asked: AskedHold | None, *, by_admin: bool) -> str:
    """Who holds a pending job, as far as Slurm tells, and how it is released; empty: nobody but Penstock."""
    if asked is not None:
        who = f"{asked.by} ({'an admin' if asked.admin else 'its user'})"
        return f"is held by {who} with `penstock hold`; release it with `penstock release {job.id}`"
    if not foreign_hold(job, control):
        return ""
    own, slurms = f"release it with `penstock release {job.id}`", f"`scontrol release {job.id}`"
    if job.reason == ADMIN:
        return f"is held by an admin in Slurm ({ADMIN}); an admin can {own} or {slurms}"
    if by_admin:
        return f"was held by an admin in Slurm while it ran; an admin can {own} or {slurms}"
    remedy = f"its user can {own}, an admin also with {slurms}"
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

    def __init__(self, writer: SlurmWriter, spool: Spool) -> None:
        self._writer, self._spool = writer, spool
        self._files = HoldFiles(spool.folder, spool.leadership)
        self._asked = Asked({}, {})
        self._to_hold: list[SlurmJob] = []
        """Jobs that `penstock hold` holds, and Slurm does not hold yet."""
        self._to_keep_back: list[SlurmJob] = []
        self._releases = Counter[int]()
        """User -> how often Slurm was asked for a release in this observation."""
        self.lifted: set[JobId] = set()
        """Running jobs whose hold was lifted in this observation. Their records still show it."""
        self._suspended: dict[JobId, int] = {}
        """Job that was last seen suspended, and held by no admin -> its restarts then."""

    def look(self) -> None:
        """Read what was asked for."""
        self._asked, self._to_hold, self._to_keep_back = self._files.read(), [], []
        self._releases.clear()
        self.lifted.clear()

    def keep_back(self, job: SlurmJob) -> None:
        """Hold a pending job that Slurm may start, as Penstock's own hold."""
        self._to_keep_back.append(job)

    @property
    def asked_for(self) -> set[JobId]:
        """The jobs for which a hold or a release was asked."""
        return {*self._asked.held, *self._asked.released}

    def settle(self, job: SlurmJob, control: ControlMessage | None) -> bool:
        """Carry out a release, and note whose the holds of a job are. Returns whether its control message may have changed."""
        if job.id in self._asked.released and job.id not in self._asked.held:
            self._release(job, admin=self._asked.released[job.id])
            return True
        self._note_admin(job)
        if self._lost_its_priority(job):
            self._release(job, admin=True)
            return True
        if job.state in WAITING and not is_held(job) and control is not None and control.holds == job.restarts:
            # Slurm has released it: what holds it from now on is not Penstock's.
            mark(self._spool, job, None, released=job.restarts)
            return True
        if control is not None and control.holding == job.restarts and job.state == "RUNNING":
            return self._take_back(job, control)
        return False

    def _lost_its_priority(self, job: SlurmJob) -> bool:
        """Whether a job was requeued while it was suspended. Slurm leaves it the priority 0 of the suspension, and shows that as
        an admin's hold. A daemon that has started since takes it for one."""
        if job.state == "SUSPENDED" and job.reason != ADMIN:
            self._suspended[job.id] = job.restarts
            return False
        if job.state in LEAVING:
            return False
        before = self._suspended.pop(job.id, None)
        return before is not None and before + 1 == job.restarts and is_held(job) and job.reason == ADMIN

    def _note_admin(self, job: SlurmJob) -> None:
        """Remember an admin's hold of a running job: once the job is stopped, Slurm shows only that somebody holds it."""
        noted = job.id in self._asked.by_admin
        if job.state in HOLDING and job.reason == ADMIN:
            if not noted:
                self._files.note_admin(job.id)
        elif noted and (job.state == "RUNNING" or (job.state in WAITING and not is_held(job))):
            self._files.forget(job.id, ["by-admin"])  # released in Slurm

    def _take_back(self, job: SlurmJob, control: ControlMessage) -> bool:
        """Release a running job from a hold of Penstock's that came too late. Later holds of the run are somebody's."""
        if came_too_late(job, control) and job.id not in self._asked.held:
            (error,) = self._writer.write([Write(job.id, "release")])
            if error is not None:
                log.warning("cannot take a hold back", extra={"job": job.id, "text": str(error)})
                return False
            self.lifted.add(job.id)
        self._spool.tell(control.model_copy(update={"holding": None}), job.uid)
        return True

    def text(self, job: SlurmJob, control: ControlMessage | None) -> str:
        """Who holds a pending job, and how it is released; empty: nobody but Penstock, or the job is not pending."""
        asked = self._asked.held.get(job.id)
        by_admin = job.state in HOLDING and job.reason == ADMIN  # a user hold would take the place of an admin's
        if asked is not None and job.priority != 0 and job.state in WAITING | HOLDING and not by_admin:
            self._to_hold.append(job)
        noted = job.id in self._asked.by_admin
        return held_text(job, control, asked, by_admin=noted) if job.state in WAITING else ""

    def carry_out(self) -> None:
        """Hold jobs in Slurm that `penstock hold` holds and that Slurm might start: also a running one, if Slurm requeues it."""
        asked = self._asked.held
        # A user hold in Slurm takes the place of an admin's. One whose user has released the job meanwhile must not.
        still = self._files.read().held if self._to_hold else asked
        self._to_hold = [job for job in self._to_hold if job.id in still]
        by_admins = in_turn((job for job in self._to_hold if asked[job.id].admin), MOST_HOLDS)
        by_users = in_turn((job for job in self._to_hold if not asked[job.id].admin), MOST_HOLDS)
        now = [*by_admins, *by_users][:MOST_HOLDS]
        for job in now:
            if job.state in WAITING:
                mark(self._spool, job, job.restarts)
        self._hold(now, logging.WARNING, "cannot hold the job")
        for job in self._to_keep_back:
            mark(self._spool, job, job.restarts, holding=job.restarts)
        self._hold(self._to_keep_back, logging.INFO, "cannot keep the job back")

    def _hold(self, jobs: Sequence[SlurmJob], level: int, failed: str) -> None:
        """Hold jobs in Slurm, through few processes."""
        for job, refused in zip(jobs, self._writer.write([Write(job.id, "hold") for job in jobs]), strict=True):
            if refused is not None:
                log.log(level, failed, extra={"job": job.id, "text": str(refused)})

    def forget(self, gone: Collection[JobId]) -> None:
        """Forget what was asked for jobs that are gone."""
        for job_id in gone:
            self._suspended.pop(job_id, None)
        for job_id in (self.asked_for | self._asked.by_admin) & set(gone):
            self._files.forget(job_id)

    def _release(self, job: SlurmJob, *, admin: bool) -> None:
        """What holds the job from now on is Penstock's own, so that a round may start it.

        A user's release may be carried out long after it was asked for. An admin who has held the job in Slurm since has the last
        word.
        """
        if (job.reason == ADMIN or job.id in self._asked.by_admin) and not admin:
            log.warning("a user's release came after an admin's hold", extra={"job": job.id, "user": job.user})
            self._files.forget(job.id, ["released"])
            return
        in_place = is_held(job) and job.reason == ADMIN  # a user hold in its place; a release in Slurm might start it
        if in_place or (job.state in HOLDING | BY_SLURM and job.priority == 0):
            if self._releases[job.uid] >= MOST_RELEASES:
                return
            self._releases[job.uid] += 1
        try:
            if job.state in WAITING:
                mark(self._spool, job, job.restarts)
            if in_place:
                self._writer.hold(job.id)
            elif job.state in HOLDING | BY_SLURM and job.priority == 0:
                (error,) = self._writer.write([Write(job.id, "release", admin_holds=admin)])
                if error is not None:
                    raise error
                self.lifted.add(job.id)
        except SlurmError as error:
            log.warning("cannot release the job", extra={"job": job.id, "text": str(error)})
            return
        self._files.forget(job.id, ["released", "by-admin"])


MOST = 20
"""Jobs at a time. Each takes a process."""


class LeftNodes:
    """Slurm keeps the nodes that Penstock sent a job to. When slurmctld starts or is reconfigured, it fails each job that names a
    node which is no longer in slurm.conf, waiting jobs too.
    """

    def __init__(self, writer: SlurmWriter) -> None:
        self._writer = writer
        self._done: dict[JobId, int] = {}
        """Job -> its restarts when the command was given, which is given once a run."""

    def clear(self, jobs: Sequence[SlurmJob], acted: Collection[JobId]) -> None:
        """Let jobs that are held after a run name no nodes.

        Args:
            jobs: managed jobs, and those that wait for something else than GPUs.
            acted: jobs that a round acts on, which get nodes next.
        """
        self._done = {job.id: self._done[job.id] for job in jobs if job.id in self._done}
        left = [
            job
            for job in jobs
            if job.held and job.required_nodes and job.restarts > self._done.get(job.id, 0) and job.id not in acted
        ]
        if not (due := in_turn(left, MOST)):
            return
        try:
            self._writer.name_no_nodes([job.id for job in due])
        except SlurmError as error:
            log.info("cannot take the nodes of former runs from jobs", extra={"jobs": len(due), "text": str(error)})
            return
        self._done |= {job.id: job.restarts for job in due}
