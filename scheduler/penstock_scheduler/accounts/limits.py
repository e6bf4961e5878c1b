"""The site's own limits, for every cluster: how many of the GPUs that Penstock allocates users and accounts may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from penstock_scheduler.model import GpuLimit, Job, JobFacts, JobId


class PartitionRules(BaseModel):
    """What differs for the jobs of one partition."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpus: NonNegativeInt | None = None
    weight: PositiveFloat = 1.0
    max_gpus: PositiveInt | None = None
    preemptible: bool | None = None
    restart_cost_s: PositiveFloat | None = None


class LimitSettings(BaseModel):
    """Section `[limits]` of the settings file. Jobs that Penstock never managed do not count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus_per_user: NonNegativeInt | None = Field(
        default=None, description="GPUs that the jobs of one user may hold together; not set: no limit."
    )
    gpus_per_account: NonNegativeInt | None = Field(
        default=None, description="GPUs that the jobs of one account may hold together; not set: no limit."
    )
    users: dict[str, NonNegativeInt] = Field(
        default={}, description="Limits of single users in place of gpus_per_user, by user."
    )
    accounts: dict[str, NonNegativeInt] = Field(
        default={}, description="Limits of single accounts in place of gpus_per_account, by account."
    )
    partitions: dict[str, PartitionRules] = Field(
        default={},
        description="Rules for the jobs of a partition: `gpus` (limit for all of them together), `weight` (factor on their "
        "weight), `max_gpus` (limit for one job, but never below its min_gpus), `preemptible` (true or false, overrides the "
        "job spec), `restart_cost_s` (for jobs whose job spec has none). The partition that a job was submitted to counts, "
        "wherever the job runs; of several, the first one.",
    )


def site_limits(settings: LimitSettings, jobs: Sequence[Job], unseen: Iterable[Job] = ()) -> tuple[GpuLimit, ...]:
    """The limits that apply to these jobs. A job without an account has no limit by account.

    Args:
        unseen: jobs that no round acts on and that hold GPUs which Penstock gave them. These GPUs count: else a user would get
            others in their place by taking a running job away from Penstock.
    """
    users = {name: settings.users.get(name, settings.gpus_per_user) for name in sorted({job.user for job in jobs})}
    names = sorted({job.account for job in jobs} - {""})
    accounts = {name: settings.accounts.get(name, settings.gpus_per_account) for name in names}
    limits = (
        *(GpuLimit("user", name, gpus) for name, gpus in users.items() if gpus is not None),
        *(GpuLimit("account", name, gpus) for name, gpus in accounts.items() if gpus is not None),
        *(
            GpuLimit("partition", name, rule.gpus)
            for name, rule in settings.partitions.items()
            if rule.gpus is not None
        ),
    )
    holding = [(job, job.running_on.gpus) for job in unseen if job.running_on is not None]

    def left(limit: GpuLimit) -> int:
        return max(limit.gpus - sum(gpus for job, gpus in holding if limit.covers(job)), 0)

    return tuple(dataclasses.replace(limit, gpus=left(limit)) for limit in limits)


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
        if rule.restart_cost_s is not None and spec.restart_cost_s is None and not known[job.id].cost_measured:
            known[job.id] = dataclasses.replace(known[job.id], restart_cost_s=rule.restart_cost_s)
        found.append(dataclasses.replace(job, spec=spec.model_copy(update=changes), weight=job.weight * rule.weight))
    return tuple(found), known
