"""The site's own limits, for every cluster: what users and accounts may hold of the GPUs that Penstock gives out."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from penstock_scheduler.model import GpuLimit, Job


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

    partitions: dict[str, NonNegativeInt] = Field(
        default={}, description="GPUs that the jobs submitted to a partition may hold together."
    )


def site_limits(settings: LimitSettings, jobs: Sequence[Job]) -> tuple[GpuLimit, ...]:
    """The limits that bear on these jobs. A job without an account has no limit by account."""
    users = {name: settings.users.get(name, settings.gpus_per_user) for name in sorted({job.user for job in jobs})}
    names = sorted({job.account for job in jobs} - {""})
    accounts = {name: settings.accounts.get(name, settings.gpus_per_account) for name in names}
    return (
        *(GpuLimit("user", name, gpus) for name, gpus in users.items() if gpus is not None),
        *(GpuLimit("account", name, gpus) for name, gpus in accounts.items() if gpus is not None),
        *(GpuLimit("partition", name, gpus) for name, gpus in settings.partitions.items()),
    )
