"""The bodies of `POST /v1/whatif`: recorded history, replayed on another cluster or under other policies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from penstock_scheduler.api.messages import Body

_Nodes = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{0,500}$")]
_Policy = Annotated[str, StringConstraints(pattern=r"^[a-z0-9:-]{1,100}$")]

State = Literal["running", "done", "failed", "cancelled"]


class WhatIfOrder(Body):
    """What to replay. Without any field: the whole record, on the same cluster, under the policy that decides now."""

    add_nodes: _Nodes = ""
    """Nodes to add, such as `h100:2x8`."""
    remove_nodes: _Nodes = ""
    """Nodes to remove, such as `t4:2x4`: the last of that kind."""
    like: _Nodes = ""
    """Speed of a GPU type without recorded jobs: `h100=a100:2` is twice as fast as an a100."""
    policies: tuple[_Policy, ...] = Field(default=(), max_length=5)
    """Policies to compare, with their default settings. Empty: the one that decides now, with its settings."""
    from_s: float | None = Field(default=None, ge=0, le=2**53)
    """Beginning of the period, s since 1970; None: the first round that is kept."""
    to_s: float | None = Field(default=None, ge=0, le=2**53)
    """End of the period; None: now."""
    seeds: int = Field(default=1, ge=1, le=5)
    """Simulations of each policy, each with other random numbers."""

    @model_validator(mode="after")
    def _a_period(self) -> WhatIfOrder:
        if self.from_s is not None and self.to_s is not None and self.from_s >= self.to_s:
            raise ValueError("from_s must be before to_s")
        return self


class WhatIfTask(Body):
    """A replay that penstockd has begun. penstockd keeps the newest in memory: after a restart there are none."""

    id: str
    user: str
    """Who asked."""
    order: WhatIfOrder
    state: State
    fraction: float
    """Share of the work that is done, from 0 to 1."""
    step: str = ""
    """What it does now, in words."""
    begun_s: float
    ended_s: float | None = None
    error: str = ""
    """Why it failed, as a sentence; empty: it did not."""
    result: dict[str, Any] | None = None
    """As `penstock simulate whatif --json` prints it, when it is done: `policies` has `recorded`, which is what really happened,
    and each simulated policy, with the `mean` of each figure, half of its 95 % confidence interval (`ci95`) and the figures of
    each seed; `notes` says what the record cannot tell. Lists of tasks leave it out."""
