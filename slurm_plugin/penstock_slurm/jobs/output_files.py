"""Where a job writes its output: resolves the patterns that scontrol leaves in a file's name.

slurmd replaces the patterns when the batch script starts (sbatch(1), "filename pattern"). `scontrol show job` of Slurm 22.05
replaces only %A, %a, %j, %u and %x, and leaves %% as it is.

slurmd replaces %N by the name of its host. Here it is the node's name, the same at nearly all sites. Where it differs, the
file is missing under that name, and the answer names it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from penstock_profiles.wire import ControlMessage
from penstock_scheduler.model import JobId
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.base import ENDED
from penstock_slurm.jobs.states import LEAVING

_PATTERN = re.compile(r"%([0-9]*)([%AaJjNnstuxb])")

_NUMBER = re.compile(r"[0-9]{1,10}")

LONGEST = 4095
"""Bytes of a path. No file has a longer one."""


def resolved(path: str, told: Mapping[str, str]) -> str:
    """The file that the batch script opens; empty: no file can have such a name.

    A pattern that is not known here stays, as slurmd leaves it.

    Args:
        path: StdOut or StdErr of `scontrol show job`.
        told: other fields of it: JobId, JobName, UserId, BatchHost and, of an array's element, ArrayJobId and ArrayTaskId. What
            the user wrote may look like these, so each can hold any text.
    """
    if "\\" in path:
        return path.replace("\\", "")  # a backslash switches all patterns off
    number, element = told.get("JobId", ""), told.get("ArrayTaskId", "")
    values = {
        "%": "%",
        "A": told.get("ArrayJobId", number),
        "a": element,
        "b": str(int(element) % 10) if _NUMBER.fullmatch(element) else "",
        "J": number,
        "j": number,
        "N": told.get("BatchHost", "").split(".")[0],
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": told.get("UserId", "").partition("(")[0],
        "x": told.get("JobName", ""),
    }

    def value(found: re.Match[str]) -> str:
        width, kind = found.groups()
        text = values[kind][:LONGEST]
        if not text:
            return found[0]
        return text.zfill(min(int(width[:10]), 10)) if width and _NUMBER.fullmatch(text) else text

    found = _PATTERN.sub(value, path)
    return found if len(found.encode(errors="replace")) <= LONGEST else ""


log = logging.getLogger(__name__)


def exceeded_memory(job: SlurmJob, memory_mb: int | None) -> str:
    """The message that a job ended because it exceeded the memory that Penstock allocated, with the remedy. Empty for other
    jobs.

    Where cgroups limit memory, Slurm reports it. With JobAcctGatherParams=OverMemoryKill, Slurm 22.05 only kills the job: state
    FAILED, signal 9, reason JobLaunchFailure.

    Args:
        job: as Slurm knows it after its end.
        memory_mb: what Penstock allocated on a node; None: as much as its user requested.
    """
    if job.state == "OUT_OF_MEMORY":
        how = "ended because it exceeded"
    elif job.state == "FAILED" and (job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal:9")):
        how = "was killed; if its output says that it exceeded a memory limit, it exceeded"
    else:
        return ""
    if memory_mb is None:
        return ""
    return (
        f"{how} the {memory_mb} MB on a node that Penstock allocated by its profile; measure it again with the memory that it "
        "really needs (penstock profile sensitivity measure --process-mb), or submit it without a profile"
    )


class Endings:
    """Logs which jobs ended because they exceeded the memory that Penstock allocated, with the remedy.

    Slurm takes no comment on a job that has ended; users learn it from `Submitter.fates`.
    """

    def __init__(self, control: Callable[[JobId], ControlMessage | None]) -> None:
        self._control = control
        self.awaited: dict[JobId, int] = {}
        """Jobs that are gone and whose end is not known yet -> MB that Penstock allocated on a node."""

    def saw(self, gone: Collection[JobId], ended: Iterable[SlurmJob]) -> None:
        """Take over an observation.

        Args:
            gone: jobs that were managed in the last observation and are not any more, also if they were never seen running.
            ended: the jobs that Slurm remembers.
        """
        self.awaited |= {
            job_id: control.memory_mb
            for job_id in gone
            if (control := self._control(job_id)) is not None and control.memory_mb
        }
        if not self.awaited:
            return
        known = {job.id: job for job in ended}
        for job_id, memory_mb in list(self.awaited.items()):
            job = known.get(job_id)
            if job is not None and job.state in LEAVING:
                continue
            del self.awaited[job_id]  # a job that goes on is not managed any more
            if job is not None and job.state in ENDED and (text := exceeded_memory(job, memory_mb)):
                log.warning("job exceeded its memory", extra={"job": job_id, "user": job.user, "text": text})
