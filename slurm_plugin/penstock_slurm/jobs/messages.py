"""Writes Penstock's notes into the AdminComment of jobs; `notes.py` says which there are."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from penstock_scheduler.model import JobId
from penstock_scheduler.people.errors import ClusterAway
from penstock_slurm.gateway import ControllerAway, SlurmError, SlurmJob, SlurmWriter, TimedOut
from penstock_slurm.jobs.notes import SHARES, with_message, with_note

log = logging.getLogger(__name__)

MOST = 50
"""Messages in one observation: each is a process of its own."""


def say_all(writer: SlurmWriter, texts: Iterable[tuple[SlurmJob, str]]) -> None:
    """As `say`, for the first jobs of each user. Each further observation tells some of the others."""
    new = {job.id: (job, text) for job, text in texts if with_message(job, text) is not None}
    for job in in_turn((job for job, _ in new.values()), MOST):
        if not say(writer, *new[job.id]):
            return


def say(writer: SlurmWriter, job: SlurmJob, text: str) -> bool:
    """Write a message to the job's user into its AdminComment, once, unless the site itself uses the field.

    Returns whether the next message may come through: false if Slurm does not answer.
    """
    comment = with_message(job, text)
    if comment is None:
        return True
    log.warning("message to a job's user", extra={"job": job.id, "user": job.user, "text": text})
    try:
        writer.set_admin_comment(job.id, comment)
    except SlurmError as error:
        log.warning("cannot tell the job's user", extra={"job": job.id, "text": str(error)})
        return not isinstance(error, ControllerAway | TimedOut)
    return True


def note_shares(
    writer: SlurmWriter, running: Iterable[SlurmJob], note: Callable[[JobId], dict[str, object] | None]
) -> None:
    """Note which running jobs share GPUs, for the accounts: Slurm counts these GPUs for placeholder jobs. Raises ClusterAway."""
    for job in running:
        told = note(job.id)
        if told is None and SHARES not in job.admin_comment:
            continue
        comment = with_note(job, SHARES, told)
        if comment is None:
            continue
        try:
            writer.set_admin_comment(job.id, comment)
        except (ControllerAway, TimedOut) as error:
            raise ClusterAway(str(error)) from error
        except SlurmError as error:
            log.info("cannot note which jobs share", extra={"job": job.id, "text": str(error)})


def in_turn(jobs: Iterable[SlurmJob], most: int) -> list[SlurmJob]:
    """The first job of each user, then the second of each, and so on: no user's many jobs keep those of others waiting."""
    seen = Counter[int]()
    ranked = list[tuple[int, SlurmJob]]()
    for job in jobs:
        ranked.append((seen[job.uid], job))
        seen[job.uid] += 1
    return [job for _, job in sorted(ranked, key=lambda each: each[0])[:most]]
