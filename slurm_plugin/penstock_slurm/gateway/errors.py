"""Slurm's errors, in classes by what the caller does differently, and the table from Slurm's messages to the classes."""

from __future__ import annotations

import logging
import re
from collections import Counter

from penstock_scheduler.people.errors import ConfigError, PenstockError

log = logging.getLogger(__name__)


class SlurmError(PenstockError):
    """A call to Slurm failed. `job_id` is "" if the call is not about a job. `text` is Slurm's message."""

    remedy = ""

    def __init__(self, text: str, *, command: str, job_id: str = "") -> None:
        self.text = text.strip()
        self.command = command
        self.job_id = job_id
        about = f" of job {job_id}" if job_id else ""
        super().__init__(f"{command}{about}: {self.text or 'failed without a message'}{self.remedy}")


class ControllerAway(SlurmError):
    """slurmctld, munged or slurm.conf cannot be reached. Nothing else will work either; try again next round."""

    remedy = "; check that slurmctld and munged run and that slurm.conf is the right one (`scontrol ping`)"


class AccountingAway(SlurmError):
    """slurmdbd cannot be reached. slurmctld continues with the limits that it knows, and so can everything else."""

    remedy = "; check that slurmdbd runs (`sacctmgr show cluster`)"


class JobGone(SlurmError):
    """The job has ended, or Slurm does not know it any more: forget it."""


class Refused(SlurmError):
    """Slurm refuses this, and would refuse it again."""


class Transient(SlurmError):
    """Slurm could not do this now. It may have taken effect or not: read the job, then try again."""

    at_once = True
    """Whether trying again may help a moment later."""


class TimedOut(Transient):
    """The command exceeded its time limit. It may have taken effect or not, and slurmctld may be down."""

    at_once = False
    output = ""
    """What it had printed on standard error by then."""


class Unregistered(Transient):
    """Slurm changes the job only once slurmdbd has registered it, and has waited 5 s for that. Nothing was done."""

    at_once = False
    remedy = (
        "; slurmdbd has not registered the job; Penstock tries again in a minute. If this goes on, slurmctld was stopped while "
        "it waited for slurmdbd: cancel the job and submit it again, or see docs/developer/slurm-gateway.md"
    )


class NotWaiting(Transient):
    """The job has started or ended since it was read. Nothing was done."""

    at_once = False

    def __init__(self, *, command: str, job_id: str) -> None:
        super().__init__("the job does not wait any more, so it stays as it is", command=command, job_id=job_id)


class HeldMeanwhile(Transient):
    """An admin has held the job since it was read. It stays as it is."""

    at_once = False

    def __init__(self, *, command: str, job_id: str) -> None:
        super().__init__("an admin holds the job by now, so it stays as it is", command=command, job_id=job_id)


class UnreadableAnswer(SlurmError):
    """A listing does not have the requested form: this Slurm is unknown to Penstock."""

    remedy = "; compare this Slurm's version with those in docs/developer/slurm-gateway.md"


class CommandsMissing(SlurmError, ConfigError):
    """Slurm's commands are not on this machine. The message has the remedy."""


NUMBER = re.compile(r"\d+(_\S+)?")
"""A number or an array's element in a message."""

# Part of Slurm's message, in lower case and with n for each number -> class, and where it was seen. Slurm's commands print no
# error numbers. "code": the number of the message in 22.05.8's slurm_strerror(). The first match counts. A write that fails with
# another message was refused.
MESSAGES: tuple[tuple[str, type[SlurmError], str], ...] = (
    ("failed to open persistent connection", AccountingAway, "22.05.8: sacctmgr; slurmdbd killed"),
    ("sending persistinit msg", AccountingAway, "22.05.8: sacctmgr; slurmdbd killed"),
    ("problem talking to the database", AccountingAway, "code 7000"),
    ("unable to contact slurm controller", ControllerAway, "22.05.8: squeue, scontrol; slurmctld killed"),
    ("unexpected message received", ControllerAway, "22.05.8: scontrol update; slurmctld killed"),
    ("munge encode failed", ControllerAway, "22.05.8: any command; munged killed"),
    ("protocol authentication error", ControllerAway, "22.05.8: scontrol; munged killed"),
    ("authentication credential", ControllerAway, "code 6000, 6006"),
    ("unable to process configuration file", ControllerAway, "22.05.8: squeue; no such slurm.conf"),
    ("could not establish a configuration source", ControllerAway, "22.05 without slurm.conf or slurmd"),
    ("unable to establish controller machine", ControllerAway, "documented: slurm.conf without SlurmctldHost"),
    ("can't find an address, check slurm.conf", ControllerAway, "code 1012"),
    ("standby mode", ControllerAway, "code 2027, 2131: only a backup controller answers"),
    ("communication connection failure", ControllerAway, "code 1001"),
    ("connection refused", ControllerAway, "22.05.8: scontrol; slurmctld killed"),
    ("connection reset by peer", ControllerAway, "26.05.5: scontrol; slurmctld restarted"),
    ("incompatible versions of client and server", ControllerAway, "code 1005"),
    ("socket timed out on send/recv", ControllerAway, "code 5004"),
    ("zero bytes were transmitted", ControllerAway, "code 5005"),
    ("message send failure", ControllerAway, "code 1002"),
    ("message receive failure", ControllerAway, "code 1003"),
    ("invalid job id specified", JobGone, "code 2017; 22.05.8: every write; job purged or never there"),
    ("invalid job id:", JobGone, "22.05.8: squeue; a number that no job can have"),
    (
        "job n not found",
        JobGone,
        "22.05.8: scontrol show job 625_389; an element of an array that is there, cancelled before its start",
    ),
    ("job has already finished", JobGone, "22.05.8: scontrol hold, release; job cancelled"),
    ("already completing or completed", JobGone, "22.05.8: scancel, scontrol update; job cancelled"),
    ("resource temporarily unavailable", Transient, "24.11.5: scontrol update with TresPerNode, 1 of 540"),
    (
        "the db index is being set",
        Unregistered,
        "22.05.8: second shrink of a running job without slurmdbd; any update of a job that slurmdbd has not registered",
    ),
    ("can not be altered now, try again later", Transient, "code 2020"),
    ("unable to create job record, try again", Transient, "code 2007"),
    ("prologslurmctld is still running", Transient, "code 2061"),
    ("temporarily unable to accept job", Transient, "documented: slurmctld busy"),
    ("job is pending execution", Refused, "22.05.8: scontrol requeuehold without Incomplete"),
    ("job is no longer pending execution", Refused, "22.05.8: scontrol update of a running job"),
    ("job is not suspended", Refused, "22.05.8: scontrol resume of a job that runs"),
    ("access/permission denied", Refused, "22.05.8: scontrol update, scancel; another user's job"),
    ("error: invalid user:", Refused, "22.05.8: squeue --user; the host knows no such user"),
    ("invalid user id", Refused, "22.05.8: scontrol hold; another user's job"),
    ("invalid partition name specified", Refused, "22.05.8: scontrol update"),
    ("invalid node name specified", Refused, "22.05.8: scontrol update"),
    ("node count specification invalid", Refused, "22.05.8: scontrol update NumNodes=2 of a job with -N1"),
    ("requested reservation is invalid", Refused, "22.05.8: scontrol delete ReservationName of one that is not there"),
    ("gres", Refused, "22.05.8: scontrol update, type added to or unknown in TresPerNode"),
)


MOST_UNKNOWN = 100
"""Most different messages that are counted."""


class Messages:
    """Makes errors of Slurm's messages, and counts those whose meaning is not known."""

    def __init__(self) -> None:
        self.unknown: Counter[str] = Counter()
        """Messages that are not in the table, without numbers -> how often they have come."""

    def error(self, text: str, *, command: str, job_id: str = "", otherwise: type[SlurmError] = Refused) -> SlurmError:
        """The error that a message means. `otherwise`: the class of one that is not in the table, which is logged once."""
        lower = NUMBER.sub("n", text.lower())
        if (kind := next((kind for part, kind, _ in MESSAGES if part in lower), None)) is None:
            kind, message = otherwise, NUMBER.sub("n", text.strip())[:200]
            if message and (message in self.unknown or len(self.unknown) < MOST_UNKNOWN):
                self.unknown[message] += 1
                if self.unknown[message] == 1:
                    log.warning(
                        "a message of Slurm's is not known",
                        extra={"command": command, "job": job_id, "text": text.strip()[:200]},
                    )
        return kind(text, command=command, job_id=job_id)
