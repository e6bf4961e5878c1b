"""The lines about a job in the log of the task that waits for it, and those of the job's output."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

Job = dict[str, Any]
"""A `JobView` of the API."""


class News:
    """Says what has happened to one job: its states, GPUs, stops and restarts, each of them once."""

    def __init__(self) -> None:
        self._last: Job | None = None
        self._place = ""

    def of(self, job: Job) -> list[str]:
        """The lines for a view of the job, if it has changed. The end is told by `ending`."""
        last, self._last = self._last, job
        if job["state"] == "ended":
            return []
        lines = []
        stopped, restarts = job.get("stopped") or "", job["restarts"]
        if last is None:
            if restarts:
                lines.append(f"job {job['id']} was restarted before ({restarts} in total){_because(stopped)}")
        else:
            is_told = stopped == (last.get("stopped") or "")
            if stopped and not is_told and restarts == last["restarts"]:
                lines.append(f"job {job['id']} is stopped to start again{_because(stopped)}")
            if restarts > last["restarts"]:
                lines.append(f"job {job['id']} starts again, restart {restarts}{_because(stopped)}")
        place, before = _place(job), self._place
        if last is None or describe(job) != describe(last):
            moved = f", before{before}" if place and before and place != before else ""
            lines.append(describe(job) + moved)
        self._place = place or before
        return lines


def ending(job: Job) -> str:
    """How a job has ended, in a sentence without a full stop."""
    code = "" if job["exit_code"] is None else f", exit code {job['exit_code']}"
    return f"job {job['id']} has ended as {job['ended']}{code}{_because(_it(job))}"


def describe(job: Job) -> str:
    """A job's state and GPUs, in a line for the task's log."""
    note = f"it {job['note']}" if job.get("note") else job["reason"]
    since_s = job.get("note_s")
    since = f" (since {datetime.fromtimestamp(since_s, UTC):%Y-%m-%d %H:%M:%S} UTC)" if since_s else ""
    return f"job {job['id']} is {job['ended'] or job['state']}{_place(job)}{_because(note)}{since}"


def whole_lines(text: str) -> tuple[list[str], str]:
    """The lines of a part of a job's output, and the line at its end that is not complete yet.

    A line that was written over, as by a progress bar, appears as it was last.
    """
    *whole, begun = text.split("\n")
    lines = [_last_state(line) for line in whole]
    over, is_over, _ = begun.rstrip("\r").rpartition("\r")
    if is_over:
        lines += filter(None, [_last_state(over)])
        begun = begun[len(over) + 1 :]
    return lines, begun


def of_part(part: dict[str, Any]) -> tuple[list[str], str, int]:
    """The lines of a part of a job's output (a `LogPart` of the API), the line at its end that is not complete yet, and the byte
    at which that line begins.

    Only penstockd knows that byte: in the text, bytes that are not UTF-8 are replaced.
    """
    lines, begun = whole_lines(part["text"])
    if part["whole"] == part["offset"] and part["next"] < part["size"]:  # a line longer than a part
        return [begun], "", part["next"]
    return lines, begun, part["whole"]


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _place(job: Job) -> str:
    gpus = job["allocation"]
    return f" on {gpus['gpus']} {gpus['gpu_type']} ({', '.join(gpus['nodes'])})" if gpus else ""


def _it(job: Job) -> str:
    return f"it {job['ended_text']}" if job.get("ended_text") else ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
