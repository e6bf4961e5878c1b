"""Starburst's public results, as files: what `benchmarks/starburst.py` and the tests compare the replay with."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from penstock_scheduler.people.errors import ConfigError

from .starburst import Figures, RigidJob, SiteSpec

KINDS = {
    "zero": Wait.NONE,
    "constant": Wait.CONSTANT,
    "linear_runtime": Wait.RUNTIME,
    "linear_capacity": Wait.RESOURCE,
    "linear_cost": Wait.COMPUTE,
}
"""The reference's names of the waiting policies -> Penstock's."""

STATS = {
    "total_cloud_cost": "total_cloud_cost",
    "avg_cloud_cost": "avg_cloud_cost",
    "avg_waiting": "avg_wait",
    "avg_jct": "avg_jct",
    "90_jct": "p90_jct",
    "99_jct": "p99_jct",
    "avg_wait": "avg_wait",
    "90_wait": "p90_wait",
    "99_wait": "p99_wait",
    "cluster_utilization": "cluster_utilization",
    "system_utilization": "system_utilization",
}
"""The reference's names of the figures -> fields of `Figures`."""

LONGEST_WAIT_H = 24.0
"""The reference reports no 99th percentile of waits above it."""


@dataclass(frozen=True, slots=True)
class GoldenRow:
    """One policy on one set of jobs, and the reference's result."""

    jobs: str
    """Name of the set: its file is `NAME_jobs.csv`, perhaps with `.gz`."""
    name: str
    policy: WaitingPolicy
    site: SiteSpec
    warmup_jobs: int
    stats: Mapping[str, float]
    cloud_jobs: int

    def worst(self, found: Figures) -> tuple[float, str]:
        """The largest difference from the reference's figures, and the name of that figure. `inf` if the numbers of cloud jobs
        differ."""
        if found.cloud_jobs != self.cloud_jobs:
            return float("inf"), "cloud_jobs"
        differences = []
        for name, field in STATS.items():
            value = getattr(found, field)
            if name == "99_wait":
                value = min(LONGEST_WAIT_H, value)
            differences.append((abs(value - self.stats[name]), name))
        return max(differences)


def golden_rows(file: Path) -> list[GoldenRow]:
    """The rows of a golden file. Raises ConfigError, naming what it lacks."""
    try:
        sets = json.loads(file.read_text(encoding="utf-8"))
        return [
            _row(name, given, policy, row) for name, given in sets.items() for policy, row in given["policies"].items()
        ]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; give one of Starburst's golden files (docs/developer/data.md)") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not one of Starburst's golden files: {error!r}; see docs/developer/data.md"
        ) from None


def _row(jobs: str, given: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> GoldenRow:
    params, cluster = row["params"], given["cluster"]
    kind, patience, long_h = (
        KINDS[params["waiting_policy"]],
        params.get("preempt_cloud_ratio"),
        params.get("long_job_thres"),
    )
    if patience is not None:
        policy = WaitingPolicy(Wait.STAR, params["waiting_factor"], None, long_h, patience)
    else:
        policy = WaitingPolicy(kind, 0.0 if kind is Wait.NONE else params["waiting_factor"], long_h)
    site = SiteSpec(
        cluster["nodes"],
        cluster["gpus_per_node"],
        "best" if cluster["binpack"] == "best-fit" else "first",
        params.get("sched_alg", cluster["queue"]),
        bool(params.get("loop", 0)),
        bool(params.get("backfill", False)),
        params.get("max_queue_length"),
    )
    return GoldenRow(jobs, name, policy, site, given["warmup_jobs"], row["stats"], row["cloud_jobs"])


def golden_jobs(folder: Path, name: str) -> list[RigidJob]:
    """The jobs of a set. Raises ConfigError."""
    for file in (folder / f"{name}_jobs.csv", folder / f"{name}_jobs.csv.gz"):
        if file.is_file():
            with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as text:
                return [
                    RigidJob(float(row["arrival_h"]), float(row["runtime_h"]), int(row["gpus"]))
                    for row in csv.DictReader(text)
                ]
    raise ConfigError(f"{folder} has no {name}_jobs.csv; name the folder of Starburst's data (docs/developer/data.md)")


@dataclass(frozen=True, slots=True)
class GoldenOutcome:
    """The reference's decision for a job: `allocation` is node -> GPUs."""

    cloud: bool
    start_h: float
    allocation: Mapping[int, list[int]]


def golden_outcomes(folder: Path, name: str) -> dict[str, list[GoldenOutcome]] | None:
    """Policy -> outcome of each job, if the folder has them for this set."""
    file = folder / f"{name}_outcomes.csv.gz"
    if not file.is_file():
        return None
    found: dict[str, list[GoldenOutcome]] = {}
    with gzip.open(file, "rt") as text:
        for row in csv.DictReader(text):
            allocation = {int(node): gpus for node, gpus in json.loads(row["alloc"] or "{}").items()}
            outcome = GoldenOutcome(row["state"] == "cloud", float(row["start_h"]), allocation)
            found.setdefault(row["policy"], []).append(outcome)
    return found
