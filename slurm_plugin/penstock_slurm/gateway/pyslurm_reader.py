"""Reads jobs through pyslurm, in a process of its own (docs/decisions/0035-pyslurm-reads-in-its-own-process.md).

`pyslurm_program.py` gives the fields that this release of pyslurm has, in squeue's words. squeue gives the others, and the whole
record of each job that changed between both answers, so that one parser makes all records. All else is read by Slurm's commands.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.safety import children
from penstock_slurm.gateway.abilities import Release
from penstock_slurm.gateway.base import SlurmJob, Unread
from penstock_slurm.gateway.cli import CommandReader
from penstock_slurm.gateway.commands import MOST_BYTES, SlurmCommandRunner
from penstock_slurm.gateway.errors import JobGone
from penstock_slurm.gateway.hostlist import HostLists
from penstock_slurm.gateway.parse_jobs import (
    IDS,
    JOB_FIELDS,
    TIME,
    JobReader,
    job_fields,
    make_job,
    split_records,
    with_suspension,
)

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-I", str(Path(__file__).with_name("pyslurm_program.py")))

AGAIN_S = 600.0
"""How long the commands read the jobs after a fault, before pyslurm is tried again."""

CHECKED = ("State", "RestartCnt")
"""Fields of both answers. If they differ, the job has changed in between."""

FEW = 200
"""The most jobs for whose whole record squeue is asked. If more have changed, it is asked for all jobs."""


class ProgramFailed(PenstockError):
    """`pyslurm_program.py` gave no usable answer."""


class PyslurmReader(CommandReader):
    """Slurm through its commands, but the jobs through pyslurm as long as that works. See `SlurmReader` for each method."""

    def __init__(self, commands: SlurmCommandRunner, program: Sequence[str] = PROGRAM) -> None:
        super().__init__(commands)
        self._program = program
        self._fields: tuple[str, ...] = ()
        """The fields that this pyslurm has, in the order of its answers. Empty: not asked yet."""
        self._again_at_s = 0.0
        """When pyslurm may be used, by the monotonic clock."""
        self._seen: dict[tuple[str, str], SlurmJob] = {}
        """The records of the last answer by their texts."""

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs, each array element as one. After a fault of pyslurm, the commands read them."""
        if time.monotonic() >= self._again_at_s:
            try:
                found = self._jobs(("-t", "all") if finished else ())
            except ProgramFailed as error:
                self._hand_over(str(error))
            else:
                self._unread.pop("reader", None)
                if found is not None:
                    return found
        return super().jobs(finished=finished)

    def _hand_over(self, text: str) -> None:
        text = f"pyslurm does not read Slurm's jobs, so Slurm's commands do ([slurm] reader): {text}"
        if self._unread.get("reader") != (told := (Unread("reader", text),)):
            log.warning("the commands read Slurm's jobs", extra={"text": text})
        self._unread["reader"], self._again_at_s, self._fields = told, time.monotonic() + AGAIN_S, ()

    def _jobs(self, options: tuple[str, ...]) -> tuple[SlurmJob, ...] | None:
        """The jobs of both answers, or None if the commands have to read them all. Raises ProgramFailed."""
        if not self._fields:
            self._fields = self._asked("fields")[0]
        changed: list[str] = []
        whole = False

        def ask(release: Release) -> tuple[SlurmJob, ...]:
            nonlocal whole
            fields = self._left_to_squeue(release)
            second, marks = math.floor(time.time()), self._present_marks()
            rows = split_records(self._squeue(fields, marks, *options), marks)
            lines = self._lines()
            jobs, seen, hosts = [], {}, HostLists()
            for row in rows:
                end = row.rfind(marks.field)
                values = dict(zip(fields, row.split(marks.field), strict=False))
                if len(values) != len(fields) or row.count(marks.field) != len(fields) - 1:
                    whole = True  # the commands' reader says which record cannot be read, and why
                    return ()
                key = lines.get(values["JobID"].strip(), ""), row[:end]
                if (job := self._seen.get(key)) is None and (job := self._made(*key, values, hosts, release)) is None:
                    changed.append(_id(values))
                    continue
                if job.start_s is not None:
                    job = with_suspension(job, row[end + len(marks.field) :], second)
                seen[key] = job
                jobs.append(job)
            self._seen = seen
            return tuple(jobs)

        found = self._records("squeue", ask)
        self._unread["squeue"] = ()
        if whole or len(changed) > FEW:
            return None
        try:
            return (*found, *(self._listed(JobReader(), "-t", "all", "-j", ",".join(changed)) if changed else ()))
        except JobGone:
            return None

    def _left_to_squeue(self, release: Release) -> tuple[str, ...]:
        """The fields that squeue is asked for. Its TIME comes last, see `parse_jobs`."""
        lacking = (name for name in job_fields(release) if name not in self._fields and name not in (*IDS, TIME))
        return (*IDS, *dict.fromkeys((*CHECKED, *lacking)), TIME)

    def _made(self, line: str, row: str, values: dict[str, str], hosts: HostLists, release: Release) -> SlurmJob | None:
        """The job of pyslurm's line and squeue's row, or None if squeue has to be asked for it. Raises ProgramFailed."""
        if not line:
            return None
        try:
            _, *given = json.loads(line)
            told = dict(zip(self._fields, given, strict=True))
        except (ValueError, TypeError) as error:
            raise ProgramFailed(f"its line {line[:80]!r} cannot be read: {error}") from None
        if not all(isinstance(text, str) for text in told.values()):
            return None
        if any(told.get(name, values[name]) != values[name] for name in CHECKED):
            return None
        try:
            return make_job({**values, **told}, hosts, release)
        except (ValueError, KeyError):
            return None

    def _lines(self) -> dict[str, str]:
        """Job's number -> pyslurm's line about it. Raises ProgramFailed."""
        fields, lines = self._asked("jobs")
        if fields != self._fields:
            raise ProgramFailed(f"it has other fields than before: {', '.join(fields)}")
        return {line[1:].partition(",")[0]: line for line in lines}

    def _asked(self, what: Literal["fields", "jobs"]) -> tuple[tuple[str, ...], list[str]]:
        """The fields and the lines of the program's answer, which must be whole. Raises ProgramFailed."""
        commands = self._commands
        try:
            done = children.run(
                (*self._program, what), env=commands.environment, timeout_s=commands.timeout_s, most_bytes=MOST_BYTES
            )
        except children.ChildError as error:
            raise ProgramFailed(str(error)) from error
        said = done.err.strip()[-300:]
        if done.returncode != 0:
            raise ProgramFailed(f"its process ended with status {done.returncode}: {said or 'without a message'}")
        try:
            first, *lines = done.out.splitlines()
            fields = tuple(json.loads(first)["fields"])
            if what == "jobs" and json.loads(lines.pop())["jobs"] != len(lines):
                raise ValueError(f"{len(lines)} jobs")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ProgramFailed(f"its answer is not whole: {error!r}") from error
        unknown = set(fields) - {*JOB_FIELDS}
        if unknown or not fields:
            raise ProgramFailed(f"its fields are not squeue's: {', '.join(sorted(unknown))[:80]}")
        return fields, lines


def _id(values: dict[str, str]) -> str:
    """The id that squeue takes, of a row."""
    number, array, task = (values[name].strip() for name in IDS)
    return f"{array}_{task}" if task.isdigit() else number
