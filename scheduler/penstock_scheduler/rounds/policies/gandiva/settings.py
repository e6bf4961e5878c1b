"""Settings of `gandiva`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.rounds.sharing.groups import GroupSettings
from penstock_scheduler.rounds.sharing.packing import PackingSettings


class GandivaSettings(BaseModel):
    """Section `[policy.gandiva]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["introspective", "reactive"] = Field(
        default="introspective", description="reactive: no job is packed, and no job migrates."
    )
    slice_s: float = Field(default=60.0, gt=0, description="Length of a time slice, seconds.")
    max_height: float = Field(
        default=2.0,
        ge=1,
        description="A new job may land on a node until the jobs there want this many times the node's GPUs.",
    )
    interval_s: float = Field(
        default=600.0,
        ge=0,
        description="Least time between a job's last move and its next migration or growth, seconds.",
    )
    idle_s: float = Field(
        default=300.0,
        ge=0,
        description="Least time for which GPUs have been idle before a job grows into them, seconds.",
    )
    pack_interval_s: float = Field(
        default=120.0, ge=0, description="Least time between a job's last move and its next packing, seconds."
    )
    least_total: float = Field(
        default=1.0, ge=1, description="A pack is undone if its jobs' relative throughputs add up to no more than this."
    )
    groups: GroupSettings = Field(default=GroupSettings(), description="How trials of one search are judged.")

    @property
    def packing(self) -> PackingSettings:
        """Settings of `sharing.packing`."""
        return PackingSettings(least_total=self.least_total, interval_s=self.pack_interval_s)
