"""The site's own limits, for every cluster: what users and accounts may hold of the GPUs that Penstock gives out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from penstock_scheduler.model import GpuLimit, Job, JobFacts, JobId


class PartitionRules(BaseModel):
    """What is otherwise for jobs of one partition."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpus: NonNegativeInt | None = None
    weight: PositiveFloat = 1.0
    max_gpus: PositiveInt | None = None
    preemptible: bool | None = None
    restart_cost_s: PositiveFloat | None = None


class LimitSettings(BaseModel):
    """Section `[limits]` of the settings file. Jobs that Penstock does not manage do not count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus_per_user: NonNegativeInt | None = Field(
        default=None, description="GPUs that the jobs of one user may hold together; absent: no limit."
    )
    gpus_per_account: NonNegativeInt | None = Field(
        default=None, description="GPUs that the jobs of one account may hold together; absent: no limit."
    )
    users: dict[str, NonNegativeInt] = Field(
        default={}, description="Users with a limit of their own in place of gpus_per_user."
    )
    accounts: dict[str, NonNegativeInt] = Field(
        default={}, description="Accounts with a limit of their own in place of gpus_per_account."
    )
    partitions: dict[str, PartitionRules] = Field(
        default={},
        description="What is otherwise for the jobs of a partition: `gpus` (that those submitted to it may hold together), "
        "`weight` (factor), `max_gpus` (of one job, never below its own least), `preemptible` (true or false, whatever the "
        "job says), `restart_cost_s` (of jobs that do not say). A job goes by the partition that it was submitted to, wherever "
        "it runs; one that was submitted to several by the first of them.",
    )


def site_limits(settings: LimitSettings, jobs: Sequence[Job]) -> tuple[GpuLimit, ...]:
    """The limits that bear on these jobs. A job without an account has no limit by account."""
    users = {name: settings.users.get(name, settings.gpus_per_user) for name in sorted({job.user for job in jobs})}
    names = sorted({job.account for job in jobs} - {""})
    accounts = {name: settings.accounts.get(name, settings.gpus_per_account) for name in names}
    return (
        *(GpuLimit("user", name, gpus) for name, gpus in users.items() if gpus is not None),
        *(GpuLimit("account", name, gpus) for name, gpus in accounts.items() if gpus is not None),
        *(
            GpuLimit("partition", name, rule.gpus)
            for name, rule in settings.partitions.items()
            if rule.gpus is not None
        ),
    )


def by_partition(
    rules: Mapping[str, PartitionRules], jobs: Sequence[Job], facts: Mapping[JobId, JobFacts]
) -> tuple[tuple[Job, ...], dict[JobId, JobFacts]]:
    """The jobs and their facts under the rules of the partition that each job was submitted to first."""
    found, known = [], dict(facts)
    for job in jobs:
        rule = rules.get(next(iter(job.partitions), ""))
        if rule is None:
            found.append(job)
            continue
        spec = job.spec
        changes: dict[str, object] = {}
        if rule.max_gpus is not None:
            changes["max_gpus"] = max(min(spec.max_gpus, rule.max_gpus), spec.min_gpus)
        if rule.preemptible is not None:
            changes["preemptible"] = rule.preemptible
        if rule.restart_cost_s is not None and spec.restart_cost_s is None and not job.pauses_s:
            known[job.id] = dataclasses.replace(known[job.id], restart_cost_s=rule.restart_cost_s)
        found.append(dataclasses.replace(job, spec=spec.model_copy(update=changes), weight=job.weight * rule.weight))
    return tuple(found), known
