"""A site's own history, from what sacct prints. docs/admin/workloads.md has the command."""

from __future__ import annotations

import re

import numpy as np

from penstock_scheduler.simulator.workloads.problems import Wrong
from penstock_scheduler.simulator.workloads.public import instants, rigid_specs
from penstock_scheduler.simulator.workloads.table import Columns, Rows

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
"""Fields of sacct. JobName is last because users may write the separator into it."""

SEPARATOR = "|"

_GPU = re.compile(r"gres/gpu(?::(?P<type>[^=,:]+))?=(?P<count>\d+)")
_MEM = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def sacct(rows: Rows) -> Columns:
    """Columns of jobs from rows of sacct.

    Jobs are rigid: history says what a job had and not what it could have used. Its duration was recorded on the type
    that it had. It may be simulated on another type, unless its user asked for the type.
    """
    ids, allocated = rows.text("JobIDRaw"), rows.text("AllocTRES")
    rows.leave_out(np.array(["." in job for job in ids], dtype=np.bool_), "job steps")
    types_of = rows.each(allocated, gpus_of, (0, None))
    gpus = [count for count, _ in types_of]
    rows.leave_out(np.array(["=" not in text for text in allocated], dtype=np.bool_), "jobs that never ran")
    rows.leave_out(np.array(gpus) == 0, "jobs without GPU")
    elapsed_s = rows.number("ElapsedRaw", least=0)
    rows.leave_out(elapsed_s == 0, "jobs that never ran")
    requested = rows.each(rows.text("ReqTRES"), lambda text: gpus_of(text)[1], None)
    limited = np.array([limit.isdigit() for limit in rows.text("TimelimitRaw")], dtype=np.bool_)
    submit_s = instants(rows, "Submit")
    limits_s = rows.number("TimelimitRaw", above=0, where=limited) * 60
    amounts = [dict(part.split("=", 1) for part in text.split(",") if "=" in part) for text in allocated]
    return {
        "id": ids,
        "name": rows.text("JobName"),
        "user": rows.text("User", "unknown"),
        "account": rows.text("Account"),
        "submit_s": submit_s,
        "gpus": gpus,
        "spec": rigid_specs(rows, gpus, [None if name is None else (name,) for name in requested]),
        "gpu_type": [name for _, name in types_of],
        "duration_s": elapsed_s,
        "time_limit_s": limits_s,
        "cpus": [int(text) or None if (text := each.get("cpu", "0")).isdigit() else None for each in amounts],
        "mem_mb": [_mem_mb(each.get("mem", "")) for each in amounts],
    }


def gpus_of(tres: str) -> tuple[int, str | None]:
    """GPUs in a list of TRES such as `cpu=8,gres/gpu:a100=4,gres/gpu=4`, and their type if it names one.

    The count without a type is the total. Without such a count, the counts of types add up. Raises Wrong if there are
    two types, because a Penstock job has one.
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
