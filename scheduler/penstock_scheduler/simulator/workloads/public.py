"""Traces that others have published: what each column of theirs is to us. docs/developer/data.md says where they come from.

Each function takes one row and gives its job, or says in words why the row is left out.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from penstock_scheduler.model import JobSpec
from penstock_scheduler.simulator.workloads.applications import APPLICATIONS
from penstock_scheduler.simulator.workloads.table import Row
from penstock_scheduler.simulator.workloads.workload import WorkloadJob, Wrong, rigid_spec

MOST_GPUS = 64
"""GPUs that an adaptive job of Sia's windows may get: its policy never gives one more."""

OPENB_TYPES = {"A10": "a10", "P100": "p100", "T4": "t4", "V100M16": "v100", "V100M32": "v100_32gb"} | {
    name: name.lower() for name in ("G1", "G2", "G3")
}
"""GPU types of the openb trace. G1 to G3 are its own names for types that it does not tell."""


def sia(row: Row) -> WorkloadJob:
    """Windows of Pollux and Sia: adaptive trainings, each of a whole application.

    `num_replicas` and `batch_size` are the tuned request of rigid policies. The job spec knows the batch sizes that the
    application trains well with, which its user would, and nothing of its speed.
    """
    name = row.text("application")
    if not name:
        raise Wrong("no application", "the name of a model, such as cifar10")
    return WorkloadJob(
        id=row.text("name"),
        submit_s=row.number("time", least=0),
        gpus=row.whole("num_replicas", least=1),
        spec=_adaptive(name),
        model=name,
        batch_size=row.whole("batch_size", least=1),
    )


@lru_cache
def _adaptive(name: str) -> JobSpec:
    application = APPLICATIONS.get(name)
    if application is None:
        return JobSpec(max_gpus=MOST_GPUS)
    return JobSpec(max_gpus=MOST_GPUS, batch_size=application.initial_batch, max_batch_size=application.max_batch)


def philly(row: Row) -> WorkloadJob:
    """Microsoft's Philly, as Sia's artifact reduces it. `cluster`, a virtual cluster, is the account. It names no jobs."""
    gpus = row.whole("num_gpus", least=1)
    return WorkloadJob(
        id=f"philly-{row.line - 1}",
        submit_s=instant(row, "timestamp"),
        gpus=gpus,
        spec=rigid_spec(gpus),
        account=row.text("cluster"),
        duration_s=row.number("duration", above=0),
    )


def tiresias(row: Row) -> WorkloadJob:
    """Tiresias' 60 jobs. `duration` is the run that was recorded; the models are names only, for we know no speed of them."""
    gpus = row.whole("num_gpu", least=1)
    return WorkloadJob(
        id=row.text("job_id"),
        name=row.text("model_name"),
        submit_s=row.number("submit_time", least=0),
        gpus=gpus,
        spec=rigid_spec(gpus),
        duration_s=row.number("duration", above=0),
    )


def starburst(row: Row) -> WorkloadJob:
    """Starburst's lists, in hours."""
    gpus = row.whole("gpus", least=1)
    return WorkloadJob(
        id=row.text("job_id"),
        submit_s=row.number("arrival_h", least=0) * 3600,
        gpus=gpus,
        spec=rigid_spec(gpus),
        duration_s=row.number("runtime_h", above=0) * 3600,
    )


SYNERGY_PROFILES = "sensitivity_profiles.json"
"""Beside a trace of Synergy: seconds of each model's iterations at a proportional share of CPUs and memory."""


def synergy(row: Row) -> WorkloadJob:
    """Synergy's replay traces: the work is iterations, whose time is in `SYNERGY_PROFILES` beside the file."""
    gpus, model = row.whole("gpus", least=1), row.text("model")
    profiles = row.file.parent / SYNERGY_PROFILES
    iteration_s = _iteration_s(profiles)
    if model not in iteration_s:
        raise Wrong(f"model={model!r}", f"one that {profiles} measured: {', '.join(sorted(iteration_s))}")
    return WorkloadJob(
        id=row.text("job_id"),
        name=model,
        submit_s=row.number("arrival_s", least=0),
        gpus=gpus,
        spec=rigid_spec(gpus),
        duration_s=row.number("iterations", above=0) * iteration_s[model],
    )


@lru_cache
def _iteration_s(profiles: Path) -> dict[str, float]:
    try:
        measured = json.loads(profiles.read_text(encoding="utf-8"))["cpu_per_gpu_3"].values()
        return {entry["model"]: float(entry["iter_time_s"]) for entry in measured}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(
            f"no usable {profiles} ({error!r:.80})", "Synergy's profiles beside its trace: they time its iterations"
        ) from None


def openb(row: Row) -> WorkloadJob | str:
    """Alibaba's openb pods. A pod that shares a GPU counts as one GPU; `qos` is its account."""
    gpus = row.whole("num_gpu")
    if gpus == 0:
        return "pods without GPU"
    if not row.text("scheduled_time"):
        return "pods that never ran"
    types = tuple(_openb_type(name) for name in row.text("gpu_spec").split("|") if name)
    begun_s = row.number("scheduled_time", least=0)
    ended_s = row.number("deletion_time", least=0)
    if ended_s <= begun_s:
        raise Wrong(f"deletion_time={ended_s:g} with scheduled_time={begun_s:g}", "an end after the beginning")
    return WorkloadJob(
        id=row.text("name"),
        submit_s=row.number("creation_time", least=0),
        gpus=gpus,
        spec=rigid_spec(gpus, types or None),
        account=row.text("qos"),
        duration_s=ended_s - begun_s,
        cpus=max(round(row.number("cpu_milli", least=0) / 1000), 1),
        mem_mb=row.number("memory_mib", least=0) or None,
    )


def _openb_type(name: str) -> str:
    if name not in OPENB_TYPES:
        raise Wrong(f"the GPU type {name!r}", f"one of {', '.join(OPENB_TYPES)}")
    return OPENB_TYPES[name]


def instant(row: Row, column: str) -> float:
    """A date and time, or seconds since 1970, as seconds. Without a zone it is taken as UTC: only differences count."""
    text = row.text(column)
    try:
        if text.isdigit():
            return float(text)
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise Wrong(
            f"{column}={text!r}", "a date and time such as 2026-03-29T14:00:00, or seconds since 1970"
        ) from None
    return (at.replace(tzinfo=None) - datetime(1970, 1, 1) - (at.utcoffset() or _NO_TIME)).total_seconds()


_NO_TIME = datetime(1970, 1, 1) - datetime(1970, 1, 1)
