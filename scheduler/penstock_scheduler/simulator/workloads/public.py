"""Published traces: what each of their columns means to Penstock. docs/developer/data.md says where they come from.

Each function converts a chunk of rows into columns of jobs (`WORKLOAD` in `frames`). Rows that are no jobs are left out
and counted by reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np

from penstock_profiles.throughput import FloatArray
from penstock_scheduler.model import JobSpec
from penstock_scheduler.simulator.workloads.table import Columns, TableRows, Wrong
from penstock_scheduler.simulator.workloads.workload import APPLICATIONS, rigid_spec

MOST_GPUS = 64
"""GPUs that an adaptive job of Sia's windows may get: Sia's policy never allocates more to one job."""

OPENB_TYPES = {"A10": "a10", "P100": "p100", "T4": "t4", "V100M16": "v100", "V100M32": "v100_32gb"} | {
    name: name.lower() for name in ("G1", "G2", "G3")
}
"""GPU types of the openb trace. G1 to G3 are the trace's own names for types that it does not disclose."""


def sia(rows: TableRows) -> Columns:
    """Windows of Pollux and Sia: adaptive trainings, each of a whole application.

    `num_replicas` and `batch_size` are the tuned request that rigid policies get. The job spec has the range of batch
    sizes that trains well, as a user would know it, and nothing of the job's speed.
    """
    names = rows.text("application")
    missing = np.array([not name for name in names], dtype=np.bool_)
    rows.reject(missing, lambda row: "no application", "the name of a model, such as cifar10")
    return {
        "id": rows.text("name"),
        "submit_s": rows.number("time", least=0),
        "gpus": rows.whole("num_replicas", least=1),
        "spec": [_adaptive(name) for name in names],
        "model": names,
        "batch_size": rows.whole("batch_size", least=1),
    }


@lru_cache
def _adaptive(name: str) -> JobSpec:
    application = APPLICATIONS.get(name)
    if application is None:
        return JobSpec(max_gpus=MOST_GPUS)
    return JobSpec(max_gpus=MOST_GPUS, batch_size=application.initial_batch, max_batch_size=application.max_batch)


def philly(rows: TableRows) -> Columns:
    """Microsoft's Philly, as Sia's artifact reduces it. `cluster`, a virtual cluster, becomes the account. Jobs have no
    names."""
    gpus = rows.whole("num_gpus", least=1)
    return {
        "id": [f"philly-{line - 1}" for line in rows.lines],
        "submit_s": instants(rows, "timestamp"),
        "gpus": gpus,
        "spec": rigid_specs(rows, gpus),
        "account": rows.text("cluster"),
        "duration_s": rows.number("duration", above=0),
    }


def tiresias(rows: TableRows) -> Columns:
    """Tiresias' 60 jobs. `duration` is the recorded run. The models are only names: their speed is unknown."""
    gpus = rows.whole("num_gpu", least=1)
    return {
        "id": rows.text("job_id"),
        "name": rows.text("model_name"),
        "submit_s": rows.number("submit_time", least=0),
        "gpus": gpus,
        "spec": rigid_specs(rows, gpus),
        "duration_s": rows.number("duration", above=0),
    }


def starburst(rows: TableRows) -> Columns:
    """Starburst's lists. Their times are in hours."""
    gpus = rows.whole("gpus", least=1)
    return {
        "id": rows.text("job_id"),
        "submit_s": rows.number("arrival_h", least=0) * 3600,
        "gpus": gpus,
        "spec": rigid_specs(rows, gpus),
        "duration_s": rows.number("runtime_h", above=0) * 3600,
    }


SYNERGY_PROFILES = "sensitivity_profiles.json"
"""File beside a trace of Synergy: seconds per iteration of each model with a proportional share of CPUs and memory."""


def synergy(rows: TableRows) -> Columns:
    """Synergy's replay traces. The work is a number of iterations; `SYNERGY_PROFILES` beside the file has their
    time."""
    gpus = rows.whole("gpus", least=1)
    models = rows.text("model")
    profiles = rows.file.parent / SYNERGY_PROFILES

    def iteration_s(model: str) -> float:
        known = _iterations_s(profiles)
        if model not in known:
            raise Wrong(f"model={model!r}", f"one that {profiles} measured: {', '.join(sorted(known))}")
        return known[model]

    seconds = np.array(rows.each(models, iteration_s, 0.0))
    return {
        "id": rows.text("job_id"),
        "name": models,
        "submit_s": rows.number("arrival_s", least=0),
        "gpus": gpus,
        "spec": rigid_specs(rows, gpus),
        "duration_s": rows.number("iterations", above=0) * seconds,
    }


@lru_cache
def _iterations_s(profiles: Path) -> dict[str, float]:
    """Model -> seconds per iteration. Raises Wrong."""
    try:
        measured = json.loads(profiles.read_text(encoding="utf-8"))["cpu_per_gpu_3"].values()
        return {entry["model"]: float(entry["iter_time_s"]) for entry in measured}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(
            f"no usable {profiles} ({error!r:.80})", "Synergy's profiles beside its trace: they time its iterations"
        ) from None


def openb(rows: TableRows) -> Columns:
    """Alibaba's openb pods. A pod that shares a GPU counts as one GPU; `qos` becomes the account."""
    gpus = rows.whole("num_gpu")
    rows.leave_out(np.array(gpus) == 0, "pods without GPU")
    rows.leave_out(~rows.given("scheduled_time"), "pods that never ran")
    types = rows.each(rows.text("gpu_spec"), _openb_types, None)
    began_s = rows.number("scheduled_time", least=0)
    ended_s = rows.number("deletion_time", least=0)
    rows.reject(
        ended_s <= began_s,
        lambda row: f"deletion_time={ended_s[row]:g} with scheduled_time={began_s[row]:g}",
        "an end after the beginning",
    )
    submit_s = rows.number("creation_time", least=0)
    cpus = np.nan_to_num(rows.number("cpu_milli", least=0))
    return {
        "id": rows.text("name"),
        "submit_s": submit_s,
        "gpus": gpus,
        "spec": rigid_specs(rows, gpus, types),
        "account": rows.text("qos"),
        "duration_s": ended_s - began_s,
        "cpus": [max(round(milli / 1000), 1) for milli in cpus.tolist()],
        "mem_mb": [number or None for number in rows.number("memory_mib", least=0).tolist()],
    }


def _openb_types(text: str) -> tuple[str, ...] | None:
    names = [name for name in text.split("|") if name]
    for name in names:
        if name not in OPENB_TYPES:
            raise Wrong(f"the GPU type {name!r}", f"one of {', '.join(OPENB_TYPES)}")
    return tuple(OPENB_TYPES[name] for name in names) or None


def rigid_specs(
    rows: TableRows, gpus: Sequence[int], types: Sequence[tuple[str, ...] | None] | None = None
) -> list[JobSpec | None]:
    """Job specs of jobs that take a fixed number of GPUs, perhaps of certain types; None for rows that are not
    valid."""
    of_type = [None] * len(rows) if types is None else types
    return [
        rigid_spec(count, names) if valid else None
        for count, names, valid in zip(gpus, of_type, rows.valid.tolist(), strict=True)
    ]


DATE_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S")
"""Forms of dates that are read a column at a time."""


def instants(rows: TableRows, column: str) -> FloatArray:
    """Dates and times, or seconds since 1970, as seconds. A time without a zone counts as UTC: only differences
    matter."""
    import pandas as pd  # takes a second to load, and reading settings loads this module

    texts = rows.text(column)
    for form in DATE_FORMATS:
        dates = pd.to_datetime(pd.Series(texts, dtype=object), format=form, errors="coerce")
        if not dates.isna().any():
            seconds: FloatArray = (dates - pd.Timestamp(0)).dt.total_seconds().to_numpy(dtype=np.float64)
            return seconds
    return np.array(rows.each(texts, lambda text: _instant(column, text), np.nan))


def _instant(column: str, text: str) -> float:
    try:
        if text.isdigit():
            return float(text)
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise Wrong(
            f"{column}={text!r}", "a date and time such as 2026-03-29T14:00:00, or seconds since 1970"
        ) from None
    return (at.replace(tzinfo=None) - datetime(1970, 1, 1) - (at.utcoffset() or timedelta())).total_seconds()


SACCT_COLUMNS = (
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

SACCT_SEPARATOR = "|"

_GPU = re.compile(r"gres/gpu(?::(?P<type>[^=,:]+))?=(?P<count>\d+)")
_MEM = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def sacct(rows: TableRows) -> Columns:
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
