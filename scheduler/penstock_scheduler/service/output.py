"""Reads a job's output file for the users who may see the job."""

from __future__ import annotations

import os

from penstock_profiles.files import NoRegularFile, open_regular
from penstock_scheduler.messages import LogPart
from penstock_scheduler.ports import Submitter
from penstock_scheduler.service.errors import Refusal


def read_log(submitter: Submitter, job: str, offset: int, limit: int, *, ended: bool) -> LogPart:
    """A part of a job's output.

    The daemon reads only a regular file that belongs to the job's user, so that a link to another file shows nothing.

    Args:
        offset: first byte; negative: bytes from the end.
        limit: most bytes to read.
        ended: whether the job has ended.

    Raises:
        Refusal: the output is not a regular file of the job's user.
    """
    output = submitter.output(job)
    nothing = LogPart(offset=max(offset, 0), next=max(offset, 0), size=0, text="", ended=ended)
    if output is None:
        return nothing
    try:
        opened = open_regular(output.file, output.uid)
    except NoRegularFile:
        text = f"{output.file} is not a regular file of the job's user, so the daemon does not read it"
        raise Refusal(403, "not-allowed", text) from None
    except OSError:
        return nothing  # the job has not written it yet
    with opened as file:
        status = os.fstat(file.fileno())
        begin = min(max(status.st_size + offset, 0) if offset < 0 else offset, status.st_size)
        file.seek(begin)
        part = file.read(limit)
    return LogPart(
        offset=begin,
        next=begin + len(part),
        size=status.st_size,
        text=part.decode("utf-8", errors="replace"),
        ended=ended and begin + len(part) >= status.st_size,
    )
