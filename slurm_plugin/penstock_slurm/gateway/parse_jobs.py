"""Parses the jobs that squeue prints. Starts no process."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_slurm.gateway.abilities import APART, Release
from penstock_slurm.gateway.accounts import parse_memory, parse_tres
from penstock_slurm.gateway.base import WAITING, SlurmJob, Unknown
from penstock_slurm.gateway.fields import (
    Fields,
    duration_s,
    flag,
    megabytes,
    number_or_none,
    number_or_one,
    text,
    time_limit_s,
    time_s,
)
from penstock_slurm.gateway.hostlist import HostLists
from penstock_slurm.gateway.parse import parse_cpus_per_gpu, parse_tres_per_node

IDS = ("JobID", "ArrayJobID", "ArrayTaskID")
"""The fields that say which job a record is about. They come before all that a user can choose."""

JOB_FIELDS = (
    *IDS,
    "HetJobID",
    "State",
    "Reason",
    "Partition",
    "Name",
    "UserName",
    "UserID",
    "Account",
    "QOS",
    "NodeList",
    "ReqNodes",
    "NumNodes",
    "tres-per-node",
    "NumCPUs",
    "cpus-per-task",
    "NumTasks",
    "comment",
    "admin_comment",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "RestartCnt",
    "Requeue",
    "PriorityLong",
    "Reservation",
    "tres-alloc",
    "Dependency",
    "Licenses",
    "Deadline",
    "cpus-per-tres",
    "MinMemory",
)
"""The fields that every squeue has. `Release.whole_nodes_field` and `TIME` are two more."""

TIME = "TimeUsed"
"""The field that grows while a job runs. It comes last, so that all before it is the same text as long as nothing happens."""

CUT = {"Dependency": 200}
"""Fields of which squeue prints so many characters, with spaces at the end if there are fewer. Slurm keeps one dependency of
100,000 characters for an array, and squeue prints it with each of the elements."""

RECORD = "record"
"""In place of a field's name: the record has not the requested fields."""


def job_fields(release: Release) -> tuple[str, ...]:
    """The fields that squeue of this release is asked for, in their order."""
    return (*JOB_FIELDS, release.whole_nodes_field, TIME)


def _mark() -> str:
    """64 random bits, as letters that are rare in Slurm's answers: Python then searches faster."""
    return "~" + "".join(secrets.choice("GHJKLMPQRSTVWXYZ") for _ in range(16))


@dataclass(frozen=True, slots=True)
class Marks:
    """What squeue prints between two fields and at the end of a record, so that no value can pass for a field or a record.

    Both are random and of the same length, and users cannot know them beforehand. Neither starts with a digit, because the
    field's size comes before it.
    """

    field: str = dataclasses.field(default_factory=_mark)
    record: str = dataclasses.field(default_factory=_mark)


def squeue_format(marks: Marks, fields: Sequence[str]) -> str:
    """Format for `squeue -O` that prints each of these fields and then its mark, at full length (size 0) but for CUT."""
    *others, last = fields
    return ",".join([*(f"{field}:{CUT.get(field, 0)}{marks.field}" for field in others), f"{last}:0{marks.record}"])


def split_records(text: str, marks: Marks) -> list[str]:
    """The records of an answer to `squeue_format`, the first with a newline before it as all others.

    Raises:
        ValueError: the text is no such answer, or ends within a record.
    """
    first, *others = text.split(marks.record)
    *records, rest = "\n" + first, *others
    if rest.strip():
        raise ValueError(f"{len(rest)} characters after the last record")
    return records


def parse_jobs(text: str, marks: Marks, release: Release, asked_s: float = 0.0) -> tuple[SlurmJob, ...]:
    """Jobs from one answer of squeue; see `JobReader.read`."""
    return JobReader().read(text, marks, release, asked_s)


class JobReader:
    """Reads squeue's answers one after another. A record whose text is as in the last answer is the very object made then."""

    def __init__(self) -> None:
        self._release: Release | None = None
        self._texts: list[str] = []
        """The records of the last answer, without their TIME."""
        self._jobs: list[SlurmJob] = []
        """The jobs that were made of them."""
        self.lost: tuple[Unknown, ...] = ()
        """Records of the last answer that do not say which job they are about."""

    def read(self, text: str, marks: Marks, release: Release, asked_s: float) -> tuple[SlurmJob, ...]:
        """Jobs from squeue's answer to `squeue_format(marks, job_fields(release))`.

        Names and comments can hold any text, also newlines. So records are found by the marks, not by lines. What of a record
        cannot be read is its job's `unknown`. A record without a readable id is `lost`.

        Args:
            text: the answer.
            marks: as in the request. Records are recognised only as long as they are the same.
            release: of Slurm's commands.
            asked_s: when squeue was run, s since 1970, for the time that jobs have been suspended.

        Raises:
            ValueError: the text is no such answer, or ends within a record.
        """
        records = split_records(text, marks)
        names, hosts, second, separator = job_fields(release), HostLists(), math.floor(asked_s), marks.field
        lost: list[Unknown] = []
        before, known = (self._texts, self._jobs) if release == self._release else ([], [])
        index: dict[str, int] | None = None
        at = 0
        """Where the next record was in the last answer, as long as the order has stayed."""
        texts: list[str] = []
        jobs: list[SlurmJob] = []
        for record in records:
            end = record.rfind(separator)
            if at < len(before) and record.startswith(stable := before[at]) and end == len(stable):
                job = known[at]
                at += 1
            else:
                stable = record[:end]
                index = dict(zip(before, range(len(before)), strict=True)) if index is None else index
                if (found := index.get(stable)) is not None:
                    stable, job, at = before[found], known[found], found + 1
                else:
                    fields = record.split(separator)
                    try:
                        job = make_job(dict(zip(names, fields, strict=True)), hosts, release)
                    except ValueError:
                        if (found_job := _unreadable(fields, len(names), hosts, release)) is None:
                            lost.append(Unknown(RECORD, record))
                            continue
                        job = found_job
            if job.start_s is not None:
                job = with_suspension(job, record[end + len(separator) :], second)
            texts.append(stable)
            jobs.append(job)
        self._release, self._texts, self._jobs, self.lost = release, texts, jobs, tuple(lost)
        return tuple(jobs)


def with_suspension(job: SlurmJob, ran: str, second: int) -> SlurmJob:
    """The job with the time that its present run has been suspended, in whole seconds: the very object if that is the same.

    squeue tells how long the run was not suspended.
    """
    unknown = tuple(each for each in job.unknown if each.field != TIME)
    try:
        ran_s = duration_s(ran)
    except ValueError:
        ran_s, unknown = None, (*unknown, Unknown(TIME, ran))
    assert job.start_s is not None, "it has started"
    suspended_s = 0.0 if ran_s is None else max(second - job.start_s - ran_s, 0.0)
    if suspended_s == job.suspended_s and unknown == job.unknown:
        return job
    return dataclasses.replace(job, suspended_s=suspended_s, unknown=unknown)


def _unreadable(fields: Sequence[str], count: int, nodes: HostLists, release: Release) -> SlurmJob | None:
    """The job of a record that has another number of fields, of which only the id is known; None: not even that."""
    try:
        job = make_job(dict(zip(IDS, fields, strict=False)), nodes, release)
    except (ValueError, KeyError):
        return None
    return dataclasses.replace(job, unknown=(Unknown(RECORD, f"{len(fields)} fields in place of {count}"),))


def make_job(values: dict[str, str], nodes: HostLists, release: Release) -> SlurmJob:
    """The job of a record. Raises ValueError, KeyError: it does not say which one it is."""
    job = Fields(values)
    number = int(values["JobID"])  # ignores the newline at the end of the previous record
    state = job.word("State", release.job_states)
    array_task = values["ArrayTaskID"]
    element = number_or_none(array_task)
    array_job = None if element is None else int(values["ArrayJobID"])
    no_gpus: tuple[int | None, str | None] = (None, None)
    gpus_per_node, gpu_type = job.read("tres-per-node", parse_tres_per_node, no_gpus)
    return SlurmJob(
        id=str(number) if element is None else f"{array_job}_{element}",
        number=number,
        name=job.text("Name"),
        user=values.get("UserName", ""),
        uid=job.read("UserID", int, -1),
        account=job.text("Account"),
        partition=tuple(values.get("Partition", "").split(",")),
        state=state,
        reason=job.text("Reason"),
        nodes=job.read("NodeList", nodes.__getitem__, ()),
        required_nodes=job.read("ReqNodes", nodes.__getitem__, ()),
        node_count=job.number("NumNodes"),
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        cpus=job.number("NumCPUs"),
        cpus_per_task=job.read("cpus-per-task", number_or_one, 1),
        tasks=job.read("NumTasks", number_or_one, 1),
        comment=job.text("comment"),
        admin_comment=job.text("admin_comment"),
        submit_s=job.read("SubmitTime", float, 0.0),
        eligible_s=job.read("EligibleTime", time_s, None),
        start_s=None if state in WAITING else job.read("StartTime", time_s, None),
        end_s=job.read("EndTime", time_s, None),
        time_limit_s=job.read("TimeLimit", time_limit_s, None),
        restarts=job.number("RestartCnt"),
        requeue=job.read("Requeue", flag, False),
        priority=job.number("PriorityLong"),
        qos=job.text("QOS"),
        array_job_id=array_job,
        array_task_id=element,
        het_job_id=job.read("HetJobID", number_or_none, None),
        reservation=job.text("Reservation"),
        gpus_counted=job.read("tres-alloc", parse_tres, {}),
        memory_mb=job.read("tres-alloc", parse_memory, 0),
        least_memory_mb=job.read("MinMemory", megabytes, 0),
        dependency=job.read("Dependency", lambda cut: text(cut.rstrip()), ""),
        licenses=job.text("Licenses"),
        exclusive=job.read(release.whole_nodes_field, release.whole_nodes.__getitem__, False),
        apart=job.read(release.whole_nodes_field, APART.__contains__, False),
        deadline_s=job.read("Deadline", time_s, None),
        cpus_per_gpu=job.read("cpus-per-tres", parse_cpus_per_gpu, None),
        unknown=tuple(job.unknown),
    )
