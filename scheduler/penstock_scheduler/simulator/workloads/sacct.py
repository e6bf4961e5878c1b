"""A site's own history, from what sacct prints. docs/admin/workloads.md has the command."""

from __future__ import annotations

import re

from penstock_scheduler.simulator.workloads.public import instant
from penstock_scheduler.simulator.workloads.table import Row
from penstock_scheduler.simulator.workloads.workload import WorkloadJob, Wrong, rigid_spec

COLUMNS = (
    "JobIDRaw",
    "User",
    "Account",
    "State",
    "Submit",
    "ElapsedRaw",
    "TimelimitRaw",
    "ReqTRES",
    "AllocTRES",
    "JobName",
)
"""Fields to ask for. JobName is last because users may write the separator into it."""

SEPARATOR = "|"

_GPU = re.compile(r"gres/gpu(?::(?P<type>[^=,:]+))?=(?P<count>\d+)")
_MEM = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def job(row: Row) -> WorkloadJob | str:
    """The job of a row, or why it is left out.

    It is rigid: history says what a job had and not what it could have used. The type that it was given is where its
    duration was recorded; it may be simulated on another, unless its user asked for the type.
    """
    if "." in row.text("JobIDRaw"):
        return "job steps"
    given = dict(part.split("=", 1) for part in row.text("AllocTRES").split(",") if "=" in part)
    gpus, gpu_type = gpus_of(row.text("AllocTRES"))
    if not given:
        return "jobs that never ran"
    if gpus == 0:
        return "jobs without GPU"
    elapsed_s = row.number("ElapsedRaw", least=0)
    if elapsed_s == 0:
        return "jobs that never ran"
    _, asked = gpus_of(row.text("ReqTRES"))
    limit = row.text("TimelimitRaw")
    return WorkloadJob(
        id=row.text("JobIDRaw"),
        name=row.text("JobName"),
        user=row.text("User", "unknown"),
        account=row.text("Account"),
        submit_s=instant(row, "Submit"),
        gpus=gpus,
        spec=rigid_spec(gpus, (asked,) if asked else None),
        gpu_type=gpu_type,
        duration_s=elapsed_s,
        time_limit_s=row.number("TimelimitRaw", above=0) * 60 if limit.isdigit() else None,
        cpus=int(given["cpu"]) if given.get("cpu", "0").isdigit() and given.get("cpu", "0") != "0" else None,
        mem_mb=_mem_mb(given.get("mem", "")),
    )


def gpus_of(tres: str) -> tuple[int, str | None]:
    """GPUs in a list of TRES such as `cpu=8,gres/gpu:a100=4,gres/gpu=4`, and their type if it names one.

    The count without a type is the total. Without it, counts of types add up. Raises Wrong if there are two types: a
    Penstock job has one.
    """
    total, typed = 0, {}
    for match in _GPU.finditer(tres):
        if match["type"]:
            typed[match["type"]] = int(match["count"])
        else:
            total = int(match["count"])
    used = {name: count for name, count in typed.items() if count}
    if len(used) > 1:
        raise Wrong(f"GPUs of {len(used)} types in {tres!r}", "jobs with one type of GPU; leave this one out")
    return total or sum(used.values()), next(iter(used), None)


def _mem_mb(text: str) -> float | None:
    match = _MEM.fullmatch(text)
    return float(match["number"]) * _MIB[match["unit"]] or None if match else None
