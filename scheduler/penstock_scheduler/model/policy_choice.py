"""Which policy decides: section `[policy]` of the settings file, the body of `PUT /v1/policy`, and part of each recorded round.

```toml
[policy]
name = "sia"                  # decides
stages = ["synergy-tune"]     # refine its plan, in this order

[policy.sia]                  # settings of a policy or a stage, by its name
fairness_p = -1.0

[policy.partitions.debug]     # a policy of its own for one partition
name = "fifo"
```

In JSON, the settings are under `settings`: `{"name": "sia", "settings": {"sia": {"fairness_p": -1.0}}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.people.errors import ConfigError


class PartitionPolicy(BaseModel):
    """The policy of one partition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="The policy that decides for the jobs and the nodes of this partition.")


class PolicyChoice(BaseModel):
    """Section `[policy]`: which policy decides, and the settings of it and its stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="sia", description="The policy that decides. See `penstock policy list`.")
    stages: tuple[str, ...] = Field(
        default=(), description="Stages that refine the policy's plan, one after the other, such as synergy-tune."
    )
    partitions: dict[str, PartitionPolicy] = Field(
        default={}, description="Partitions with a policy of their own: `[policy.partitions.NAME]`, with a key `name`."
    )
    settings: dict[str, dict[str, Any]] = {}
    """By policy and stage; in the settings file, `[policy.NAME]`."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that decide, the main one first."""
        return tuple(dict.fromkeys((self.name, *(each.name for each in self.partitions.values()))))

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all policies and stages."""
        return tuple(dict.fromkeys((*self.policies, *self.stages)))

    def settings_of(self, part: str) -> dict[str, Any]:
        """The settings of a policy or stage. A preset's may stand under its policy's name, if that is no part itself."""
        base = part.partition(":")[0]
        return {**(self.settings.get(base, {}) if base not in self.parts else {}), **self.settings.get(part, {})}

    def over(self, below: Mapping[str, Mapping[str, Any]]) -> PolicyChoice:
        """The same choice with its settings laid over those `below`, which may have more parts.

        Raises:
            ConfigError: there are settings of something that is no part.
        """
        self.check()
        settings = {part: {**below.get(part, {}), **self.settings_of(part)} for part in self.parts}
        return self.model_copy(update={"settings": settings})

    def check(self) -> None:
        """Raises ConfigError if there are settings of something that is no part."""
        known = {*self.parts, *(part.partition(":")[0] for part in self.parts)}
        for name in self.settings:
            if name not in known:
                raise ConfigError(
                    f"policy {self} has no part {name!r}; there are settings for each part: {', '.join(self.parts)}"
                )

    def __str__(self) -> str:
        """A label for people: the policy, its stages after plus signs, and other policies by partition."""
        own = ", ".join(f"{partition}: {each.name}" for partition, each in self.partitions.items())
        return "+".join((self.name, *self.stages)) + (f" ({own})" if own else "")
