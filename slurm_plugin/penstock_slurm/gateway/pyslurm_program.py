"""Prints the jobs that pyslurm reads, one line of JSON each, in the words of squeue.

`pyslurm_reader` runs this file as a program. It imports nothing of Penstock, because pyslurm is GPL-2.0, and a fault in libslurm
ends only this process. The first line is an object with pyslurm's version and the fields that it has. Each line after it is an
array: the job's number, then the fields' values; null is a value that pyslurm cannot give. The last line has the count of jobs.

`pyslurm_program.py fields` prints the first line only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _time(value: Any) -> str:
    return str(int(value)) if value else "N/A"


def _minutes(value: Any) -> str:
    return f"{value}:00" if isinstance(value, int) else "UNLIMITED" if value is not None else "NOT_SET"


def _number(value: Any) -> str | None:
    return None if value is None else str(int(value))


def _or_nothing(value: Any) -> str:
    return "N/A" if value is None else str(int(value))


def _word(value: Any) -> str:
    return str(getattr(value, "name", value)).upper()


FIELDS: dict[str, tuple[str, Callable[[Any], str | None]]] = {
    "State": ("state", _word),
    "Reason": ("state_reason", _text),
    "Partition": ("partition", _text),
    "Name": ("name", _text),
    "UserName": ("user_name", _text),
    "UserID": ("user_id", _number),
    "Account": ("account", _text),
    "QOS": ("qos", _text),
    "NodeList": ("allocated_nodes", _text),
    "ReqNodes": ("required_nodes", _text),
    "NumCPUs": ("cpus", _number),
    "comment": ("comment", _text),
    "admin_comment": ("admin_comment", _text),
    "SubmitTime": ("submit_time", _time),
    "EligibleTime": ("eligible_time", _time),
    "StartTime": ("start_time", _time),
    "TimeLimit": ("time_limit", _minutes),
    "RestartCnt": ("requeue_count", _number),
    "Requeue": ("is_requeueable", _number),
    "PriorityLong": ("priority", _number),
    "HetJobID": ("heterogeneous_id", _or_nothing),
    "Deadline": ("deadline", _time),
}
"""squeue's field -> pyslurm's attribute, and how to write its value.

The others are left to squeue: it calculates EndTime, NumNodes, NumTasks and cpus-per-task, and pyslurm takes GRES, licences and
dependencies apart, differently in each release."""


def main() -> int:
    """Print what the arguments ask for."""
    import pyslurm

    fields = {name: each for name, each in FIELDS.items() if hasattr(pyslurm.Job, each[0])}
    print(json.dumps({"pyslurm": pyslurm.__version__, "fields": list(fields)}))  # noqa: T201 (its answer)
    if sys.argv[1:] == ["fields"]:
        return 0
    jobs = pyslurm.Jobs.load()
    for job in jobs.values():
        line: list[Any] = [int(job.id)]
        for attribute, write in fields.values():
            try:
                line.append(write(getattr(job, attribute)))
            except Exception:  # whatever it is, squeue is asked for this job
                line.append(None)
        sys.stdout.write(json.dumps(line) + "\n")
    print(json.dumps({"jobs": len(jobs)}))  # noqa: T201 (its answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
