"""Small snapshots for the scheduler's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator
from penstock_scheduler.model import Job, JobFacts, JobSpec, Node, Phase, Placement, Share, Snapshot
from penstock_scheduler.model.policy_choice import PartitionPolicy, PolicyChoice
from penstock_scheduler.simulator import nodes_from_spec


def job(job_id: str, *, phase: Phase = Phase.QUEUED, submit_s: float = 0.0, restarts: int = 0, **fields: object) -> Job:
    """A job whose job spec has `fields`; allocation, target, time_limit_s and partitions are keywords too."""
    more = (
        *("allocation", "target", "account", "qos", "reservation", "nodes", "weight", "time_limit_s"),
        *("started_s", "stopped_s", "requeued_s", "leaving", "pauses_s"),
    )
    own = {name: fields.pop(name) for name in more if name in fields}
    user = fields.pop("user", "ada")
    partitions = fields.pop("partitions", ("all",))
    spec = JobSpec.model_validate({"max_gpus": 64} | fields)
    return Job(job_id, f"name-{job_id}", user, spec, partitions, phase, submit_s, restarts, **own)  # type: ignore[arg-type]


def on(gpu_type: str, partition: str = "all", **gpus: int) -> Placement:
    """A placement: `on("t4", t4_00=2)`."""
    shares = tuple(Share(name.replace("_", "-"), count) for name, count in sorted(gpus.items()))
    return Placement(gpu_type, partition, shares)


def snapshot(
    nodes: str | tuple[Node, ...],
    jobs: list[Job],
    models: Mapping[str, AnyEstimator] | None = None,
    *,
    time_s: float = 1000.0,
    restart_cost_s: float = 30.0,
    remaining: Mapping[str, float] | None = None,
    attained: Mapping[str, dict[str, float]] | None = None,
) -> Snapshot:
    """A snapshot on nodes of a spec; jobs without a model have a linear one."""
    known = dict(models or {})
    return Snapshot(
        round=1,
        time_s=time_s,
        nodes=nodes_from_spec(nodes) if isinstance(nodes, str) else nodes,
        jobs=tuple(jobs),
        facts={
            each.id: JobFacts(
                known.get(each.id, LinearEstimator()),
                restart_cost_s,
                remaining_work=(remaining or {}).get(each.id),
                attained_gpu_s=(attained or {}).get(each.id, {}),
            )
            for each in jobs
        },
    )


def with_facts(state: Snapshot, **values: Mapping[str, object]) -> Snapshot:
    """The snapshot with other facts: field of `JobFacts` -> job -> value. Jobs that a field does not name have its default."""
    defaults = {each.name: each for each in dataclasses.fields(JobFacts)}
    facts = {}
    for job_id, known in state.facts.items():
        changes = {}
        for name, of_jobs in values.items():
            each = defaults[name]
            if job_id in of_jobs:
                changes[name] = of_jobs[job_id]
            elif each.default_factory is not dataclasses.MISSING:
                changes[name] = each.default_factory()
            elif each.default is not dataclasses.MISSING:
                changes[name] = each.default
        facts[job_id] = dataclasses.replace(known, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(state, facts=facts)


def table(**rates: dict[int, float]) -> TableEstimator:
    """Measured rates by type."""
    return TableEstimator(dict(rates))


def rate(model: AnyEstimator, gpu_type: str, nodes: int, gpus: int) -> float:
    """One entry of a model."""
    return float(model.goodput(gpu_type, np.array([nodes]), np.array([gpus]))[0])


def staged(name: str, *stages: str, partitions: Mapping[str, str] | None = None, **settings: Any) -> PolicyChoice:
    """A policy with stages, and others for some partitions; `settings` are by part, with _ for -."""
    return PolicyChoice(
        name=name,
        stages=stages,
        partitions={partition: PartitionPolicy(name=own) for partition, own in (partitions or {}).items()},
        settings={part.replace("_", "-"): values for part, values in settings.items()},
    )
