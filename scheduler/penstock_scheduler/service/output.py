"""Reads a job's output file for the users who may see the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from penstock_profiles.files import NoRegularFile, open_regular
from penstock_scheduler.messages import JobView, LogPart
from penstock_scheduler.ports import Submitter
from penstock_scheduler.service.errors import Refusal

Stream = Literal["stdout", "stderr"]


def read_log(submitter: Submitter | None, view: JobView, stream: Stream, offset: int, limit: int) -> LogPart:
    """A part of a job's output. A running job without a file has an empty part whose note says so.

    The daemon reads only a regular file that belongs to the job's user, so that a link to another file shows nothing.

    Args:
        submitter: is asked where the output is if the view does not know.
        offset: first byte; negative: bytes from the end.
        limit: most bytes to read.

    Raises:
        Refusal: the job has ended and there is no output to read, or it is not a regular file of the job's user.
        ClusterAway: the cluster does not answer.
    """
    if view.output is None and view.start_s is None and view.state != "ended":
        return _nothing(view, offset, _unknown(view))
    files = view.output or (submitter.output(view.id, view.user) if submitter is not None else None)
    if files is None:
        return _nothing(view, offset, _unknown(view))
    path = Path(getattr(files, stream))
    try:
        opened = open_regular(path, files.uid)
    except NoRegularFile:
        text = f"{path} is not a regular file of the job's user, so the daemon does not read it"
        raise Refusal(403, "not-allowed", text) from None
    except OSError as error:
        text = (
            f"the output of job {view.id}, {path}, cannot be read on the host of penstockd: {error.strerror}; look for it on "
            "the job's node, and see that the folder is shared and that nobody has removed the file"
        )
        return _nothing(view, offset, text)
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
        ended=view.state == "ended" and begin + len(part) >= status.st_size,
    )


def _nothing(view: JobView, offset: int, text: str) -> LogPart:
    if view.state == "ended":
        raise Refusal(404, "no-output", text)
    return LogPart(offset=max(offset, 0), next=max(offset, 0), size=0, text="", ended=False, note=text)


def _unknown(view: JobView) -> str:
    if view.start_s is None:
        return f"job {view.id} has not started, so it has no output"
    return (
        f"Penstock does not know where job {view.id} writes its output: Slurm names no output file, or has forgotten the job; "
        "look where `--output` of sbatch pointed, by default slurm-JOB.out in the folder of the submission"
    )
