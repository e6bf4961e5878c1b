"""Reads a job's output file for the users who may see the job."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Literal

from penstock_profiles.files import NoRegularFile
from penstock_scheduler.api.messages import JobView, LogPart, OutputFiles
from penstock_scheduler.api.ports import Submitter
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.user_files import NotReadable, UserFiles
from penstock_scheduler.people.errors import ClusterAway

Stream = Literal["stdout", "stderr"]


async def read_log(
    files: UserFiles,
    find: Callable[[], Awaitable[OutputFiles | None]],
    view: JobView,
    stream: Stream,
    offset: int,
    limit: int,
) -> LogPart:
    """A part of a job's output. A running job without a file has an empty part whose note says so.

    The file is read as the job's user, and only if it is a regular file of this user's.

    Args:
        files: reads it.
        find: is asked where the output is if the view does not know.
        view: the job.
        stream: which output.
        offset: first byte; negative: bytes from the end.
        limit: most bytes to read.

    Raises:
        Refusal: the job has ended and there is no output to read, or it is not a regular file of the job's user.
        ClusterAway: the cluster does not answer.
        Busy: too many requests for files of this user wait.
    """
    if view.output is None and view.start_s is None and view.state != "ended":
        return _nothing(view, offset, _unknown(view))
    found = view.output or await find()
    if found is None:
        return _nothing(view, offset, _unknown(view))
    path = getattr(found, stream)
    try:
        part = await files.read(found.uid, path, offset, limit)
    except NoRegularFile:
        text = f"{path} is not a regular file of the job's user, so the daemon does not read it"
        raise Refusal(403, "not-allowed", text) from None
    except NotReadable as error:
        text = (
            f"the output of job {view.id}, {path}, cannot be read on the host of penstockd: {error}; look for it on "
            "the job's node, and see that the folder is shared and that nobody has removed the file"
        )
        return _nothing(view, offset, text)
    end = part.begin + len(part.content)
    return LogPart(
        offset=part.begin,
        next=end,
        whole=part.begin + whole_lines(part.content),
        size=part.size,
        text=part.content.decode("utf-8", errors="replace"),
        ended=view.state == "ended" and end >= part.size,
    )


def _nothing(view: JobView, offset: int, text: str) -> LogPart:
    if view.state == "ended":
        raise Refusal(404, "no-output", text)
    begin = max(offset, 0)
    return LogPart(offset=begin, next=begin, whole=begin, size=0, text="", ended=False, note=text)


def whole_lines(content: bytes) -> int:
    """The bytes of a part up to the begin of its last line, if that is not complete. One that is written over ends at the
    carriage return."""
    content = content.rstrip(b"\r")
    return max(content.rfind(b"\n"), content.rfind(b"\r")) + 1


def _unknown(view: JobView) -> str:
    if view.start_s is None:
        return f"job {view.id} has not started, so it has no output"
    return (
        f"Penstock does not know where job {view.id} writes its output: Slurm names no output file, or has forgotten the job; "
        "look where `--output` of sbatch pointed, by default slurm-JOB.out in the folder of the submission"
    )


log = logging.getLogger(__name__)

AT_ONCE = 50
"""Most jobs that are asked for in one tick. Each costs one call of scontrol, about 5 ms."""


class Outputs:
    """Asks for the output files of each run once. If the cluster does not answer, it asks again in the next tick."""

    def __init__(self, submitter: Submitter | None) -> None:
        self._submitter = submitter
        self._known: dict[str, tuple[int, OutputFiles | None]] = {}
        """Live job -> its restarts when it was asked for, because a file's name may contain the node, and the answer."""
        self._due: dict[str, None] = {}
        """Jobs that are still to be asked for, in this order."""

    def added_to(self, views: Sequence[JobView], live: Mapping[str, JobView]) -> list[JobView]:
        """The views, with the output files of jobs that have started since.

        Args:
            views: those that are new, or may have changed.
            live: the newest view of each live job. Some are added to the views: their turn to be asked for came only now.
        """
        found = {view.id: view for view in views}
        self._due |= {view.id: None for view in views if self._unknown(view)}
        for job in [*islice(self._due, AT_ONCE)]:
            view = found.get(job) or live.get(job)
            if view is None or not self._unknown(view):
                del self._due[job]
            elif not self._ask(view):
                break
            else:
                del self._due[job]
                found.setdefault(job, view)
        return [self._with_output(view) for view in found.values()]

    def _with_output(self, view: JobView) -> JobView:
        _, output = self._known.get(view.id, (0, None))
        if output is None or output == view.output:
            return view
        return view.model_copy(update={"output": output, "version": view.version + 1})

    def forget(self, job: str) -> None:
        """Drop what is known of a job that has ended."""
        self._known.pop(job, None)
        self._due.pop(job, None)

    def _ask(self, view: JobView) -> bool:
        """Ask for the output files of a job. Returns whether the cluster has answered."""
        if self._submitter is None:
            return True
        try:
            self._known[view.id] = view.restarts, self._submitter.output(view.id, view.user)
        except ClusterAway as error:
            log.info("output files not known yet", extra={"job": view.id, "text": str(error)})
            return False
        return True

    def _unknown(self, view: JobView) -> bool:
        if view.state == "ended":
            return view.output is None and view.id not in self._known  # it may have run between two ticks
        known = self._known.get(view.id)
        return view.state in ("running", "stopping") and (known is None or known[0] != view.restarts)
