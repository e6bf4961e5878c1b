"""Parses the jobs that squeue prints. Starts no process."""

from __future__ import annotations

from penstock_slurm.abilities import Release
from penstock_slurm.gateway.accounts import parse_tres
from penstock_slurm.gateway.base import SlurmJob
from penstock_slurm.gateway.fields import Fields, duration_s, flag, number_or_none, number_or_one, time_limit_s, time_s
from penstock_slurm.gateway.hostlist import HostLists
from penstock_slurm.gateway.parse import parse_cpus_per_gpu, parse_tres_per_node

JOB_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
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
    "TimeUsed",
    "cpus-per-tres",
)
"""The fields that every squeue has. `Release.whole_nodes_field` is one more."""


def job_fields(release: Release) -> tuple[str, ...]:
    """The fields that squeue of this release is asked for, in their order."""
    return (*JOB_FIELDS, release.whole_nodes_field)


def squeue_format(separator: str, release: Release) -> str:
    """Format for `squeue -O` that prints every field at its full length (size 0) and followed by `separator`."""
    return ",".join(f"{field}:0{separator}" for field in job_fields(release))


def parse_jobs(text: str, separator: str, release: Release) -> tuple[SlurmJob, ...]:
    """Jobs from squeue's answer to `squeue_format(separator, release)`.

    Names and comments can hold any text, also newlines. So records are found by counting fields, not by lines. That is safe
    because users cannot know the separator beforehand.

    Raises:
        ValueError: the text has another form, or a record has no number. Other values that cannot be read are the job's
            `unknown`.
    """
    fields, names = text.split(separator), job_fields(release)
    width = len(names)
    if (len(fields) - 1) % width or fields[-1].strip():
        raise ValueError(f"{len(fields) - 1} fields are not whole records of {width}")
    nodes = HostLists()
    return tuple(
        _job(dict(zip(names, fields[at : at + width], strict=True)), nodes, release)
        for at in range(0, len(fields) - 1, width)
    )


def _job(values: dict[str, str], nodes: HostLists, release: Release) -> SlurmJob:
    job = Fields(values)
    number = int(values["JobID"])  # ignores the newline at the end of the previous record
    state = job.word("State", release.job_states)
    array_task = values["ArrayTaskID"]
    element = int(array_task) if array_task.isdigit() else None
    array_job = None if element is None else int(values["ArrayJobID"])
    no_gpus: tuple[int | None, str | None] = (None, None)
    gpus_per_node, gpu_type = job.read("tres-per-node", parse_tres_per_node, no_gpus)
    return SlurmJob(
        id=str(number) if element is None else f"{array_job}_{element}",
        number=number,
        name=job.text("Name"),
        user=values["UserName"],
        uid=job.read("UserID", int, -1),
        account=job.text("Account"),
        partition=tuple(values["Partition"].split(",")),
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
        start_s=None if state == "PENDING" else job.read("StartTime", time_s, None),
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
        dependency=job.text("Dependency"),
        licenses=job.text("Licenses"),
        exclusive=job.read(release.whole_nodes_field, release.whole_nodes.__getitem__, False),
        deadline_s=job.read("Deadline", time_s, None),
        ran_s=job.read("TimeUsed", duration_s, None),
        cpus_per_gpu=job.read("cpus-per-tres", parse_cpus_per_gpu, None),
        unknown=tuple(job.unknown),
    )
