"""The policies, one file each, and the registry: a new policy is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model.wish import describe_errors
from penstock_scheduler.policies.cloud import WithCloud
from penstock_scheduler.policies.gavel import Gavel, GavelSettings
from penstock_scheduler.policies.pollux import Pollux, PolluxSettings
from penstock_scheduler.policies.queues import (
    Fifo,
    Ftf,
    FtfSettings,
    Las,
    LasSettings,
    QueueSettings,
    SlurmBackfill,
    SlurmBackfillSettings,
    Srtf,
)
from penstock_scheduler.policies.sia import ARTIFACT, Sia, SiaSettings
from penstock_scheduler.ports import Policy

REGISTRY: dict[str, tuple[Callable[[Any], Policy], type[BaseModel]]] = {
    "sia": (Sia, SiaSettings),
    "pollux": (Pollux, PolluxSettings),
    "gavel": (Gavel, GavelSettings),
    "fifo": (Fifo, QueueSettings),
    "srtf": (Srtf, QueueSettings),
    "las": (Las, LasSettings),
    "ftf": (Ftf, FtfSettings),
    "slurm-backfill": (SlurmBackfill, SlurmBackfillSettings),
}
"""Name in the settings file -> how to build the policy from its settings, and what those are."""

PRESETS: dict[str, dict[str, Any]] = {"sia:artifact": ARTIFACT}
"""Names for a policy with settings of its own: `POLICY:PRESET`."""


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> tuple[Policy, dict[str, Any]]:
    """The policy called `name`, and its settings in full. Raises ConfigError for a name or a setting that is wrong."""
    base, _, preset = name.partition(":")
    if base not in REGISTRY or (preset and name not in PRESETS):
        raise ConfigError(f"unknown policy {name!r}; the policies are {', '.join(sorted([*REGISTRY, *PRESETS]))}")
    build, model = REGISTRY[base]
    try:
        checked = model.model_validate(PRESETS.get(name, {}) | dict(settings or {}))
    except ValidationError as error:
        raise ConfigError(f"[policy.{name}] " + "; ".join(describe_errors(error, model))) from None
    return WithCloud(build(checked)), checked.model_dump(mode="json")
